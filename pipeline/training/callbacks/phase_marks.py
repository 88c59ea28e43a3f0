"""Marks the phases of a step, and begins to watch the other ranks."""

from __future__ import annotations

import signal
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from pipeline.training import phases
from pipeline.training.watch import Watch

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class PhaseMarks(pl.Callback):
    """First among the callbacks: what others do at the end of a step lies in a phase of its own.

    Args:
        watch: begins as soon as the ranks have met.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to watch."""
        self._watch.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch is at hand."""
        phases.enter(phases.FORWARD, trainer.global_step + 1)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """Its loss is computed."""
        phases.enter(phases.BACKWARD)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """The step's gradient is complete."""
        phases.enter(phases.OPTIMIZER)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The micro-batch is done with."""
        phases.enter(phases.BETWEEN)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell the other ranks why this one ends, before anything is taken down; let no signal cut it off.

        Launchers (torchrun, srun) send SIGTERM to all ranks as soon as one has died.
        """
        if trainer.world_size > 1:
            # Lightning puts these back when it takes itself down, right after this.
            trainer._signal_connector._original_handlers = dict.fromkeys(SIGNALS, signal.SIG_IGN)
        self._watch.report(exception)
