"""Token by token: one ``advance`` a token, all else remembered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeline.generation.sampling import Sampling
from pipeline.models import Architecture
from pipeline.solvers import Solver


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
) -> Iterator[Tensor]:
    """Yield the next token of every row, int64 [rows], up to ``count`` times.

    Prompts of different lengths are padded on the left; the padding is a document of its own that nobody sees.

    Args:
        model: architecture.
        solver: how the recurrence is evaluated; as in training, or ``chunked`` with interval 1 for the exact one.
        prompts: token ids of each row, at least one.
        count: tokens to generate.
        sampling: how tokens are drawn.
        seed: seed of the draws.
        stop: a row that has drawn this token yields it for ever; the iteration ends when all rows have.
        filler: token for the padding.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[filler] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
    starts = torch.tensor(padding, device=device) if any(padding) else None
    carry = solver.new_carry(model, len(prompts), capacity=longest + count, starts=starts)
    tokens = tokens.to(device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for _ in range(count):
        solution = solver.run(model, tokens, carry=carry)
        assert solution.carry is not None
        carry = solution.carry
        drawn = sampling.draw(model.readout(solution.states[:, -1]), generator)
        if stop is not None:
            drawn = torch.where(ended, torch.full_like(drawn, stop), drawn)
            ended = ended | (drawn == stop)
        yield drawn
        if stop is not None and bool(ended.all()):
            return
        tokens = drawn[:, None]
