"""What Lightning's loop adds to a training step: callbacks, logging and its own bookkeeping.

A run as ``backfeed train`` assembles it, without validation and checkpoints, takes turns step by step with a bare loop
over the same model, stream of data, optimiser and schedule: batch, loss, gradients, clipping, step. The overhead is the
median of the differences between neighbouring steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from pipeline import models, solvers
from pipeline.bench.options import Options
from pipeline.bench.random_text import prepared
from pipeline.bench.table import Column, Row, Table
from pipeline.config import (
    AdamWConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
    WandbConfig,
    WSDConfig,
)
from pipeline.data.loader import StreamLoader
from pipeline.data.manifest import Manifest
from pipeline.data.stream import TrainStream
from pipeline.models.rlt import RLTConfig
from pipeline.runs.folder import RunFolder
from pipeline.solvers import SolverConfig
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.training import learning_rates, optimizers
from pipeline.training.assembly import Assembly
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.drawing import draw_weights
from pipeline.training.module import PretrainingModule
from pipeline.training.objective import objective
from pipeline.training.train import first_weights, quieten

REPEATS = 30
WARM_UP = 3


@dataclass(frozen=True)
class Shape:
    """One size and order of evaluation.

    Attributes:
        model: architecture and width.
        solver: how it is evaluated.
        rows: rows of a step.
        length: inputs of a row.
    """

    model: RLTConfig
    solver: SolverConfig
    rows: int
    length: int


DEMO = RLTConfig(  # configs/rlt_demo.yaml
    "rlt", vocab_size=2048, width=192, heads=4, encoder_layers=2, decoder_layers=2, window=16, embedding_std=0.1
)
SHAPES = {
    "demo": Shape(DEMO, ChunkedConfig("chunked", interval=1), 32, 128),
    "demo_b64": Shape(DEMO, ChunkedConfig("chunked", interval=64), 32, 128),
    "demo_none": Shape(DEMO, ParallelConfig("parallel"), 32, 128),
    "tiny": Shape(replace(DEMO, width=16, heads=2, vocab_size=257), ChunkedConfig("chunked", interval=16), 2, 32),
}

COLUMNS = (
    Column("shape", "shape", width=11, text=True),
    Column("solver", "solver", width=21, text=True),
    Column("bare_seconds", "bare ms", ".1f", scale=1e3),
    Column("lightning_seconds", "Lightning ms", ".1f", width=14, scale=1e3),
    Column("overhead_seconds", "overhead ms", ".2f", width=13, scale=1e3),
    Column("overhead_share", "of a step", ".1%", width=11),
)


def run(options: Options) -> list[Row]:
    """Measure, print a table, return its rows.

    A row holds shape, solver, rows, length, bare_seconds and lightning_seconds (medians of ``bare_runs`` and
    ``lightning_runs``), overhead_seconds and overhead_share (of bare_seconds).
    """
    quieten()
    chosen = options.choose(SHAPES)
    with tempfile.TemporaryDirectory() as folder:
        manifest = prepared(Path(folder))
        table = Table(COLUMNS).begin()
        for name, shape in chosen.items():
            measure(name, shape, options.repeats or REPEATS, manifest, table)
    return table.rows


def measure(name: str, shape: Shape, repeats: int, manifest: Manifest, table: Table) -> None:
    """Measure one shape and add its row."""
    config = run_config(name, shape, WARM_UP + repeats + 1, manifest)
    bare, lightning = take_turns(config, manifest)
    bare, lightning = bare[WARM_UP:], lightning[WARM_UP:]
    overhead = statistics.median(ours - plain for ours, plain in zip(lightning, bare, strict=True))
    table.add(
        {
            "shape": name,
            "solver": " ".join([config.solver.name, *(f"{k}={v}" for k, v in interval(config.solver).items())]),
            "rows": shape.rows,
            "length": shape.length,
            "bare_seconds": statistics.median(bare),
            "bare_runs": bare,
            "lightning_seconds": statistics.median(lightning),
            "lightning_runs": lightning,
            "overhead_seconds": overhead,
            "overhead_share": overhead / statistics.median(bare),
        }
    )


def interval(solver: SolverConfig) -> dict[str, Any]:
    """Return what tells a solver's setting in the table."""
    return {"interval": solver.interval} if isinstance(solver, ChunkedConfig) else {}


