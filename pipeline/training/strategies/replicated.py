"""One device, or replicas that average their gradients."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from pipeline.training.strategies.resumable import Resumable


class SingleDevice(Resumable, SingleDeviceStrategy):
    """One rank."""


class Replicas(Resumable, DDPStrategy):
    """DistributedDataParallel (Li et al. 2020): every rank holds all weights and states."""
