"""The memory of one forward and backward pass, found by running its own code without its arithmetic (``dry_run``).

A pass over all positions at once takes some thousand operations and is run as it is. A loop over time takes as many at
each of its steps. So a long one is run at few steps, for all that comes before and after it; what the loop itself adds
is found on short rows and few blocks, beyond the tiles and windows of its memory, where it is linear in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline import models, solvers
from pipeline.models import Architecture, ArchitectureConfig
from pipeline.models.base import build_on_meta
from pipeline.models.rlt import RLTConfig
from pipeline.models.stack import StackConfig
from pipeline.planning.dry_run import DryRun, Stretch, calls_mark, without_onednn
from pipeline.solvers import SolverConfig, loop
from pipeline.solvers.chunked import ChunkedConfig, best_length
from pipeline.training import objective as training_objective

Gradients = Literal["fresh", "kept", "taken"]
WEIGHTS, GRADIENTS = "weights", "gradients"
DIRECT = 640
"""Steps of a loop times its blocks that are run one by one."""
SHORT = (128, 192)
"""Positions of the short rows that stand for a long one: past the loop's tiles and what it keeps of attention."""
FEW_STEPS = 8
"""Steps of a long row when what surrounds its loop is wanted."""
LOOP, LOOP_BACKWARD = "loop", "loop, backward"


@dataclass(frozen=True)
class Case:
    """One kind of pass.

    Attributes:
        model: architecture and size.
        solver: solver.
        settings: values of its scheduled settings, as (name, value).
        rows: rows of a micro-batch.
        length: positions of a row.
        precision: as ``training.precision``.
        gradients: ``fresh``: there are none before, and they stay; ``kept``: those of earlier micro-batches are there,
            and these are added; ``taken``: each is taken away as soon as it is complete (into a bucket, or to the rank
            that needs it).
        documents: rows hold more than one document each.
        cuda: as on a GPU, not a CPU.
        cached_casts: weights are cast once a pass and not at each use (DeepSpeed's autocast, not Lightning's).
        arriving: what is allocated when the first gradient is complete, as (what for, bytes).
    """

    model: ArchitectureConfig
    solver: SolverConfig
    settings: tuple[tuple[str, Any], ...]
    rows: int
    length: int
    precision: str
    gradients: Gradients
    documents: bool
    cuda: bool
    cached_casts: bool = False
    arriving: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Memory:
    """Bytes that a pass needs at its peak, its weights left out.

    Attributes:
        total: at the peak.
        parts: what they are for; their sum is the total.
        phase: where in the step the peak is.
        kept: bytes alive when backward begins.
        exact: found by running the whole pass; if not, continued from short rows.
    """

    total: int
    parts: Mapping[str, int] = field(default_factory=dict)
    phase: str = ""
    kept: int = 0
    exact: bool = True


def memory_of(case: Case) -> Memory:
    """Return the memory of a pass."""
    return _memory_of(Hashed(case))


class Hashed:
    """A case as a key; its dataclasses are no keys themselves."""

    def __init__(self, case: Case) -> None:
        self.case, self._text = case, repr(case)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and self._text == other._text


@lru_cache(maxsize=256)
def _memory_of(hashed: Hashed) -> Memory:
    case = hashed.case
    steps = loop_steps(case)
    if steps * recurrent_blocks(case.model) <= DIRECT or case.length <= 2 * max(short_lengths(case)):
        return highest(measured(case), exact=True)
    return highest(continued(case), exact=False)


def loop_steps(case: Case) -> int:
    """Return the steps of the pass's fast loop over time; 0: it has none."""
    if not isinstance(case.solver, ChunkedConfig) or case.solver.loop != "fast":
        return 0
    return math.ceil(case.length / dict(case.settings).get("interval", case.solver.interval))


def recurrent_blocks(model: ArchitectureConfig) -> int:
    """Return the blocks that recur."""
    if isinstance(model, RLTConfig):
        return max(1, model.decoder_layers)
    return model.layers if isinstance(model, StackConfig) else 1


def highest(stretches: Sequence[Stretch], *, exact: bool) -> Memory:
    """Return the highest of the peaks of a step."""
    top = max(stretches, key=lambda each: sum(each.peak.values()))
    parts = {name: size for name, size in top.peak.items() if size > 0}
    begin = next(each for each in stretches if each.phase.endswith("backward"))
    return Memory(sum(parts.values()), parts, top.phase, sum(begin.entry.values()), exact)


