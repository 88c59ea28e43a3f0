"""Mean cross-entropy that never holds the logits of all positions at once.

Logits and their gradient are the largest tensors of a step where the vocabulary is large: rows x positions x
vocabulary, once for every pass that is trained. Here they live for a slice of positions at a time: each slice's loss
and gradient are taken on the way forward, so backward has only to scale what is there. No product is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.evaluation.loss import positions_at_once, token_losses
from pipeline.models import Architecture

FINER = 16
"""Logits held at once are so many times fewer where memory counts."""


def mean_loss(model: Architecture, states: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the targets in nats, a scalar in float32 at least.

    Args:
        model: architecture.
        states: [rows, n, s].
        targets: int64 [rows, n].
    """
    count = positions_at_once(model)
    if model.checkpoint_finely:
        count = max(1, count // FINER)
    if targets.numel() <= count or not torch.is_grad_enabled():
        return token_losses(model, states, targets).mean()
    parameters = readout_parameters(model)
    loss: Tensor = ChunkedLoss.apply(model, count, targets.flatten(), states.flatten(0, 1), *parameters)
    return loss


def readout_parameters(model: Architecture) -> list[nn.Parameter]:
    """Return the trained parameters that logits may depend on."""
    found = list(model.readout_layer.parameters())
    if model.readout_layer.head is None:
        found += model.embedding.parameters()
    return [parameter for parameter in found if parameter.requires_grad]


class ChunkedLoss(torch.autograd.Function):
    """Loss and gradient, slice by slice, on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, model: Architecture, count: int, targets: Tensor, states: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Return the mean loss of states [positions, s] and targets [positions]; keep the gradient of the sum."""
        ctx.total = targets.numel()
        gradient = torch.empty_like(states)
        sums: list[Tensor | None] = [None] * len(parameters)
        losses = []
        for begin in range(0, ctx.total, count):
            part = slice(begin, begin + count)
            with torch.enable_grad():
                leaf = states[part].detach().requires_grad_()
                logits = model.readout(leaf)
            loss, of_logits = losses_and_gradient(logits.detach(), targets[part])
            losses.append(loss.sum())
            found = torch.autograd.grad(logits, [leaf, *parameters], of_logits, allow_unused=True)
            del logits, of_logits  # or they would lie beside the next slice's
            gradient[part] = found[0]
            for place, each in enumerate(found[1:]):
                if each is not None:
                    so_far = sums[place]
                    sums[place] = each if so_far is None else so_far.add_(each)
        ctx.save_for_backward(gradient, *sums)
        return torch.stack(losses).sum() / ctx.total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        """Scale the gradient."""
        scale = outputs[0] / ctx.total
        return None, None, None, *(None if each is None else scale * each for each in ctx.saved_tensors)


def losses_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropies [positions], in float32 at least, and the gradient of their sum, like the logits.

    Args:
        logits: [positions, vocabulary].
        targets: int64 [positions].
    """
    log_shares = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(torch.float32, logits.dtype))
    losses = -log_shares.gather(1, targets[:, None])[:, 0]
    gradient = log_shares.exp_()
    gradient.scatter_add_(1, targets[:, None], torch.full_like(losses, -1)[:, None])
    return losses, gradient.to(logits.dtype)
