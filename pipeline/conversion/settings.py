"""Settings of models that share weights: which of them decide the tensors, and which what the tensors compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline import config_files
from pipeline.choices import chosen_by
from pipeline.config import architecture_configs
from pipeline.config_files.layers import dump
from pipeline.config_files.reader import plain
from pipeline.errors import ConfigError
from pipeline.models import ARCHITECTURES, Architecture, ArchitectureConfig
from pipeline.models.base import build_on_meta
from pipeline.models.crt import CRTConfig
from pipeline.models.lrt import LRTConfig
from pipeline.models.stack import StackConfig
from pipeline.models.transformer import TransformerConfig

# These matter when weights are drawn, or in training alone: trained weights compute the same whatever they say.
WITHOUT_EFFECT = frozenset(
    {
        "dropout",
        "jitter",
        "embedding_std",
        "hidden_init",
        "hidden_std_factor",
        "head_std",
        "zero_init_outputs",
    }
)


@dataclass
class RunLayer:
    """The part of a run's settings that a converted folder sets."""

    initial_weights: str | None = None
    """Folder of the weights."""


@dataclass
class Layer:
    """What ``model.yaml`` holds: a part of a run's configuration."""

    run: RunLayer = field(default_factory=RunLayer)
    """Where training starts from."""
    model: ArchitectureConfig = chosen_by(ArchitectureConfig, "architecture", architecture_configs)
    """Architecture and size."""


def read_model(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> ArchitectureConfig:
    """Return the settings of a model from plain values and ``model.key=value`` overrides, checked."""
    given = [f"model.{key}={dump(value, flow=True)}" for key, value in settings.items()]
    return config_files.load(Layer, [], [*given, *overrides]).model


def resolved(config: ArchitectureConfig) -> ArchitectureConfig:
    """Return the same settings with the sizes written out that are otherwise made of others."""
    changes: dict[str, Any] = {
        "kv_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "ffn_width": config.hidden_width,
    }
    if isinstance(config, CRTConfig):
        changes["correction_width"] = config.correction_width or 4 * config.width
    if isinstance(config, LRTConfig):
        changes["source_layer"] = config.source
    return replace(config, **changes)


def shapes(config: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the state dict of a model."""
    return {name: tuple(tensor.shape) for name, tensor in build_on_meta(config).state_dict().items()}


def changed(weights: ArchitectureConfig, wanted: ArchitectureConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings, of those that both have, in which two models differ, as (of weights, wanted)."""
    first, second = plain(resolved(weights)), plain(resolved(wanted))
    return {key: (old, second[key]) for key, old in first.items() if key in second and second[key] != old}


def misfit(weights: ArchitectureConfig, wanted: ArchitectureConfig) -> str | None:
    """Return the first setting for which the tensors of one model do not fit another of the same architecture."""
    differing = changed(weights, wanted)
    have = shapes(weights)
    for key, (_, new) in differing.items():
        one = replace(resolved(weights), **{key: new})
        try:
            one.check()
        except ConfigError:  # a size that goes with others which differ as well
            return key
        if shapes(one) != have:
            return key
    return next(iter(differing)) if differing and shapes(wanted) != have else None


def target_settings(source: TransformerConfig, to: str, overrides: Sequence[str]) -> StackConfig:
    """Return the settings of architecture ``to`` with the weights of a plain transformer.

    Args:
        source: the transformer's.
        to: name of the architecture.
        overrides: ``model.key=value``, for settings that only the new architecture has, or that weights do not know of.

    Raises:
        ConfigError: there is no such conversion, or an override contradicts the weights.
    """
    if not issubclass(ARCHITECTURES[to].Config, StackConfig):
        raise ConfigError(
            f"--to {to}: a plain transformer has no weights for what an {to} splits off (encoder and decoder, and the "
            "memory between them); train one from the start"
        )
    if to != source.architecture and ARCHITECTURES[to].mute_feedback is Architecture.mute_feedback:
        raise ConfigError(
            f"--to {to}: the architecture does not say how a plain transformer becomes one (mute_feedback)"
        )
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip().startswith("model."):
            raise ConfigError(f"{override!r} is not a setting of the model; convert takes model.key=value alone")
        if key.strip() == "model.architecture":
            raise ConfigError(f"{override} is set, but the architecture is what --to says; leave it out")
    target = read_model({**plain(resolved(source)), "architecture": to}, overrides)
    assert isinstance(target, StackConfig)
    own = {key: value for key, value in plain(target).items() if key in plain(source)}
    kept = read_model({**own, "architecture": source.architecture})
    wrong = misfit(source, kept)
    if wrong is not None:
        old, new = changed(source, kept)[wrong]
        raise ConfigError(f"model.{wrong}={new} (command line) does not fit the weights, in which it is {old}")
    for key, (old, new) in changed(source, kept).items():
        if key not in WITHOUT_EFFECT:
            raise ConfigError(
                f"model.{key}={new} (command line) would change what the weights compute, in which it is {old}; "
                "convert without it, then set it for the run if you mean it"
            )
    resolved_target = resolved(target)
    assert isinstance(resolved_target, StackConfig)
    return resolved_target
