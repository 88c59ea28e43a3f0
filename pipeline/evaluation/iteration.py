"""``backfeed iterate``: what becomes of a trained model when its passes go on and on.

A model trained with K passes need not be one whose passes settle. Here pass after pass is run, many more than in
training, and each one's loss is measured, and how far it moved what is fed back. Moves that shrink by about the same
factor each time mean that the map contracts, so that any number of passes gives what decoding gives; moves that do not
shrink, and a loss that rises, mean that the model knows its own passes up to K alone (FBT paper, 3.4).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.evaluation.loss import LossSums, token_losses
from pipeline.files import write_atomically
from pipeline.models import Architecture
from pipeline.solvers.unrolled import Unrolled, UnrolledConfig

if TYPE_CHECKING:
    from pipeline.data.stream import EvaluationBatch
    from pipeline.runs.loading import TrainedModel

MOST = 1000
"""Passes beyond which nobody looks."""


@dataclass(frozen=True)
class Pass:
    """One pass of many.

    Attributes:
        number: from 1, the plain one.
        loss: mean negative log-likelihood of a token, in nats.
        bits_per_byte: bits spent on a byte of text.
        residual: root mean square of what the pass changed in what is fed back, as a share of it; None for the first.
        factor: the residual over that of the pass before; None for the first two.
    """

    number: int
    loss: float
    bits_per_byte: float
    residual: float | None
    factor: float | None


def check(trained: TrainedModel, passes: int) -> None:
    """Raise ConfigError unless so many passes of a trained model make sense."""
    if not 2 <= passes <= MOST:
        raise ConfigError(f"--passes is {passes}; it must be from 2 to {MOST}")
    if not trained.model.feeds_back:
        raise ConfigError(f"{trained.checkpoint.path} is a {trained.config.model.architecture}: it feeds nothing back")
    if not trained.training_solver.feeding:
        raise ConfigError(
            f"{trained.checkpoint.path} was trained without feedback (solver {trained.training_solver}), so that its "
            "passes say nothing"
        )


@torch.no_grad()
def iterate(
    model: Architecture,
    batches: Iterable[EvaluationBatch],
    token_bytes: Tensor,
    count: int,
    *,
    advanced: Callable[[int], None] | None = None,
) -> list[Pass]:
    """Run ``count`` passes over ``batches`` and measure each.

    Args:
        model: architecture, in evaluation mode.
        batches: rows with a mask of valid targets.
        token_bytes: bytes that each token id stands for, 0 for special tokens, int64 [V].
        count: passes, at least 2.
        advanced: told the number of rows after each batch.

    """
    solver = Unrolled(UnrolledConfig(name="unrolled", passes=count, loss="mean"))
    device = model.embedding.weight.device
    token_bytes = token_bytes.to(device)
    sums = torch.zeros(count, 4, dtype=torch.float64, device=device)
    moved = torch.zeros(count - 1, dtype=torch.float64, device=device)
    rows = 0
    for batch in batches:
        tokens, valid = batch["tokens"].to(device), batch["valid"].to(device)
        targets = tokens[:, 1:]
        size = token_bytes[targets] * valid
        solution = solver.run(model, tokens[:, :-1], batch["starts"])
        found = [states for states, _ in solution.loss_terms]
        found += [found[-1]] * (count - len(found))  # later passes change nothing any more
        for number, states in enumerate(found):
            losses = token_losses(model, states, targets).double() * valid
            sums[number] += torch.stack([losses.sum(), valid.sum(), (losses * (size > 0)).sum(), size.sum()])
        assert solution.residuals is not None
        here = int(valid.any(dim=1).sum())
        moved[: len(solution.residuals)] += here * solution.residuals.double().square()
        rows += here
        if advanced is not None:
            advanced(here)
    residuals = (moved / rows).sqrt().tolist()
    passes = []
    for number, (nats, tokens_seen, text_nats, text_bytes) in enumerate(sums.tolist()):
        loss = LossSums(nats, round(tokens_seen), text_nats, round(text_bytes))
        residual = residuals[number - 1] if number else None
        before = residuals[number - 2] if number > 1 else None
        factor = residual / before if before and residual is not None else None
        passes.append(Pass(number + 1, loss.loss, loss.bits_per_byte, residual, factor))
    return passes


def table(passes: Sequence[Pass]) -> str:
    """Return the passes as a table."""
    lines = [f"{'pass':>5}{'loss':>10}{'bits/byte':>11}{'residual':>12}{'factor':>9}"]
    for each in passes:
        residual = "" if each.residual is None else f"{each.residual:.3e}"
        factor = "" if each.factor is None else f"{each.factor:.3f}"
        lines.append(f"{each.number:>5}{each.loss:>10.4f}{each.bits_per_byte:>11.4f}{residual:>12}{factor:>9}")
    return "\n".join(lines)


def save(found: Mapping[str, Sequence[Pass]], path: Path) -> None:
    """Write the passes of every model as JSON."""
    content = {name: [asdict(each) for each in passes] for name, passes in found.items()}
    write_atomically(path, json.dumps(content, indent=1) + "\n")
