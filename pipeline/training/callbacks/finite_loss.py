"""Stops a run whose loss is no longer a number, before it spoils a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.runs.checkpoints import CheckpointStore
from pipeline.training import distributed
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.module import PretrainingModule

_NEVER = 1 << 62


class FiniteLoss(StepCallback):
    """Watches loss and gradient norm of every step on the device, and looks at the verdict when a step is due.

    So the step that went wrong is named exactly without a wait for the device at each step.

    Args:
        checkpoints: where the last good one lies.
        describe: says in words which data a step has seen.
        due: whether the verdict is needed at a step: before anything is logged, validated or saved.
    """

    def __init__(
        self, checkpoints: CheckpointStore, describe: Callable[[int], str], due: Callable[[int], bool]
    ) -> None:
        self._checkpoints = checkpoints
        self._describe = describe
        self._due = due
        self._first_bad: Tensor | None = None

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Note whether the step was finite; raise TrainingError if one was not and the verdict is due."""
        assert module.step_mean is not None
        finite = torch.isfinite(module.step_mean.value)
        if module.gradient_norm is not None:
            finite = finite & torch.isfinite(module.gradient_norm)
        if self._first_bad is None:
            self._first_bad = torch.full((), _NEVER, dtype=torch.int64, device=finite.device)
        self._first_bad = torch.where(finite, self._first_bad, self._first_bad.clamp(max=step))
        if self._due(step):
            self.check()

    def check(self) -> None:
        """Raise TrainingError on all ranks if a step on one was not finite."""
        if self._first_bad is None:
            return
        bad = int(distributed.smallest(self._first_bad))
        if bad == _NEVER:
            return
        raise not_finite(bad, self._describe(bad), self._checkpoints)


def not_finite(step: int, data: str, checkpoints: CheckpointStore, earlier: str = "") -> TrainingError:
    """Return the error that ends a run.

    Args:
        step: the step that went wrong.
        data: what it has seen, in words.
        checkpoints: where the last good one lies.
        earlier: what to add of those before it.
    """
    return TrainingError(
        f"loss or gradient is not finite at step {step} ({data}){earlier}; {checkpoints.last_good()}; try a lower "
        "learning rate or look at the data there"
    )
