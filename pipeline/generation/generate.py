"""Token by token: one ``advance`` a token, all else remembered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeline.generation.decoder import Decoder
from pipeline.generation.sampling import Sampling, uniforms
from pipeline.generation.weights import HeldWeights
from pipeline.models import Architecture
from pipeline.solvers import Solver

HOLDING_TOKENS = 32
"""From so many tokens on, putting the weights into another layout first takes less time than it saves (CPU)."""
ENDED_EVERY = 16
"""Tokens after which an accelerator is asked whether all rows have ended: each time the host waits for it."""


@torch.inference_mode()
def generate(
    model: Architecture,
    solver: Solver,
    prompts: Sequence[Sequence[int]],
    *,
    count: int,
    sampling: Sampling,
    seed: int,
    stop: int | None = None,
    filler: int = 0,
    weights: HeldWeights | None = None,
    ended_every: int | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every row, int64 [rows], up to ``count`` times.

    Prompts of different lengths are padded on the left; the padding is a document of its own that nobody sees. The
    tokens are drawn and stay on the model's device; only a caller who looks at them waits for it.

    Args:
        model: architecture.
        solver: how the recurrence is evaluated; as in training, or ``chunked`` with interval 1 for the exact one.
        prompts: token ids of each row, at least one.
        count: tokens to generate.
        sampling: how tokens are drawn.
        seed: seed of the draws.
        stop: a row that has drawn this token yields it for ever; the iteration ends when all rows have.
        filler: token for the padding.
        weights: the model's, held by the caller for several calls; None holds them for this one where that pays.
        ended_every: tokens after which is asked whether all rows have ended; None takes every token on a CPU and
            every 16th elsewhere. So the iteration may go on for some tokens after all rows have ended.
    """
    device = model.embedding.weight.device
    on_cpu = device.type == "cpu"
    if weights is None and on_cpu and count >= HOLDING_TOKENS:
        weights = HeldWeights(model)
    ended_every = ended_every or (1 if on_cpu else ENDED_EVERY)
    rows, longest = len(prompts), max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    padded = [[filler] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    tokens = torch.tensor(padded, device=device)
    starts = torch.tensor(padding, device=device) if any(padding) else None
    decoder = Decoder(model, solver, rows, longest + count, starts=starts, weights=weights)
    chances = uniforms(count, rows, seed).to(device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    for number in range(count):
        drawn = sampling.draw(decoder.logits(decoder.read(tokens)), chances[number])
        if stop is not None:
            drawn = drawn.masked_fill(ended, stop)
            ended = ended | (drawn == stop)
        yield drawn
        if stop is not None and (number + 1) % ended_every == 0 and bool(ended.all()):
            return
        tokens = drawn[:, None]
