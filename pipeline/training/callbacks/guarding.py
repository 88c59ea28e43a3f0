"""Keeps the account of steps whose update was left out, tells of them, and ends a run that has too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from pipeline.config import GuardsConfig
from pipeline.errors import TrainingError
from pipeline.runs.checkpoints import CheckpointStore
from pipeline.training.callbacks.finite_loss import not_finite
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.guards import Judgement, StepGuard
from pipeline.training.module import PretrainingModule


class Guarding(StepCallback):
    """Reads what the guard found about every step when a step is due: before anything is logged, validated or saved.

    Until then judgements stay on the device, and no step waits for it. All ranks read the same, so all end alike.

    Args:
        guard: judges the steps.
        config: how many may be left out.
        checkpoints: where the last good one lies.
        describe: says in words which data a step has seen.
        advise: says how to leave out the data of some steps.
        due: whether judgements are needed at a step.
        stage_begins: whether a stage of a schedule begins with a step, counted from 0: loss and norm may leap then, and
            the guard begins a new window.
        say: prints a line.
    """

    def __init__(
        self,
        guard: StepGuard,
        config: GuardsConfig,
        checkpoints: CheckpointStore,
        *,
        describe: Callable[[int], str],
        advise: Callable[[list[int]], str],
        due: Callable[[int], bool],
        stage_begins: Callable[[int], bool],
        say: Callable[[str], None],
    ) -> None:
        self._guard = guard
        self._config = config
        self._checkpoints = checkpoints
        self._describe = describe
        self._advise = advise
        self._due = due
        self._stage_begins = stage_begins
        self._say = say
        self._unread: list[tuple[int, Tensor]] = []
        self._left_out = 0
        self._nonfinite = 0
        self._spikes: list[int] = []  # steps within the span of the newest

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a new window where a stage of a schedule begins."""
        assert isinstance(pl_module, PretrainingModule)
        step, micro_batch = divmod(batch_idx, pl_module.config.training.accumulation)
        if micro_batch == 0 and self._stage_begins(step):
            self._guard.forget()

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Note the judgement; raise TrainingError if it is due and too many updates were left out."""
        assert self._guard.judgement is not None
        self._unread.append((step, self._guard.judgement))
        if self._due(step):
            self.check()

    def check(self) -> None:
        """Read all judgements; raise TrainingError, on all ranks, if there are too many steps that went wrong."""
        if not self._unread:
            return
        steps = [step for step, _ in self._unread]
        found = torch.stack([judgement for _, judgement in self._unread]).tolist()
        self._unread = []
        for step, values in zip(steps, found, strict=True):
            judgement = Judgement(bool(values[0]), *values[1:])
            if judgement.left_out:
                self._account(step, judgement)

    def _account(self, step: int, judgement: Judgement) -> None:
        """Count a step whose update was left out; raise TrainingError if there are too many of them."""
        config = self._config
        self._left_out += 1
        if not judgement.finite:
            self._nonfinite += 1
            if self._nonfinite > config.nonfinite_limit:
                allowed = config.nonfinite_limit
                earlier = f", the last of {self._nonfinite}, above guards.nonfinite_limit={allowed}" if allowed else ""
                raise not_finite(step, self._describe(step), self._checkpoints, earlier)
            self._tell(step, judgement.words(), f"{self._nonfinite} of at most {config.nonfinite_limit} not finite")
            return
        self._spikes = [each for each in self._spikes if each > step - config.spike_span] + [step]
        if len(self._spikes) > config.spike_limit:
            named = ", ".join(map(str, self._spikes))
            raise TrainingError(
                f"spikes at {len(self._spikes)} steps within {config.spike_span}, above guards.spike_limit="
                f"{config.spike_limit}: {named} ({judgement.words()}; {self._describe(step)}); "
                f"{self._checkpoints.last_good()}; go on from there without these data "
                f"({self._advise(self._spikes)}) or at a lower learning rate"
            )
        self._tell(
            step,
            judgement.words(),
            f"{len(self._spikes)} of at most {config.spike_limit} spikes within {config.spike_span} steps",
        )

    def _tell(self, step: int, what: str, count: str) -> None:
        self._say(f"step {step}: update left out: {what}; {self._describe(step)}; {count}")

    def metrics(self) -> dict[str, float]:
        """Return how many updates were left out so far."""
        return {"guards/skipped": self._left_out}

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the counts as plain values, the same on every rank."""
        counts = {"left_out": self._left_out, "nonfinite": self._nonfinite, "spikes": list(self._spikes)}
        return {**self._guard.state_dict(), **counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them up."""
        self._guard.load_state_dict(state_dict)
        self._left_out, self._nonfinite = state_dict["left_out"], state_dict["nonfinite"]
        self._spikes = list(state_dict["spikes"])
