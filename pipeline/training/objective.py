"""What a batch is trained on: the solver's loss terms and its penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models import Architecture
from pipeline.solvers import Solver
from pipeline.training.chunked_loss import mean_loss


@dataclass(frozen=True)
class Objective:
    """Scalars of one batch.

    Attributes:
        value: what is minimised.
        loss: mean loss of the solver's final states, so that it compares across solvers.
        residual: how far the solver's last pass moved what is fed back (``Solution.residuals``); None where there was
            one pass.
    """

    value: Tensor
    loss: Tensor
    residual: Tensor | None

    def scaled(self, factor: float) -> Objective:
        """Return the same, in float32, outside autograd's graph, times ``factor``."""
        residual = None if self.residual is None else factor * self.residual.float()
        return Objective(factor * self.value.detach().float(), factor * self.loss.detach().float(), residual)

    def plus(self, other: Objective) -> Objective:
        """Return the sums."""
        residual = None if self.residual is None or other.residual is None else self.residual + other.residual
        return Objective(self.value + other.value, self.loss + other.loss, residual)


class ObjectiveModule(nn.Module):
    """All that a pass does with the weights, as one module: model, solver and loss.

    ZeRO-3 gathers a module's weights before its forward and backward. The recurrence calls the same layers at every
    position, so they are gathered here, for the whole pass, and not for each call.

    Args:
        model: architecture.
        solver: how its recurrence is evaluated.
    """

    def __init__(self, model: Architecture, solver: Solver) -> None:
        super().__init__()
        self.model = model
        self.solver = solver

    def forward(self, tokens: Tensor, starts: Tensor | None, last: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return value, loss and residual of ``objective``.

        Args:
            tokens: see ``objective``.
            starts: see ``objective``.
            last: a zero that wants a gradient. Backward comes to it after all weights, and by it DeepSpeed knows that
                they can go.
        """
        found = objective(self.model, self.solver, tokens, starts)
        return found.value + last, found.loss, found.residual


def objective(model: Architecture, solver: Solver, tokens: Tensor, starts: Tensor | None) -> Objective:
    """Return the objective of rows of tokens, all of whose targets are valid.

    Args:
        model: architecture.
        solver: how its recurrence is evaluated.
        tokens: int64 [rows, n + 1].
        starts: row index at which each input's document begins, int64 [rows, n], best on the host; None: all at 0.
    """
    solution = solver.run(model, tokens[:, :-1], starts)
    losses = [mean_loss(model, states, tokens[:, 1:]) for states, _ in solution.loss_terms]
    weights = [weight for _, weight in solution.loss_terms]
    value = torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum()
    if solution.penalty is not None:
        value = value + solution.penalty
    dormant = [each for each in model.dormant_parameters() if each.requires_grad]
    value = reached(value, dormant, asleep=not solver.feeding)
    return Objective(value, losses[-1], None if solution.residuals is None else solution.residuals[-1])


def reached(value: Tensor, parameters: list[nn.Parameter], asleep: bool) -> Tensor:
    """Return the same value, from which backward goes to all parameters, used in this step or not.

    Replicas, and ZeRO, wait for the gradient of every parameter. Those that are asleep get one of zeros, and those that
    were used nothing more.
    """
    result: Tensor = _Reached.apply(value, asleep, *parameters)
    return result


class _Reached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, asleep: bool, *parameters: Tensor) -> Tensor:
        ctx.like = [torch.empty_like(each, device="meta") if asleep else None for each in parameters]
        ctx.device = value.device
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        zeros = [None if each is None else torch.zeros_like(each, device=ctx.device) for each in ctx.like]
        return (outputs[0], None, *zeros)