def measured(case: Case) -> list[Stretch]:
    """Run a pass; return what it has been through, weights left out."""
    with DryRun(cuda=case.cuda) as run, ExitStack() as stack:
        if case.cuda:
            stack.enter_context(without_onednn())
        for owner, name, phase in ((loop.Loop, "forward", LOOP), (loop.Loop, "backward", LOOP)):
            stack.enter_context(calls_mark(run, owner, name, phase))
        stack.enter_context(calls_mark(run, training_objective, "mean_loss", "loss"))
        model = unfilled(case, run)
        solver = solvers.build(case.solver)
        solver.adapt(model)
        room = prepare_gradients(model, case, run)
        tokens = torch.zeros(case.rows, case.length + 1, dtype=torch.int64)
        starts = documents(case.rows, case.length) if case.documents else None
        run.begin_again()
        with solver.set_to(dict(case.settings)):
            with autocast(case):
                value = training_objective.objective(model, solver, tokens, starts).value
            run.backward = True
            value.backward()
    room.clear()
    for each in run.stretches:
        each.entry.pop(WEIGHTS, None)
        each.peak.pop(WEIGHTS, None)
    return run.stretches


def unfilled(case: Case, run: DryRun) -> Architecture:
    """Return the model, whose weights hold no numbers."""
    model = models.build(case.model)
    if case.precision == "bf16":
        model.to(torch.bfloat16)
    for parameter in model.parameters():
        run.rename(parameter, WEIGHTS)
    return model.train()


def prepare_gradients(model: nn.Module, case: Case, run: DryRun) -> list[Tensor]:
    """Let gradients be there before, or be taken away; return what will have come with the first of them."""
    arrived: list[Tensor] = []

    def complete(parameter: Tensor) -> None:
        if parameter.grad is not None:  # what sleeps in this pass has none
            run.rename(parameter.grad, GRADIENTS)
        if not arrived:
            for part, size in case.arriving:
                arrived.append(torch.empty(size, dtype=torch.uint8))
                run.rename(arrived[-1], part)
        if case.gradients == "taken":
            parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            if case.gradients == "kept":
                parameter.grad = torch.empty_like(parameter)
                run.rename(parameter.grad, GRADIENTS)
            parameter.register_post_accumulate_grad_hook(complete)
    return arrived


def autocast(case: Case) -> AbstractContextManager[Any]:
    """Return the precision of the pass."""
    if case.precision != "bf16-mixed":
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=case.cached_casts)


