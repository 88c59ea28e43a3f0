"""Optimisers over the model's parameter groups."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.config import AdamWConfig, OptimizerConfig
from pipeline.models import Architecture


def parameter_groups(model: Architecture) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters that weight decay pulls to zero, and those that it leaves alone."""
    undecayed = {id(parameter) for parameter in model.undecayed_parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        [parameter for parameter in trained if id(parameter) not in undecayed],
        [parameter for parameter in trained if id(parameter) in undecayed],
    )


def build(config: OptimizerConfig, model: Architecture, peak_rate: float) -> Optimizer:
    """Return the optimiser that ``config`` names.

    Raises:
        ValueError: no such optimiser.
    """
    decayed, undecayed = parameter_groups(model)
    if isinstance(config, AdamWConfig):
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in model.parameters())
        return torch.optim.AdamW(groups, lr=peak_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
    raise ValueError(f"no optimizer {config.name!r}")
