"""Optimisers over the model's parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config import AdamConfig, AdamWConfig, MuonConfig, OptimizerConfig
from pipeline.models import Architecture
from pipeline.models.layers import PackedLinear
from pipeline.training.muon import MuonWithAdamW
from pipeline.training.sleeping import AdamW

Role = Literal["hidden", "embedding", "head", "vector"]


def parameter_groups(model: Architecture) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters that weight decay pulls to zero, and those that it leaves alone."""
    undecayed = {id(parameter) for parameter in model.undecayed_parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        [parameter for parameter in trained if id(parameter) not in undecayed],
        [parameter for parameter in trained if id(parameter) in undecayed],
    )


def parameter_roles(model: Architecture) -> dict[Tensor, Role]:
    """Return what each parameter is to an optimiser.

    It is a ``hidden`` weight matrix, an ``embedding``, the untied ``head``'s matrix, or else a ``vector``: a norm's
    weight, a bias, scalars, an initial state.
    """
    roles: dict[Tensor, Role] = dict.fromkeys(model.parameters(), "vector")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            roles[module.weight] = "head" if module is model.readout_layer.head else "hidden"
        elif isinstance(module, nn.Embedding):
            roles[module.weight] = "embedding"
    return roles


def packed_matrices(model: Architecture) -> dict[Tensor, tuple[int, ...]]:
    """Return the rows of each matrix that a weight packs."""
    return {module.weight: module.parts for module in model.modules() if isinstance(module, PackedLinear)}


def build(
    config: OptimizerConfig,
    model: Architecture,
    peak_rate: float,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Optimizer:
    """Return the optimiser that ``config`` names, every group at its peak rate.

    Args:
        config: its settings.
        model: says what each parameter is; may be on the meta device.
        peak_rate: highest learning rate.
        parameters: what to optimise, by name, in the place of the model's own: where ZeRO-3 holds them in parts, they
            do not tell their shapes.

    Raises:
        ValueError: no such optimiser.
    """
    width = model.config.width
    own = dict(model.named_parameters())
    real: dict[Tensor, nn.Parameter] = {
        own[name]: parameter for name, parameter in (own if parameters is None else parameters).items()
    }
    if isinstance(config, AdamWConfig):
        scale = config.base_width / width if config.base_width else 1.0
        rates: dict[Role, float] = {
            "hidden": scale * peak_rate,
            "embedding": peak_rate,
            "head": peak_rate,
            "vector": peak_rate,
        }
        return _adamw(config, model, real, rates, dict.fromkeys(rates, config.weight_decay))
    if isinstance(config, MuonConfig):
        muon = torch.optim.Muon(
            _groups(model, real, {"hidden": peak_rate}, {"hidden": config.weight_decay}),
            momentum=config.momentum,
            nesterov=config.nesterov,
            ns_steps=config.ns_steps,
            adjust_lr_fn=config.adjust_rate,
        )
        scale = (width / config.base_width) ** -0.5 if config.base_width else 1.0
        rates = {
            "embedding": scale * (config.embedding_peak or peak_rate),
            "head": scale * (config.head_peak or peak_rate),
            "vector": config.vector_peak or peak_rate,
        }
        decays: dict[Role, float] = dict.fromkeys(rates, config.weight_decay)
        if config.head_weight_decay is not None:
            decays["head"] = config.head_weight_decay
        packed: dict[Tensor, tuple[int, ...]] = {real[weight]: rows for weight, rows in packed_matrices(model).items()}
        return MuonWithAdamW(muon, _adamw(config, model, real, rates, decays), packed)
    raise ValueError(f"no optimizer {config.name!r}")


def set_weight_decay(config: OptimizerConfig, optimizer: Optimizer, done: int, steps: int) -> None:
    """Give the groups the weight decay of a step.

    Args:
        config: what ``optimizer`` was built from.
        optimizer: optimiser.
        done: steps done before it.
        steps: steps of the run.
    """
    if not isinstance(config, AdamConfig) or not config.decay_to_zero:
        return
    for group in optimizer.param_groups:  # a group remembers the full value as it does ``initial_lr``
        group["weight_decay"] = group.setdefault("initial_weight_decay", group["weight_decay"]) * (1 - done / steps)


def _groups(
    model: Architecture,
    real: Mapping[Tensor, nn.Parameter],
    rates: Mapping[Role, float],
    decays: Mapping[Role, float],
) -> list[dict[str, Any]]:
    """Return the groups of the parameters whose role has a rate, decayed ones first.

    There is one for each rate and decay, and another for those of them that sleep while nothing is fed back.
    """
    roles = parameter_roles(model)
    dormant = set(model.dormant_parameters())
    groups: dict[tuple[float, float, bool, bool], list[nn.Parameter]] = {}
    for parameters, decayed in zip(parameter_groups(model), (True, False), strict=True):
        for parameter in parameters:
            role = roles[parameter]
            if role in rates:
                key = (rates[role], decays[role] if decayed else 0.0, decayed, parameter in dormant)
                groups.setdefault(key, []).append(real[parameter])
    return [
        {"params": parameters, "lr": rate, "weight_decay": decay, "dormant": sleeps, "asleep": False}
        for (rate, decay, _, sleeps), parameters in groups.items()
    ]


def _adamw(
    config: AdamConfig,
    model: Architecture,
    real: Mapping[Tensor, nn.Parameter],
    rates: Mapping[Role, float],
    decays: Mapping[Role, float],
) -> AdamW:
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in real.values())
    return AdamW(_groups(model, real, rates, decays), betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
