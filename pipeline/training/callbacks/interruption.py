"""Ctrl-C, SIGTERM, SIGUSR1 and a terminal that closes: finish the step, save, end."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from pipeline.training import distributed
from pipeline.training.callbacks.checkpointing import Checkpointing
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.module import PretrainingModule

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Interruption(StepCallback):
    """The handler sets a flag alone: what it interrupted may be half-way through a collective or a save.

    At the next end of a step all ranks agree on the flag, save and stop. A second Ctrl-C ends the process at once.

    Args:
        checkpointing: saves.

    Attributes:
        signal: the signal on which the run stopped, or 0.
    """

    def __init__(self, checkpointing: Checkpointing) -> None:
        self._checkpointing = checkpointing
        self._received = 0
        self._previous: dict[int, Any] = {}
        self.signal = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over, from Lightning's own handlers too: those save inside the handler."""
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received == signal.SIGINT == number:
            signal.signal(number, signal.default_int_handler)
            raise KeyboardInterrupt
        self._received = number

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Save and stop if a rank has received a signal."""
        received = distributed.largest(self._received)
        if received:
            self.signal = received
            self._checkpointing.save(trainer, module, step)
            trainer.should_stop = True

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
