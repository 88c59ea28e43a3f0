"""Every architecture under every solver that fits it, trained alike on the embedded corpus.

The models have about the same parameters, the same data in the same order, batch, optimiser and steps. Loss and bits
per byte are those of the validation split, in the order of training (bits per byte also in the exact recurrence), and
the time of a step is a ratio to the plain transformer's, the two alternating in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline import solvers
from pipeline.bench.options import Options
from pipeline.bench.steps import as_published
from pipeline.bench.table import Column, Row, Table
from pipeline.bench.timing import alternate, medians
from pipeline.config import AdamWConfig
from pipeline.data.loader import EvaluationLoader, StreamLoader
from pipeline.data.manifest import Manifest
from pipeline.data.stream import EvaluationStream, TrainStream
from pipeline.data.tokenizer import load_token_bytes
from pipeline.errors import ConfigError
from pipeline.evaluation.loss import LossSums, evaluate
from pipeline.models import ARCHITECTURES, Architecture, ArchitectureConfig
from pipeline.models.base import count_parameters
from pipeline.models.crt import CRTConfig
from pipeline.models.fbt import FBTConfig
from pipeline.models.lrt import LRTConfig
from pipeline.models.rlt import RLTConfig
from pipeline.models.transformer import TransformerConfig
from pipeline.progress import Progress
from pipeline.solvers import SOLVERS, Solver, SolverConfig
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.interleaved import InterleavedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.solvers.unrolled import UnrolledConfig
from pipeline.training import optimizers
from pipeline.training.drawing import draw_weights
from pipeline.training.objective import objective

DATA = Path("data/sotu")
WIDTH, HEADS = 96, 4
RATE, WARMUP = 4e-3, 20
REPEATS = 5

ORDERS: tuple[SolverConfig, ...] = (
    ParallelConfig("parallel"),
    ChunkedConfig("chunked", interval=16),
    ChunkedConfig("chunked", interval=1),
    UnrolledConfig("unrolled", passes=3),
    InterleavedConfig("interleaved", subsets=2),
)


@dataclass(frozen=True)
class Pair:
    """One line of the table.

    Attributes:
        architecture: name.
        solver: name and settings.
        parameters: number of parameters.
        loss: validation loss in the order of training, in nats.
        bits_per_byte: likewise.
        sequential_bits_per_byte: in the exact recurrence.
        step_ratio: median time of a training step over the transformer's.
    """

    architecture: str
    solver: str
    parameters: int
    loss: float
    bits_per_byte: float
    sequential_bits_per_byte: float
    step_ratio: float


def configs(vocab_size: int) -> list[ArchitectureConfig]:
    """Return the five architectures in sizes that are alike."""
    shared: dict[str, Any] = {"vocab_size": vocab_size, "width": WIDTH, "heads": HEADS, "embedding_std": 0.1}
    return [
        TransformerConfig("transformer", layers=4, **shared),
        CRTConfig("crt", layers=4, correction_width=WIDTH, **shared),
        LRTConfig("lrt", layers=4, **shared),
        RLTConfig("rlt", encoder_layers=2, decoder_layers=2, window=16, ffn_width=192, **shared),
        FBTConfig("fbt", layers=4, **shared),
    ]


def pairs(config: ArchitectureConfig) -> Iterator[Solver]:
    """Yield the solvers that fit an architecture."""
    for order in ORDERS:
        try:
            SOLVERS[order.name].check_fits(order, ARCHITECTURES[config.architecture])
        except ConfigError:
            continue
        yield solvers.build(as_published(order, config.architecture))


@dataclass(frozen=True)
class Shape:
    """How long and on what the pairs are trained and evaluated.

    Attributes:
        steps: optimiser steps of each.
        length: positions of a row.
        rows: rows of a batch.
        evaluation_tokens: tokens of the validation split to evaluate on.
    """

    steps: int
    length: int
    rows: int
    evaluation_tokens: int


SHAPES = {"short": Shape(120, 64, 32, 8192), "tiny": Shape(2, 17, 2, 34)}

COLUMNS = (
    Column("architecture", "architecture", width=13, text=True),
    Column("solver", "solver", width=24, text=True),
    Column("parameters", "parameters", ",d", width=11),
    Column("loss", "loss", ".3f", width=8),
    Column("bits_per_byte", "bpb", ".3f", width=8),
    Column("sequential_bits_per_byte", "seq. bpb", ".3f"),
    Column("step_ratio", "step", ".2f", width=7),
)


def run(options: Options) -> list[Row]:
    """Train and measure every pair, print a table, return its rows: those of ``Pair``, with the name of the shape."""
    rows: list[Row] = []
    for name, shape in options.choose(SHAPES).items():
        found = compare(options.data or DATA, shape, timings=options.repeats or REPEATS)
        rows += [{"shape": name, **row} for row in found]
    return rows


def compare(data: Path, shape: Shape, *, timings: int) -> list[Row]:
    """Train and measure every pair on a prepared corpus, print a table, return its rows.

    Args:
        data: prepared corpus.
        shape: how long and on what.
        timings: timed steps of each, of which the median counts.
    """
    bench = PairsBench(Manifest.load(data), shape.steps, shape.length, shape.rows, shape.evaluation_tokens, timings)
    print(
        f"width {WIDTH}, {shape.steps} steps of {shape.rows} rows of {shape.length} tokens, AdamW at {RATE}; "
        f"loss of counting tokens alone: {bench.unigram_entropy():.3f}"
    )
    table = Table(COLUMNS).begin()
    for config in configs(bench.manifest.tokenizer.vocab_size):
        for solver in pairs(config):
            table.add(vars(bench.measure(config, solver)))
    return table.rows


class PairsBench:
    """The data and the measure of all pairs; see ``Shape`` and ``compare`` for the arguments."""

    def __init__(
        self, manifest: Manifest, steps: int, length: int, rows: int, evaluation_tokens: int, timings: int
    ) -> None:
        self.manifest = manifest
        self._steps, self._length, self._rows, self._timings = steps, length, rows, timings
        self._evaluation = EvaluationStream(
            manifest,
            "validation",
            sequence_length=length,
            document_boundaries="continue",
            rows_per_micro_batch=rows,
            limit_tokens=evaluation_tokens,
        )
        self._token_bytes = torch.from_numpy(load_token_bytes(manifest))
        self._baseline = self._made(configs(manifest.tokenizer.vocab_size)[0])

    def measure(self, config: ArchitectureConfig, solver: Solver) -> Pair:
        """Train one pair and measure it."""
        model = self._made(config)
        solver.adapt(model)
        name = str(solver)
        self.train(model, solver, f"{config.architecture} {name}")
        trained = self._evaluate(model, solver)
        exact = solvers.sequential(solver)
        sequential = trained if str(exact) == name else self._evaluate(model, exact)
        return Pair(
            config.architecture,
            name,
            count_parameters(model),
            trained.loss,
            trained.bits_per_byte,
            sequential.bits_per_byte,
            self._ratio(model, solver),
        )

    def unigram_entropy(self) -> float:
        """Return the loss, in nats a token, of a model that knows how often each token occurs in training, no more."""
        tokens = torch.cat([batch.flatten() for batch in self._batches()])
        counts = torch.bincount(tokens).double()
        share = counts[counts > 0] / counts.sum()
        return float(-(share * share.log()).sum())

    def train(self, model: Architecture, solver: Solver, label: str) -> None:
        """Train a model."""
        optimizer = optimizers.build(AdamWConfig("adamw"), model, RATE)
        model.train()
        torch.manual_seed(0)
        with Progress(self._steps, "steps", label) as progress:
            for step, tokens in enumerate(self._batches()):
                share = min(1.0, (step + 1) / WARMUP, (self._steps - step) / (0.3 * self._steps))
                for group in optimizer.param_groups:
                    group["lr"] = RATE * share
                loss = objective(model, solver, tokens, None).value
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                progress.advance(1)
        model.eval()

    def _made(self, config: ArchitectureConfig) -> Architecture:
        model = ARCHITECTURES[config.architecture](config)
        draw_weights(model, 0)
        return model

    def _batches(self) -> Iterator[Tensor]:
        """Yield the tokens of every step, the same each time."""
        stream = TrainStream(
            self.manifest,
            "train",
            sequence_length=self._length,
            seed=0,
            document_boundaries="continue",
            rows_per_batch=self._rows,
            rows_per_micro_batch=self._rows,
            rank=0,
            world_size=1,
            total_samples=self._steps * self._rows,
        )
        for batch in StreamLoader(stream, 0, pin_memory=False):
            yield batch["tokens"]

    def _evaluate(self, model: Architecture, solver: Solver) -> LossSums:
        return evaluate(model, solver, EvaluationLoader(self._evaluation), self._token_bytes)

    def _ratio(self, model: Architecture, solver: Solver) -> float:
        """Return the time of a step over that of the transformer, which takes turns with it."""
        plain = solvers.build(ParallelConfig("parallel"))
        tokens = next(self._batches())

        def step(each: Architecture, order: Solver) -> None:
            objective(each, order, tokens, None).value.backward()

        steps = {"pair": partial(step, model, solver), "baseline": partial(step, self._baseline, plain)}
        seconds = medians(alternate(steps, self._timings, f"{model.config.architecture} {solver}, time"))
        return seconds["pair"] / seconds["baseline"]
