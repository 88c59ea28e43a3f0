"""The fast loop beside autograd's: the same model and rows through both, and how far apart their gradients are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.evaluation import loss
from pipeline.models import ARCHITECTURES, Architecture, recomputed
from pipeline.solvers import build, loop
from pipeline.solvers.chunked import Chunked, ChunkedConfig
from tests.models.cases import make_model, make_tokens

Gradients = dict[str, Tensor | None]
FEEDING = [name for name, cls in ARCHITECTURES.items() if cls.feeds_back]
VARIANTS = [(name, variant) for name in FEEDING for variant in ARCHITECTURES[name].variants()]

# Relative, in float64. Gradients that are zero in theory (a norm's weight in front of a softmax over one key) are what
# rounding leaves of large terms: the share of the largest gradient below which one counts as that.
TOLERANCE, FLOOR = 1e-10, 1e-4


def chunked(loop: str = "fast", **settings: Any) -> Chunked:
    config = ChunkedConfig("chunked", loop=loop, **settings)
    config.check()
    solver = build(config)
    assert isinstance(solver, Chunked)
    return solver


def trained(architecture: str, variant: str = "plain", **options: Any) -> Architecture:
    cls = ARCHITECTURES[architecture]
    return make_model(cls, cls.variants()[variant], **options).train()


def tokens_of(model: Architecture, rows: int = 3, length: int = 13) -> Tensor:
    return make_tokens(model.config, rows=rows, length=length)


def loss_of(states: Tensor) -> Tensor:
    """Return a sum with another weight for every number."""
    weights = torch.linspace(-1, 1, states.numel(), dtype=torch.float64).sin().to(states.dtype)
    return (states * weights.view_as(states)).sum()


def count_as_many(patch: pytest.MonkeyPatch) -> None:
    """Let the few rows of a test be enough for all that segments do where memory counts."""
    patch.setattr(loop, "SEGMENT_ROWS", 1)
    patch.setattr(loop, "SEGMENT_TILE", 2)
    patch.setattr(recomputed, "AT_ONCE", 4)
    patch.setattr(loss, "LOGITS_AT_ONCE", 16 * 29 * 5)


def gradients_of(model: Architecture) -> Gradients:
    return {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}


def run(
    model: Architecture, tokens: Tensor, starts: Tensor | None = None, *, seed: int = 5, **settings: Any
) -> tuple[Tensor, Gradients]:
    """Return the states and all gradients."""
    solver = chunked(**settings)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    states = solver.run(model, tokens, starts).states
    loss_of(states).backward()
    return states.detach(), gradients_of(model)


def error(found: Gradients, expected: Gradients) -> float:
    """Return the largest relative difference of any gradient."""
    known = {name: each for name, each in expected.items() if each is not None}
    assert {name for name, each in found.items() if each is not None} == known.keys()
    top = max(float(each.abs().max()) for each in known.values())
    worst = 0.0
    for name, reference in known.items():
        size = max(float(reference.abs().max()), FLOOR * top)
        mine = found[name]
        assert mine is not None
        assert mine.dtype is reference.dtype
        worst = max(worst, float((mine.double() - reference.double()).abs().max()) / size)
    return worst


def compare(model: Architecture, tokens: Tensor, starts: Tensor | None = None, **settings: Any) -> None:
    """Raise AssertionError unless both loops find the same states and gradients."""
    expected, reference = run(model, tokens, starts, loop="autograd", **settings)
    assert_same(run(model, tokens, starts, **settings), expected, reference, str(settings))


def assert_same(
    found: tuple[Tensor, Gradients], states: Tensor, reference: Gradients, what: str, tolerance: float = TOLERANCE
) -> None:
    assert float((found[0] - states).abs().max()) <= tolerance * float(states.abs().max()), what
    assert error(found[1], reference) <= tolerance, what
