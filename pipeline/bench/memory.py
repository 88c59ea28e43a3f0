"""What activation checkpointing in segments of time saves, and what it costs.

Each row is one forward and backward of the same RLT on the same tokens, the loop at B = 1; segments of several lengths
against keeping everything. Memory is the most bytes of tensors alive at once in a step (``live_memory``), without
weights and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from pipeline import solvers
from pipeline.bench.live_memory import LiveMemory
from pipeline.bench.options import Options
from pipeline.bench.steps import made, random_tokens
from pipeline.bench.table import Column, Row, Table
from pipeline.bench.timing import alternate, medians
from pipeline.models import Architecture
from pipeline.models.rlt import RLTConfig
from pipeline.progress import Progress
from pipeline.solvers import Solver
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.training.objective import objective

REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """One size of an RLT, and of its batch.

    Attributes:
        width: width of the model.
        length: inputs of a row, T.
        rows: rows of a step.
        segments: lengths of a segment, in positions; 0 keeps everything and comes first, then comes the default.
        blocks: of the encoder, and of the decoder.
        vocabulary: tokens.
    """

    width: int
    length: int
    rows: int
    segments: tuple[int, ...]
    blocks: int = 2
    vocabulary: int = 512


SHAPES = {
    "t256": Shape(128, 256, 4, (0, 16, 64)),
    "t256_wide": Shape(512, 256, 4, (0, 16, 64)),
    "t1024": Shape(128, 1024, 4, (0, 24, 128)),
    "t1024_deep": Shape(256, 1024, 4, (0, 24, 128), blocks=4, vocabulary=4096),
    "t4096": Shape(128, 4096, 2, (0, 48, 256)),
    "tiny": Shape(32, 16, 2, (0, 4)),
}

COLUMNS = (
    Column("shape", "shape", width=11, text=True),
    Column("width", "width", width=6),
    Column("length", "T", width=6),
    Column("rows", "rows", width=6),
    Column("segment", "segment", width=9),
    Column("peak_bytes", "peak MB", ".1f", scale=1e-6),
    Column("memory_ratio", "of none", ".0%", width=9),
    Column("seconds", "s a step", ".3f"),
    Column("time_ratio", "of none", ".2f", width=9),
)


def run(options: Options) -> list[Row]:
    """Measure, print a table, return its rows.

    A row holds shape, width, length, rows, segment (0: everything is kept), peak_bytes, memory_ratio, seconds (median
    of ``runs``) and time_ratio; the ratios are to segment 0.
    """
    print("RLT, B = 1; segment 0 keeps everything")
    table = Table(COLUMNS).begin()
    for name, shape in options.choose(SHAPES).items():
        measure(name, shape, options.repeats or REPEATS, table)
    return table.rows


def measure(name: str, shape: Shape, repeats: int, table: Table) -> None:
    """Measure all segment lengths at one shape and add a row for each."""
    config = RLTConfig(
        "rlt",
        vocab_size=shape.vocabulary,
        width=shape.width,
        heads=4,
        encoder_layers=shape.blocks,
        decoder_layers=shape.blocks,
    )
    model = made(config)
    tokens = random_tokens(shape.rows, shape.length, shape.vocabulary)
    chosen = {str(segment): solver(segment) for segment in shape.segments}
    runs = alternate({key: partial(step, model, each, tokens) for key, each in chosen.items()}, repeats, name)
    seconds, peaks = medians(runs), {}
    with Progress(len(chosen), "segments", f"{name}, memory") as progress:
        for key, each in chosen.items():
            peaks[key] = peak(model, each, tokens)
            progress.advance(1)
    whole = str(shape.segments[0])
    for segment in shape.segments:
        key = str(segment)
        table.add(
            {
                "shape": name,
                "width": shape.width,
                "length": shape.length,
                "rows": shape.rows,
                "segment": segment,
                "peak_bytes": peaks[key],
                "memory_ratio": peaks[key] / peaks[whole],
                "seconds": seconds[key],
                "time_ratio": seconds[key] / seconds[whole],
                "runs": runs[key],
            }
        )


def solver(segment: int) -> Solver:
    """Return the exact recurrence, recomputed in segments of that many positions; 0 keeps everything."""
    return solvers.build(ChunkedConfig("chunked", activation_checkpointing=segment > 0, segment_length=segment))


def step(model: Architecture, chosen: Solver, tokens: torch.Tensor) -> None:
    """Run forward and backward, and let the gradients go."""
    take_gradients(model, chosen, tokens)
    model.zero_grad()


def peak(model: Architecture, chosen: Solver, tokens: torch.Tensor) -> int:
    """Return the most bytes alive at once in a step, without weights and their gradients."""
    with LiveMemory() as memory:
        take_gradients(model, chosen, tokens)
    found = memory.peak_without(each.grad for each in model.parameters() if each.grad is not None)
    model.zero_grad()
    return found


def take_gradients(model: Architecture, chosen: Solver, tokens: torch.Tensor) -> None:
    """Run forward and backward."""
    chosen.adapt(model)
    objective(model, chosen, tokens, None).value.backward()
