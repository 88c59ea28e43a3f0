"""One training step on rows of random tokens: loss, gradients, optimiser."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from pipeline import models
from pipeline.models import Architecture, ArchitectureConfig
from pipeline.solvers import Solver, SolverConfig
from pipeline.solvers.unrolled import UnrolledConfig
from pipeline.training.drawing import draw_weights
from pipeline.training.objective import objective

LEARNING_RATE = 1e-4
"""Small enough that no run of a benchmark leaves the numbers with which it began."""
# How each paper trains its passes; the others train the last.
LOSSES: dict[str, Literal["mean", "plain_and_fed"]] = {"fbt": "plain_and_fed", "lrt": "mean"}


def as_published(solver: SolverConfig, architecture: str) -> SolverConfig:
    """Return a solver with the loss that the paper of an architecture trains its passes by."""
    if isinstance(solver, UnrolledConfig):
        return replace(solver, loss=LOSSES.get(architecture, "last"))
    return solver


def made(config: ArchitectureConfig) -> Architecture:
    """Return an architecture, its weights drawn."""
    model = models.build(config)
    draw_weights(model, 0)
    return model


def random_tokens(rows: int, length: int, vocab_size: int) -> Tensor:
    """Return rows of so many inputs and their targets, int64 [rows, length + 1], the same each time."""
    return torch.randint(vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimiser of every contestant: one kernel for all parameters, where torch has one."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )


def apply(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take the gradients of a loss, and step."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Trainee:
    """A model, its optimiser, and the rows that it is trained on again and again.

    Args:
        config: architecture and size.
        rows: rows of a step.
        length: inputs of a row.
    """

    def __init__(self, config: ArchitectureConfig, rows: int, length: int) -> None:
        assert config.vocab_size is not None
        self.model = made(config).train()
        self.tokens = random_tokens(rows, length, config.vocab_size)
        self.optimizer = adamw(self.model)

    def loss(self, solver: Solver) -> Tensor:
        """Return the objective under a solver, as in training."""
        solver.adapt(self.model)
        return objective(self.model, solver, self.tokens, None).value

    def step(self, solver: Solver) -> None:
        """Train one step."""
        apply(self.loss(solver), self.optimizer)