def run_config(name: str, shape: Shape, steps: int, manifest: Manifest) -> Config:
    """Return a run of so many steps, as the demo's but for validation, checkpoints and Weights & Biases."""
    batch = shape.rows * shape.length
    return Config(
        run=RunConfig(name=name, root=str(manifest.folder / "runs")),
        data=DataConfig(path=str(manifest.folder), sequence_length=shape.length),
        model=shape.model,
        solver=shape.solver,
        optimizer=AdamWConfig("adamw"),
        learning_rate=WSDConfig("wsd", peak=1e-4, decay_fraction=0.3),
        training=TrainingConfig(
            # One more than is run: after the last there is a checkpoint.
            tokens=(steps + 1) * batch,
            batch_tokens=batch,
            micro_batch_tokens=batch,
            accelerator="cpu",
            threads=torch.get_num_threads(),
        ),
        validation=ValidationConfig(every_steps=0),
        checkpoint=CheckpointConfig(every_steps=steps + 1),
        logging=LoggingConfig(every_steps=5, wandb=WandbConfig(mode="disabled")),
    )


class TakingTurns(StepCallback):
    """After every step of the run, takes one of the bare loop's, and times both. It comes last of the callbacks.

    Args:
        bare: the bare loop's steps.
        steps: steps of the run after which it stops.

    Attributes:
        bare_seconds: time of each step of the bare loop.
        lightning_seconds: time of each step of the run, from the end of the bare step before; the first is left out.
    """

    def __init__(self, bare: Iterator[None], steps: int) -> None:
        self._bare = bare
        self._steps = steps
        self._since: float | None = None
        self.bare_seconds: list[float] = []
        self.lightning_seconds: list[float] = []

    def on_step_end(self, trainer: Any, module: PretrainingModule, step: int) -> None:
        """Stop the clock, take a bare step, and start it again."""
        begin = time.perf_counter()
        if self._since is not None:
            self.lightning_seconds.append(begin - self._since)
        next(self._bare)
        self._since = time.perf_counter()
        if len(self.lightning_seconds) > len(self.bare_seconds):
            self.bare_seconds.append(self._since - begin)
        trainer.should_stop = step >= self._steps


def take_turns(config: Config, manifest: Manifest) -> tuple[list[float], list[float]]:
    """Return the seconds of every step of the bare loop and of the run, in pairs."""
    folder = RunFolder(config.run.folder)
    folder.open(config, "never", manifest.fingerprint)
    try:
        folder.record(config)
        assembly = Assembly(config, folder, manifest, first_weights(config, manifest, resumed=False))
        assembly.start_logging()
        turns = TakingTurns(bare_steps(config, manifest), config.training.steps - 1)
        assembly.trainer.callbacks.append(turns)  # type: ignore[attr-defined]
        try:
            assembly.trainer.fit(assembly.module, train_dataloaders=assembly.loader)
        finally:
            assembly.close()
        if assembly.interruption.signal:  # the run took it for itself, but it was meant for all of this
            raise KeyboardInterrupt
    finally:
        folder.close()
    return turns.bare_seconds, turns.lightning_seconds


def bare_steps(config: Config, manifest: Manifest) -> Iterator[None]:
    """Train the same run without Lightning, a step each time."""
    model = models.build(config.model)
    draw_weights(model, config.run.seed)
    solver = solvers.build(config.solver)
    solver.adapt(model)
    optimizer = optimizers.build(config.optimizer, model, config.learning_rate.peak)
    batch, total = config.training.batch_tokens, config.training.steps * config.training.batch_tokens
    scheduler = LambdaLR(optimizer, lambda done: learning_rates.factor(config.learning_rate, (done + 1) * batch, total))
    model.train()
    for each in StreamLoader(stream(config, manifest)):
        objective(model, solver, each["tokens"], each["starts"]).value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


def stream(config: Config, manifest: Manifest) -> TrainStream:
    """Return the stream of a run."""
    length, batch = config.data.sequence_length, config.training.batch_tokens
    return TrainStream(
        manifest,
        config.data.train_split,
        sequence_length=length,
        seed=config.run.seed,
        document_boundaries=config.data.document_boundaries,
        rows_per_batch=batch // length,
        rows_per_micro_batch=batch // length,
        total_samples=config.training.steps * batch // length,
    )
