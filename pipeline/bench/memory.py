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


def run(lengths: tuple[int, ...] = (64, 256), repeats: int = 3) -> list[dict[str, Any]]:
    """Measure, print a table, return its rows.

    Args:
        lengths: positions in a row, T.
        repeats: timed steps of each setting, alternating; the median counts.
    """
    config = RLTConfig("rlt", vocab_size=VOCAB, width=128, heads=4, encoder_layers=2, decoder_layers=2, window=8)
    model = models.build(config)
    draw_weights(model, 0)
    print(f"RLT 2+2, width 128, {ROWS} rows, B = 1, float32, {torch.get_num_threads()} threads")
    print(f"{'T':>6}{'segment':>9}{'peak MB':>10}{'of none':>9}{'step s':>9}{'of none':>9}")
    rows = []
    for length in lengths:
        segments = sorted({0, 4, math.isqrt(length), length // 4})
        chosen = {segment: solver(segment) for segment in segments}
        tokens = torch.randint(VOCAB, (ROWS, length + 1), generator=torch.Generator().manual_seed(0))
        seconds: dict[int, list[float]] = {segment: [] for segment in segments}
        for _ in range(repeats):
            for segment, each in chosen.items():
                seconds[segment].append(timed(model, each, tokens))
        base: dict[str, Any] = {}
        for segment, each in chosen.items():
            found = {
                "length": length,
                "segment": segment,
                "peak_bytes": peak(model, each, tokens),
                "seconds": statistics.median(seconds[segment]),
            }
            base = base or found
            rows.append(found)
            print(
                f"{length:>6}{segment or 'none':>9}{found['peak_bytes'] / 1e6:>10.1f}"
                f"{found['peak_bytes'] / base['peak_bytes']:>9.0%}{found['seconds']:>9.3f}"
                f"{found['seconds'] / base['seconds']:>9.2f}"
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
