"""Loss, rates and throughput of training: to the loggers and to the screen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from pipeline.models import Architecture
from pipeline.progress import Progress
from pipeline.training import distributed
from pipeline.training.callbacks.steps import StepCallback, due
from pipeline.training.loggers import CSVMetrics
from pipeline.training.module import PretrainingModule
from pipeline.training.stopwatch import Stopwatch


class TrainingMetrics(StepCallback):
    """Logs every ``logging.every_steps`` steps and after the last, and shows progress.

    Args:
        stopwatch: training time.
        peak_flops: FLOP/s that all devices together reach in a large matrix product.
        model: says how many FLOPs a token takes; may be on the meta device.
        progress: makes the display, given the steps done.
        counts: returns what else to log.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        peak_flops: float,
        model: Architecture,
        progress: Callable[[int], Progress],
        counts: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._stopwatch = stopwatch
        self._model = model
        self._peak = peak_flops
        self._make_progress = progress
        self._counts = counts
        self._progress: Progress | None = None
        self._seconds = 0.0
        self._loading = 0.0
        self._last_end = 0.0
        self._last_step = 0
        self._flops = 0.0
        self._flops_per_token: dict[tuple[tuple[str, Any], ...], float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and cut off the rows of steps that are to be done again."""
        for logger in trainer.loggers:
            if isinstance(logger, CSVMetrics):
                logger.cut(trainer.global_step)
        self._last_step = trainer.global_step
        self._seconds = self._last_end = self._stopwatch.seconds()
        if trainer.is_global_zero:
            self._progress = self._make_progress(trainer.global_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note how long the batch was waited for."""
        self._loading += self._stopwatch.seconds() - self._last_end

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log if a step is done, then start waiting for the next batch."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._last_end = self._stopwatch.seconds()

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Log the step if it is due."""
        config = module.config
        self._flops += self._step_flops(module)
        shown: dict[str, Any] = {}
        if due(step, config.logging.every_steps, config.training.steps):
            metrics = self._measure(trainer, module, step)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)
            shown = {
                "loss": f"{metrics['train/loss']:.4f}",
                **module.solver.settings(),
                "GFLOP/s": f"{metrics['throughput/model_flops_per_second'] / 1e9:.0f}",
                "utilization": f"{metrics['throughput/utilization']:.0%}",
            }
        if self._progress is not None:
            self._progress.advance(config.training.batch_tokens, **shown)

    def _step_flops(self, module: PretrainingModule) -> float:
        """Return the FLOPs of a step with the solver's present settings."""
        settings = tuple(module.solver.settings().items())
        if settings not in self._flops_per_token:
            flops = module.solver.flops_per_token(self._model, module.config.data.sequence_length)
            self._flops_per_token[settings] = 3 * flops
        return self._flops_per_token[settings] * module.config.training.batch_tokens

    def _measure(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> dict[str, float]:
        """Return the metrics of ``step`` and the throughput since the last row; waits for the device."""
        config = module.config
        mean = module.step_mean
        assert mean is not None
        nothing = torch.full_like(mean.loss, math.nan)
        means = torch.stack([mean.loss, mean.value, nothing if mean.residual is None else mean.residual])
        own = nothing if module.gradient_norm is None else module.gradient_norm
        loss, objective, residual, norm = torch.cat([distributed.mean(means), own.to(means)[None]]).tolist()
        now = self._stopwatch.seconds()
        seconds, steps = max(now - self._seconds, 1e-9), step - self._last_step
        tokens = steps * config.training.batch_tokens / seconds
        flops = self._flops / seconds
        metrics = {
            "train/loss": loss,
            "train/objective": objective,
            "train/tokens": step * config.training.batch_tokens,
            "optimizer/learning_rate": module.learning_rate(step),
            "optimizer/gradient_norm": norm,
            **{f"solver/{name}": value for name, value in module.solver.settings().items()},
            **({"solver/residual": residual} if module.solver.iterates else {}),
            "throughput/tokens_per_second": tokens,
            "throughput/model_flops_per_second": flops,
            "throughput/utilization": flops / self._peak,
            "throughput/loading_fraction": self._loading / seconds,
            **self._counts(),
        }
        self._seconds, self._loading, self._last_step, self._flops = now, 0.0, step, 0.0
        return metrics

    def close(self) -> None:
        """End the progress display."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
