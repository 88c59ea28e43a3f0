"""Counts the samples that are behind a run; the count is all that its checkpoint holds of the data."""

from __future__ import annotations

import lightning.pytorch as pl

from pipeline.data.loader import StreamLoader
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.module import PretrainingModule


class DataPosition(StepCallback):
    """Advances the loader's position by one batch a step. Goes first, so that a checkpoint sees the new position.

    Args:
        loader: the training loader.
        rows_per_batch: samples of an optimiser step, over all ranks.
    """

    def __init__(self, loader: StreamLoader, rows_per_batch: int) -> None:
        self._loader = loader
        self._rows = rows_per_batch

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Count the step's samples."""
        self._loader.advance(self._rows)
