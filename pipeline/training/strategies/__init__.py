"""How ranks train together: a single device, replicas, or ZeRO's three stages."""

from __future__ import annotations

import importlib.util
from datetime import timedelta

import torch
from lightning.pytorch.strategies import Strategy

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.training.strategies.replicated import Replicas, SingleDevice
from pipeline.training.strategies.resumable import Resumable as Resumable
from pipeline.training.strategies.resumable import resumable as resumable


def build(config: Config, device: str, timeout: timedelta) -> Strategy:
    """Return Lightning's strategy for a run.

    Args:
        config: the run.
        device: kind of device, ``cpu`` or ``cuda``.
        timeout: how long a rank waits for the others in a collective.

    Raises:
        ConfigError: it cannot be had here, or DeepSpeed's settings contradict the run's.
    """
    training = config.training
    if training.zero_stage:
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                f"training.strategy is {training.strategy}, which needs DeepSpeed: pip install 'backfeed[deepspeed]'"
            )
        from pipeline.training.strategies.zero import ZeRO  # DeepSpeed takes seconds to import

        return ZeRO(config, device, timeout)
    if training.strategy == "single" or (training.strategy == "auto" and training.ranks == 1):
        return SingleDevice(torch.device("cpu") if device == "cpu" else torch.device(device, 0))
    return Replicas(find_unused_parameters=False, gradient_as_bucket_view=True, timeout=timeout)
