"""What DeepSpeed is told: what follows from a run's settings, and what the user adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.config import Config
from pipeline.errors import ConfigError

KEY = "training.deepspeed"
BUCKET = 50_000_000  # elements that ZeRO reduces, or gathers, at once
SUB_GROUP = 100_000_000  # elements that are updated, and swapped in from disk, at once

REFUSED = {
    "optimizer": "set optimizer",
    "scheduler": "set learning_rate",
    "fp16": "float16 is not supported; set training.precision=bf16",
    "amp": "set training.precision",
    "gradient_accumulation_steps": "it follows from training.batch_tokens and micro_batch_tokens",
    "train_batch_size": "it follows from training.batch_tokens",
    "checkpoint": "checkpoints are written by parameter, for any number of ranks",
    "activation_checkpointing": "set solver.activation_checkpointing; DeepSpeed's is for its own checkpoint function, "
    "which divides what tensor-parallel ranks share and knows no loop over time",
    "pipeline": "there is no pipeline parallelism",
}
"""Settings of DeepSpeed that have another place here, or none."""


def options(config: Config, device: str, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a run.

    Args:
        config: the run, under ZeRO.
        device: kind of device.
        parameters: of the model.

    Raises:
        ConfigError: ``training.deepspeed`` contradicts the other settings, or DeepSpeed does not know it.
    """
    given = config.training.deepspeed
    for key, advice in REFUSED.items():
        if key in given:
            raise ConfigError(f"{KEY}.{key} cannot be set: {advice}")
    fixed = fixed_options(config)
    for path, value in leaves(given):
        ours = at(fixed, path)
        if ours is not None and value not in ("auto", ours):
            raise ConfigError(
                f"{KEY}.{'.'.join(path)} is {value!r}, but the run's own settings make it {ours!r}; leave it out"
            )
    merged = merge(merge(defaults(config, device, parameters), given), fixed)
    check(merged["zero_optimization"])
    return merged


def fixed_options(config: Config) -> dict[str, Any]:
    """Return what follows from the run's settings and cannot be set beside them."""
    training = config.training
    zero: dict[str, Any] = {"stage": training.zero_stage}
    for name, value in (
        ("offload_optimizer", training.offload_optimizer),
        ("offload_param", training.offload_parameters),
    ):
        if value != "none":
            zero[name] = {"device": value, **({"nvme_path": training.nvme_path} if value == "nvme" else {})}
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_tokens // config.data.sequence_length,
        "gradient_clipping": float(training.clip_norm),  # left out, it would be 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": training.precision == "bf16"},
    }
    if training.precision == "bf16-mixed":
        result["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return result


def defaults(config: Config, device: str, parameters: int) -> dict[str, Any]:
    """Return what we set otherwise than DeepSpeed would, and the user may set."""
    bucket = max(1024, min(BUCKET, parameters))
    zero: dict[str, Any] = {
        "overlap_comm": device != "cpu",
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if config.training.zero_stage == 3:
        zero.update(
            stage3_param_persistence_threshold=0,  # all weights are gathered at once, the small ones too
            stage3_prefetch_bucket_size=0,  # and there is nothing to fetch ahead
            stage3_max_live_parameters=max(parameters, 1),
            stage3_max_reuse_distance=max(parameters, 1),
            sub_group_size=SUB_GROUP,
        )
    result: dict[str, Any] = {"zero_optimization": zero}
    if config.training.precision == "bf16" and config.training.zero_stage > 1:
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result


def check(zero: Mapping[str, Any]) -> None:
    """Raise ConfigError where DeepSpeed does not know a setting of ZeRO, or its value."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(each) for each in ("zero_optimization", *first["loc"]))
        raise ConfigError(f"{KEY}.{where}: {first['msg']}") from None


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of everything in nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return what stands at a path; None where there is nothing."""
    found: Any = tree
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two nested mappings as one; where both have a value, that of ``above`` stands."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
