"""Validation during training: the same code as ``backfeed evaluate``, in training mode of the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import lightning.pytorch as pl
from torch import Tensor

from pipeline.data.stream import EvaluationBatch
from pipeline.evaluation.loss import evaluate
from pipeline.training import distributed, phases
from pipeline.training.callbacks.steps import StepCallback, due
from pipeline.training.module import PretrainingModule
from pipeline.training.stopwatch import Stopwatch
from pipeline.training.strategies import resumable


class Validation(StepCallback):
    """Logs loss, perplexity and bits per byte of a split, summed over ranks.

    Args:
        batches: this rank's batches, the same each time they are gone through.
        token_bytes: bytes that each token stands for, int64 [V].
        stopwatch: stopped meanwhile.
        say: prints a line.
    """

    def __init__(
        self,
        batches: Iterable[EvaluationBatch],
        token_bytes: Tensor,
        stopwatch: Stopwatch,
        say: Callable[[str], None],
    ) -> None:
        self._batches = batches
        self._token_bytes = token_bytes
        self._stopwatch = stopwatch
        self._say = say

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Validate if it is due."""
        config = module.config
        if not due(step, config.validation.every_steps, config.training.steps):
            return
        strategy = resumable(trainer)
        paused, settings_of_evaluation = self._stopwatch.paused(), module.solver.set_to(module.evaluation_settings)
        with phases.within(phases.VALIDATION), paused, settings_of_evaluation, strategy.whole_weights():
            sums = evaluate(
                module.model,
                module.solver,
                phases.marked(self._batches),
                self._token_bytes,
                reduce=distributed.total,
                precision=strategy.forward_context,
            )
        settings = module.evaluation_settings
        metrics = {
            "validation/loss": sums.loss,
            "validation/perplexity": sums.perplexity,
            "validation/bits_per_byte": sums.bits_per_byte,
            "validation/tokens": sums.tokens,
            **{f"solver/{name}": value for name, value in settings.items()},
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)
        told = {name: value for name, value in settings.items() if name not in module.solver.training_only}
        note = "".join(f", {name} {value}" for name, value in told.items())
        self._say(
            f"step {step}: validation loss {sums.loss:.4f}, perplexity {sums.perplexity:.2f}, "
            f"{sums.bits_per_byte:.4f} bits per byte{note}"
        )
