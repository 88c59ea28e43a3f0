"""Changes the solver's settings over the run: anneals the feedback interval, for one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from pipeline.errors import RunError
from pipeline.solvers.schedules import SolverSchedule
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.module import PretrainingModule


class SolverScheduler(StepCallback):
    """Sets the solver's scheduled settings before every step, from its number: the same on every rank.

    Args:
        schedule: values by step.
    """

    def __init__(self, schedule: SolverSchedule) -> None:
        self._schedule = schedule
        self._settings: dict[str, Any] = {}
        self._steps = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the values of the step that this micro-batch belongs to."""
        assert isinstance(pl_module, PretrainingModule)
        self._set(pl_module, batch_idx // pl_module.config.training.accumulation)

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Remember what the step ran with."""
        self._settings, self._steps = module.solver.settings(), step

    def _set(self, module: PretrainingModule, steps_before: int) -> None:
        for name, value in self._schedule.values(steps_before).items():
            setattr(module.solver, name, value)
        module.evaluation_settings = {**module.solver.settings(), **self._schedule.evaluation_values(steps_before)}

    def state_dict(self) -> dict[str, Any]:
        """Return the solver's settings in the last step."""
        return {"settings": dict(self._settings), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what the last step ran with; ``on_train_start`` compares."""
        self._settings, self._steps = dict(state_dict["settings"]), int(state_dict["steps"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise RunError if the schedule says otherwise of the checkpoint's last step than the checkpoint does."""
        assert isinstance(pl_module, PretrainingModule)
        if self._steps:
            self._set(pl_module, self._steps - 1)
            if pl_module.solver.settings() != self._settings:
                raise RunError(
                    f"the checkpoint's step {self._steps} ran with {self._settings}, the schedules of this run give it "
                    f"{pl_module.solver.settings()}; restore schedules and training.tokens"
                )
