"""Learning-rate schedules, as a factor of the peak rate: pure functions of the tokens trained on."""

from __future__ import annotations

import math

from pipeline.config import ConstantConfig, CosineConfig, LearningRateConfig, WSDConfig


def factor(config: LearningRateConfig, tokens: int, total_tokens: int) -> float:
    """Return the rate of a step as a factor of ``config.peak``.

    Args:
        config: schedule.
        tokens: tokens trained on by the end of the step.
        total_tokens: tokens of the whole run.

    Raises:
        ValueError: no such schedule.
    """
    if tokens < config.warmup_tokens:
        return tokens / config.warmup_tokens
    match config:
        case CosineConfig():
            span = max(1, total_tokens - config.warmup_tokens)
            done = min(1.0, (tokens - config.warmup_tokens) / span)
            return config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * done)) / 2
        case WSDConfig():
            left = max(0, total_tokens - tokens) / (config.decay_fraction * total_tokens)
            return config.final_fraction + (1 - config.final_fraction) * min(1.0, left)
        case ConstantConfig():
            return 1.0
    raise ValueError(f"no learning-rate schedule {config.name!r}")
