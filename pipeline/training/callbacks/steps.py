"""What all callbacks stand on: the end of an optimiser step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from pipeline.training.module import PretrainingModule


class StepCallback(pl.Callback):
    """A callback that acts when an optimiser step is done, not at every micro-batch."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Call ``on_step_end`` after the last micro-batch of a step."""
        assert isinstance(pl_module, PretrainingModule)
        if (batch_idx + 1) % pl_module.config.training.accumulation == 0:
            self.on_step_end(trainer, pl_module, trainer.global_step)

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Act.

        Args:
            trainer: trainer.
            module: module.
            step: optimiser steps done.
        """


def due(step: int, every: int, last: int) -> bool:
    """Return whether something that happens ``every`` steps (0: never), and after the last, happens at ``step``."""
    return every > 0 and (step % every == 0 or step == last)
