"""A run's first weights, one module at a time: no rank ever needs to hold the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipeline.models import Architecture
from pipeline.training.state import TrainingState


def draw_weights(model: Architecture, seed: int) -> None:
    """Draw the weights of a model that is held whole, the same wherever it lies."""
    model.init_weights(torch.Generator(device=model.embedding.weight.device).manual_seed(seed))


def draw_into(state: TrainingState, skeleton: Architecture, seed: int) -> None:
    """Draw the weights as ``draw_weights`` does on the CPU, and put each into a run's state.

    Args:
        state: the run's.
        skeleton: the model on the meta device.
        seed: of the draws, the same on every rank.
    """
    owners = {
        parameter: (name, module, key)
        for prefix, module in skeleton.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        for name in [f"{prefix}.{key}".lstrip(".")]
    }
    drawn: set[str] = set()

    @contextmanager
    def whole(*parameters: nn.Parameter) -> Iterator[None]:
        taken = [(*owners[parameter], parameter) for parameter in parameters]
        for name, module, key, parameter in taken:
            value = state.weight(name).float().cpu().clone() if name in drawn else torch.empty(parameter.shape)
            module._parameters[key] = nn.Parameter(value)
        yield
        for name, module, key, parameter in taken:
            value = module._parameters[key]
            assert value is not None
            state.set_weight(name, value.detach())
            drawn.add(name)
            module._parameters[key] = parameter

    skeleton.init_weights(torch.Generator().manual_seed(seed), whole)
    state.commit()
