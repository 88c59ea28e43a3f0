"""What activation checkpointing in segments of time saves, and what it costs.

Each row is one forward and backward of the same RLT on the same tokens, the loop at B = 1; segments of several lengths
against keeping everything. Memory is the most bytes of tensors alive at once (``live_memory``), without weights.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from pipeline import models, solvers
from pipeline.bench.live_memory import LiveMemory
from pipeline.evaluation.loss import token_losses
from pipeline.models import Architecture
from pipeline.models.rlt import RLTConfig
from pipeline.solvers import Solver
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.training.module import draw_weights

ROWS, VOCAB = 4, 512
Row = dict[str, Any]


def run(shapes: tuple[tuple[int, int], ...] = ((128, 64), (128, 256), (512, 256)), repeats: int = 3) -> list[Row]:
    """Measure, print a table, return its rows.

    Args:
        shapes: pairs of width and positions in a row, T.
        repeats: timed steps of each setting, alternating; the median counts.
    """
    print(f"RLT 2+2, {ROWS} rows, B = 1, float32, {torch.get_num_threads()} threads; segment 0 keeps everything")
    print(f"{'width':>6}{'T':>6}{'segment':>9}{'peak MB':>10}{'of none':>9}{'step s':>9}{'of none':>9}")
    return [row for width, length in shapes for row in compare(width, length, repeats)]


def compare(width: int, length: int, repeats: int) -> list[Row]:
    """Measure all segment lengths at one shape; print and return a row for each."""
    config = RLTConfig("rlt", vocab_size=VOCAB, width=width, heads=4, encoder_layers=2, decoder_layers=2, window=8)
    model = models.build(config)
    draw_weights(model, 0)
    tokens = torch.randint(VOCAB, (ROWS, length + 1), generator=torch.Generator().manual_seed(0))
    chosen = {segment: solver(segment) for segment in sorted({0, 4, math.isqrt(length), length // 4})}
    seconds: dict[int, list[float]] = {segment: [] for segment in chosen}
    for _ in range(repeats):
        for segment, each in chosen.items():
            seconds[segment].append(timed(model, each, tokens))
    rows: list[Row] = []
    for segment, each in chosen.items():
        row: Row = {
            "width": width,
            "length": length,
            "segment": segment,
            "peak_bytes": peak(model, each, tokens),
            "seconds": statistics.median(seconds[segment]),
        }
        rows.append(row)
        memory, time_ = (row[name] / rows[0][name] for name in ("peak_bytes", "seconds"))
        print(
            f"{width:>6}{length:>6}{segment:>9}{row['peak_bytes'] / 1e6:>10.1f}{memory:>9.0%}"
            f"{row['seconds']:>9.3f}{time_:>9.2f}"
        )
    return rows


def solver(segment: int) -> Solver:
    """Return the exact recurrence, recomputed in segments of that many positions; 0 keeps everything."""
    return solvers.build(ChunkedConfig("chunked", activation_checkpointing=segment > 0, segment_length=segment))


def step(model: Architecture, chosen: Solver, tokens: torch.Tensor) -> None:
    """Run forward and backward."""
    chosen.adapt(model)
    states = chosen.run(model, tokens[:, :-1]).states
    token_losses(model, states, tokens[:, 1:]).mean().backward()


def timed(model: Architecture, chosen: Solver, tokens: torch.Tensor) -> float:
    """Return the seconds of a step."""
    begin = time.perf_counter()
    step(model, chosen, tokens)
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return seconds


def peak(model: Architecture, chosen: Solver, tokens: torch.Tensor) -> int:
    """Return the most bytes alive at once in a step, gradients of the weights included."""
    with LiveMemory() as memory:
        step(model, chosen, tokens)
    model.zero_grad()
    return memory.peak
