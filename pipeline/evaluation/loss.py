"""Loss over a split, summed by tokens and bytes, never averaged over batches.

Bits per byte count the bytes of the text that the tokens stand for, so that they compare across tokenizers; special
tokens stand for none and are left out of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.models import Architecture
from pipeline.solvers import Solver

if TYPE_CHECKING:
    from pipeline.data.stream import EvaluationBatch


LOGITS_AT_ONCE = 1 << 24
"""Logits that are held at once: 64 MiB in float32."""


@dataclass(frozen=True)
class LossSums:
    """Sums over a split.

    Attributes:
        nats: negative log-likelihood of all targets.
        tokens: targets.
        text_nats: that of the targets that stand for text.
        text_bytes: bytes of that text.
    """

    nats: float
    tokens: int
    text_nats: float
    text_bytes: int

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits spent on a byte of text."""
        return self.text_nats / math.log(2) / self.text_bytes if self.text_bytes else math.nan


def positions_at_once(model: Architecture) -> int:
    """Return the number of positions whose logits are held at once."""
    return max(1, LOGITS_AT_ONCE // model.embedding.weight.shape[0])


def token_losses(model: Architecture, states: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of each target in nats, float32 at least [rows, n].

    Outside autograd it goes slice by slice, so that the logits of all positions are never held at once; in training
    ``training.chunked_loss`` sees to that.
    """
    count = positions_at_once(model)
    if not torch.is_grad_enabled() and targets.numel() > count:
        pairs = zip(states.flatten(0, 1).split(count), targets.flatten().split(count), strict=True)
        return torch.cat([token_losses(model, state[None], target[None])[0] for state, target in pairs]).view_as(
            targets
        )
    logits = model.readout(states)
    logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


@torch.no_grad()
def evaluate(
    model: Architecture,
    solver: Solver,
    batches: Iterable[EvaluationBatch],
    token_bytes: Tensor,
    *,
    reduce: Callable[[Tensor], Tensor] | None = None,
    precision: Callable[[], AbstractContextManager[None]] = nullcontext,
    advanced: Callable[[int], None] | None = None,
) -> LossSums:
    """Return the loss of ``model`` under ``solver`` over ``batches``.

    Args:
        model: architecture; left in the mode (training or evaluation) in which it came.
        solver: how the recurrence is evaluated.
        batches: rows with a mask of valid targets.
        token_bytes: bytes that each token id stands for, 0 for special tokens, int64 [V].
        reduce: sums a float64 tensor over all ranks.
        precision: context in which the model runs (autocast).
        advanced: told the number of rows, without those that only fill up, after each batch.
    """
    device = model.embedding.weight.device
    token_bytes = token_bytes.to(device)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            tokens, valid = batch["tokens"].to(device), batch["valid"].to(device)
            targets = tokens[:, 1:]
            with precision():
                states = solver.run(model, tokens[:, :-1], batch["starts"]).states
                losses = token_losses(model, states, targets).double() * valid
            size = token_bytes[targets] * valid
            sums += torch.stack([losses.sum(), valid.sum().double(), (losses * (size > 0)).sum(), size.sum().double()])
            if advanced is not None:
                advanced(int(valid.any(dim=1).sum()))
    finally:
        model.train(was_training)
    if reduce is not None:
        sums = reduce(sums)
    nats, count, text_nats, text_bytes = sums.tolist()
    return LossSums(nats, round(count), text_nats, round(text_bytes))