def documents(rows: int, length: int) -> Tensor:
    """Return the starts of two documents in each row, int64 [rows, length], at no two rows' same place."""
    index = torch.arange(length)[None].expand(rows, -1)
    second = (torch.arange(rows)[:, None] * 7 + length // 3).remainder(max(1, length - 1)) + 1
    return torch.where(index >= second, second, torch.zeros_like(second)).contiguous()


# Long loops


@dataclass(frozen=True)
class Added:
    """What a loop adds to what is there before, by what it is for.

    Attributes:
        forward: at the peak of its forward.
        kept: between forward and backward.
        backward: at the peak of its backward.
    """

    forward: dict[str, float]
    kept: dict[str, float]
    backward: dict[str, float]


def continued(case: Case) -> list[Stretch]:
    """Return what a pass with a long loop goes through."""
    around = measured(with_few_steps(case))
    # Within the loop no gradient of a parameter is complete, whatever becomes of it.
    alone = replace(case, gradients="taken", arriving=(), cached_casts=False)
    coarse, fine = added(around), _added_by_long_loop(Hashed(alone))
    kept = minus(fine.kept, coarse.kept)
    result, inside = [], False
    for each in around:
        entry: Mapping[str, float] = each.entry
        peak: Mapping[str, float] = each.peak
        if each.phase == LOOP:
            peak, inside = plus(each.entry, fine.forward), True
        elif each.phase == LOOP_BACKWARD:
            entry, inside = plus(each.entry, kept), False
            peak = plus(entry, fine.backward)
        elif inside:
            entry, peak = plus(each.entry, kept), plus(each.peak, kept)
        result.append(Stretch(each.phase, rounded(entry), rounded(peak)))
    return result


def added(stretches: Sequence[Stretch]) -> Added:
    """Return what the loop of a pass adds."""
    phases = [each.phase for each in stretches]
    forward, backward = phases.index(LOOP), phases.index(LOOP_BACKWARD)
    first, last = stretches[forward], stretches[backward]
    return Added(
        minus(first.peak, first.entry),
        minus(stretches[forward + 1].entry, first.entry),
        minus(last.peak, last.entry),
    )


def added_by_long_loop(case: Case) -> Added:
    """Return what the loop adds, from short rows and few blocks: linear in the length and in the blocks."""
    blocks = recurrent_blocks(case.model)
    lengths, counts = short_lengths(case), fewer_blocks(case.model)
    weights, found = [], []
    for length in lengths:
        for count in counts:
            model = case.model if count == blocks else with_blocks(case.model, count)
            small = replace(case, model=model, length=length, solver=segmented(case))
            with fewer_collected_rows(length / case.length):
                found.append(added(measured(small)))
            weights.append(lagrange(lengths, length, case.length) * lagrange(counts, count, blocks))
    return Added(
        weighted([each.forward for each in found], weights),
        weighted([each.kept for each in found], weights),
        weighted([each.backward for each in found], weights),
    )


@contextmanager
def fewer_collected_rows(share: float) -> Iterator[None]:
    """Let buffers that hold so many rows and no more hold a share of them, so that they too grow with the length."""
    before, loop.COLLECTED_ROWS = loop.COLLECTED_ROWS, max(1, round(share * loop.COLLECTED_ROWS))
    try:
        yield
    finally:
        loop.COLLECTED_ROWS = before


@lru_cache(maxsize=256)
def _added_by_long_loop(hashed: Hashed) -> Added:
    return added_by_long_loop(hashed.case)


def with_few_steps(case: Case) -> Case:
    """Return the same pass with a loop of few steps."""
    interval = max(interval_of(case), -(-case.length // FEW_STEPS))
    return replace(case, settings=tuple({**dict(case.settings), "interval": interval}.items()))


def interval_of(case: Case) -> int:
    """Return the positions of a chunk."""
    assert isinstance(case.solver, ChunkedConfig)
    return int(dict(case.settings).get("interval", case.solver.interval))


def segment_of(case: Case) -> int:
    """Return the positions of a segment that is computed again; 1: none is."""
    solver = case.solver
    assert isinstance(solver, ChunkedConfig)
    if not solver.activation_checkpointing:
        return 1
    return solver.segment_length or best_length(build_on_meta(case.model), interval_of(case), case.length)


def short_lengths(case: Case) -> tuple[int, int]:
    """Return two lengths that hold whole segments and whole chunks of the loop, beyond what is irregular in it."""
    interval, segment = interval_of(case), segment_of(case)
    whole = max(1, segment // interval) * interval
    first, second = (-(-length // whole) * whole for length in SHORT)
    return first, max(second, first + whole)


def segmented(case: Case) -> SolverConfig:
    """Return the solver with segments as long as in the long row."""
    assert isinstance(case.solver, ChunkedConfig)
    if not case.solver.activation_checkpointing:
        return case.solver
    return replace(case.solver, segment_length=segment_of(case))


def fewer_blocks(model: ArchitectureConfig) -> Sequence[int]:
    """Return numbers of blocks that stand for all; one number: nothing less does."""
    blocks = recurrent_blocks(model)
    if isinstance(model, RLTConfig):
        regular = not model.tied_stacks and model.memory_groups == 1
    else:
        regular = isinstance(model, StackConfig) and not model.full_attention_every and not model.value_embeddings
    return (1, 2) if regular and blocks > 2 else (blocks,)


def with_blocks(model: ArchitectureConfig, count: int) -> ArchitectureConfig:
    """Return the model with so many recurrent blocks."""
    if isinstance(model, RLTConfig):
        return replace(model, decoder_layers=count)
    assert isinstance(model, StackConfig)
    changes: dict[str, Any] = {"layers": count}
    source = getattr(model, "source_layer", None)
    if source is not None and source > count:
        changes["source_layer"] = count
    return replace(model, **changes)


def lagrange(nodes: Sequence[int], node: int, at: int) -> float:
    """Return the polynomial that is 1 at one of the nodes and 0 at the others."""
    return math.prod((at - other) / (node - other) for other in nodes if other != node)


def weighted(values: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Return the sum of values times weights."""
    result: dict[str, float] = {}
    for value, weight in zip(values, weights, strict=True):
        for name, size in value.items():
            result[name] = result.get(name, 0.0) + weight * size
    return result


def plus(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def minus(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the differences."""
    return {name: one.get(name, 0) - other.get(name, 0) for name in {**one, **other}}


def rounded(parts: Mapping[str, float]) -> dict[str, int]:
    """Return whole bytes, none below 0."""
    return {name: max(0, round(size)) for name, size in parts.items()}


def settings_of_stages(stages: Mapping[str, Sequence[tuple[float, Any]]]) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield each combination of values that scheduled settings take during the run, once."""
    from pipeline.solvers.schedules import combinations, stages_at

    seen = set()
    for begin in sorted({0.0, *(at for each in stages.values() for at, _ in each)}):
        for _, values in combinations(stages_at(stages, begin)):
            key = tuple(sorted(values.items()))
            if key not in seen:
                seen.add(key)
                yield key
