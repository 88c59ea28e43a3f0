"""``backfeed describe``: what a configuration amounts to, counted on the meta device, where nothing is computed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pipeline import solvers
from pipeline.config import Config
from pipeline.data.manifest import Manifest
from pipeline.errors import ConfigError, DataError
from pipeline.files import write_atomically
from pipeline.models import Architecture, ArchitectureConfig
from pipeline.models.base import build_on_meta, count_parameters
from pipeline.solvers import Solver, flops_by_stage, mean_over_stages
from pipeline.solvers.parallel import ParallelConfig

BYTES = {"float32": 4, "bf16-mixed": 2}


@dataclass(frozen=True)
class Description:
    """Counts of one configuration.

    Attributes:
        run: its name.
        architecture: its architecture.
        solver: its solver.
        parameters: all parameters.
        non_embedding_parameters: those that are no embedding and no head.
        parts: parameters of each part.
        sequence_length: positions of a row, T.
        training_flops: FLOPs of a token in training, forward once and backward twice, recomputation left out; averaged
            over the run's schedules.
        training_flops_stages: the same for each stage of the schedules: (fraction of the run where it begins, FLOPs).
        run_flops: FLOPs of the whole run.
        decoding_flops: FLOPs of a token decoded after T positions, in the exact recurrence.
        state_bytes: what decoding hands on beside keys and values, for one sequence, in the precision of training.
        cache_bytes: keys and values after T positions, likewise.
        cache_bytes_per_position: what position T added to them.
    """

    run: str
    architecture: str
    solver: str
    parameters: int
    non_embedding_parameters: int
    parts: dict[str, int]
    sequence_length: int
    training_flops: float
    training_flops_stages: list[tuple[float, float]]
    run_flops: float
    decoding_flops: float
    state_bytes: int
    cache_bytes: int
    cache_bytes_per_position: int


def describe(config: Config) -> Description:
    """Count a configuration.

    Raises:
        ConfigError: the size of the vocabulary is neither set nor known from the data.
    """
    model = build_on_meta(with_vocabulary(config))
    solver, length, training = solvers.build(config.solver), config.data.sequence_length, config.training
    stages = [(at, 3 * flops) for at, flops in flops_by_stage(solver, model, config.stages, length)]
    mean = mean_over_stages(stages)
    width = BYTES[training.precision]
    cache, before = (width * cache_values(model, positions) for positions in (length, length - 1))
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return Description(
        run=config.run.name,
        architecture=config.model.architecture,
        solver=config.solver.name,
        parameters=count_parameters(model),
        non_embedding_parameters=count_parameters(model) - count_parameters(*embeddings, model.readout_layer.head),
        parts=model.parts(),
        sequence_length=length,
        training_flops=mean,
        training_flops_stages=stages,
        run_flops=mean * training.steps * training.batch_tokens,
        decoding_flops=decoding_flops(model, solver, length),
        state_bytes=width * (config.model.width if solver.feeds_back else 0),
        cache_bytes=cache,
        cache_bytes_per_position=cache - before,
    )


def with_vocabulary(config: Config) -> ArchitectureConfig:
    """Return the model's settings with the size of the vocabulary, taken from the data if need be; see ``describe``."""
    if config.model.vocab_size is not None:
        return config.model
    try:
        return replace(config.model, vocab_size=Manifest.load(config.data.path).tokenizer.vocab_size)
    except DataError as error:
        raise ConfigError(f"set model.vocab_size, since it cannot be read from the data: {error}") from None


def decoding_flops(model: Architecture, solver: Solver, length: int) -> float:
    """Return the FLOPs of the token at position ``length`` (from 1) in the exact recurrence."""
    whole, before = model.flops(length), model.flops(max(1, length - 1))
    rest = length - 1
    last = length * (whole.prepare + whole.advance) - (rest * (before.prepare + before.advance) if rest else 0)
    if solver.feeds_back:
        last += whole.prepare_feedback + whole.fed_position + whole.fed_state
    return last + whole.readout


def cache_values(model: Architecture, positions: int) -> int:
    """Return the numbers among keys and values that one sequence holds after so many positions."""
    if not positions:
        return 0
    parallel = solvers.build(ParallelConfig(name="parallel"))
    tokens = torch.zeros(1, positions, dtype=torch.int64, device="meta")
    with torch.device("meta"), torch.no_grad():
        carry = parallel.run(model, tokens, carry=parallel.new_carry(model, 1)).carry
    assert carry is not None
    return sum(each.numel() for memory in carry.memory.values() for each in [*memory.keys, *memory.values])


def table(found: Description) -> str:
    """Return a description as text."""
    lines = [f"{found.run}: {found.architecture} under {found.solver}, rows of {found.sequence_length:,} tokens", ""]
    lines += [f"{'parameters':<28}{found.parameters:>18,}"]
    lines += [f"  {name:<26}{count:>18,}{count / found.parameters:>9.1%}" for name, count in found.parts.items()]
    lines += [f"{'  not embedding or head':<28}{found.non_embedding_parameters:>18,}", ""]
    lines += [f"{'training FLOPs a token':<28}{found.training_flops:>18.4g}  (forward and backward)"]
    if len(found.training_flops_stages) > 1:
        lines += [f"  {f'from {at:.1%} of the run':<26}{flops:>18.4g}" for at, flops in found.training_flops_stages]
    lines += [
        f"{'training FLOPs of the run':<28}{found.run_flops:>18.4g}",
        f"{'decoding FLOPs a token':<28}{found.decoding_flops:>18.4g}  (after {found.sequence_length:,} positions)",
        "",
        f"{'state bytes a sequence':<28}{found.state_bytes:>18,}",
        f"{'cache bytes a sequence':<28}{found.cache_bytes:>18,}  (after {found.sequence_length:,} positions)",
        f"{'  added by the last':<28}{found.cache_bytes_per_position:>18,}",
    ]
    return "\n".join(lines)


def save(found: Description, path: Path) -> None:
    """Write a description as JSON."""
    write_atomically(path, json.dumps(asdict(found), indent=1) + "\n")
