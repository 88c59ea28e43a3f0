"""How ranks train together."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, Strategy

from pipeline.config import TrainingConfig


def build(config: TrainingConfig) -> Strategy | str:
    """Return Lightning's strategy for a run."""
    if config.strategy == "single" or (config.strategy == "auto" and config.ranks == 1):
        return "auto"
    return DDPStrategy(find_unused_parameters=False, gradient_as_bucket_view=True)
