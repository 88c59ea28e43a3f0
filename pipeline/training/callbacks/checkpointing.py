"""When a checkpoint is written and which are kept; how is ``runs.checkpoints``' and ``background``'s business."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from pipeline import config_files
from pipeline.config import CheckpointConfig
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import RunError, UserError
from pipeline.files import describe_os_error
from pipeline.runs.checkpoints import CONFIG, TOKENIZER
from pipeline.runs.folder import RunFolder
from pipeline.training import distributed, phases
from pipeline.training.background import BackgroundSave
from pipeline.training.callbacks.steps import StepCallback, due
from pipeline.training.module import PretrainingModule
from pipeline.training.stopwatch import Stopwatch
from pipeline.training.strategies import resumable


class Checkpointing(StepCallback):
    """Saves every ``checkpoint.every_steps`` steps and after the last; only then removes old ones.

    With ``checkpoint.background``, training goes on once the state is copied; a save that fails ends the run at the
    next one. The last save of a process is waited for.

    Args:
        folder: the run's folder.
        tokenizer: stored with every checkpoint.
        fingerprint: of the data.
        before: called before anything is saved; raises where the state is not worth saving.
        stopwatch: stopped meanwhile.
    """

    def __init__(
        self,
        folder: RunFolder,
        tokenizer: Tokenizer,
        fingerprint: str,
        before: Callable[[], None],
        stopwatch: Stopwatch,
    ) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._before = before
        self._stopwatch = stopwatch
        self._saved_step = 0
        self._pending: BackgroundSave | None = None

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Save if it is due."""
        if due(step, module.config.checkpoint.every_steps, module.config.training.steps):
            self.save(trainer, module, step, wait=step == module.config.training.steps)

    def save(self, trainer: pl.Trainer, module: PretrainingModule, step: int, wait: bool = True) -> None:
        """Save now, unless this step is saved already.

        Args:
            trainer: trainer.
            module: module.
            step: optimiser steps done.
            wait: return only when the checkpoint is visible.

        Raises:
            RunError: on every rank, if this checkpoint, or the one before, could not be written; no old one has been
                touched then.
        """
        if step == self._saved_step:
            if wait:
                self._settle()
            return
        self._before()
        with self._stopwatch.paused(), phases.within(phases.SAVE):
            self._settle()
            aside = self._begin(module, step)
            if wait or not module.config.checkpoint.background:
                self._write(trainer, module, step, aside)
            else:
                self._start(trainer, module, step, aside)
        self._saved_step = step

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let a checkpoint that is on its way arrive, if all ranks are there to write it."""
        assert isinstance(pl_module, PretrainingModule)
        if self._pending is None:
            return
        if not isinstance(exception, UserError):
            self._pending.give_up()
        self._pending.wait(pl_module.config.training.timeout_seconds)

    def _settle(self) -> None:
        """Wait for a checkpoint that is on its way; raise RunError on every rank if it did not arrive."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        failures = distributed.gathered(pending.wait())
        for rank, failure in enumerate(failures):
            if failure is not None:
                if distributed.is_first():
                    shutil.rmtree(self._folder.checkpoints.aside(pending.step), ignore_errors=True)
                raise self._refusal(pending.step, rank, failure)

    def _begin(self, module: PretrainingModule, step: int) -> Path:
        """Make the folder that the ranks write into; raise RunError on every rank if that fails."""
        store = self._folder.checkpoints
        aside = store.aside(step)
        failure: OSError | None = None
        if distributed.is_first():
            try:
                if not self._folder.exists():
                    raise FileNotFoundError(errno.ENOENT, "the run folder was moved or removed", self._folder.path)
                store.begin(step)
                config_files.save(module.config, aside / CONFIG)
                (aside / TOKENIZER).write_bytes(self._tokenizer.content)
            except OSError as error:
                failure = error
                shutil.rmtree(aside, ignore_errors=True)
        failure = distributed.from_first(failure)
        if failure is not None:
            raise self._refusal(step, 0, describe_os_error(failure, aside))
        return aside

    def _start(self, trainer: pl.Trainer, module: PretrainingModule, step: int, aside: Path) -> None:
        """Copy the state, and let a thread write it."""
        strategy = resumable(trainer)
        strategy.copies = True
        try:
            trainer.save_checkpoint(aside)
        finally:
            strategy.copies = False
        assert strategy.files is not None
        description, keep = self._description(module, step), module.config.checkpoint
        self._pending = BackgroundSave(
            step,
            strategy.files,
            aside,
            trainer.global_rank,
            trainer.world_size,
            lambda hashed: self._finish(step, hashed, description, keep),
        )
        strategy.files = None

    def _write(self, trainer: pl.Trainer, module: PretrainingModule, step: int, aside: Path) -> None:
        """Write the state, and make the checkpoint visible."""
        strategy = resumable(trainer)
        trainer.save_checkpoint(aside)
        assert strategy.files is not None
        own, strategy.files = strategy.files, None
        outcomes = distributed.gathered((own.failure, own.files))
        failed, failure = next(((rank, each) for rank, (each, _) in enumerate(outcomes) if each), (0, None))
        if distributed.is_first():
            try:
                if failure is None:
                    hashed = {name: each for _, files in outcomes for name, each in files.items()}
                    self._finish(step, hashed, self._description(module, step), module.config.checkpoint)
            except OSError as error:
                failure = error
            if failure is not None:
                shutil.rmtree(aside, ignore_errors=True)
        failure = distributed.from_first(failure)
        if failure is not None:
            raise self._refusal(step, failed, describe_os_error(failure, aside))

    def _finish(
        self, step: int, hashed: dict[str, Any], description: dict[str, object], keep: CheckpointConfig
    ) -> None:
        """Make the checkpoint visible, and remove old ones."""
        store = self._folder.checkpoints
        store.finish(step, hashed, **description)
        store.prune(step, keep.keep_last, keep.keep_every_steps)

    def _refusal(self, step: int, rank: int, why: str) -> RunError:
        kept = [str(each.step) for each in self._folder.checkpoints.list()]
        last = f"the newest whole checkpoint is that of step {kept[-1]}" if kept else "there is no checkpoint yet"
        where = f" by rank {rank}" if distributed.group() else ""
        return RunError(f"step {step} could not be saved{where}: {why}; {last}")

    def _description(self, module: PretrainingModule, step: int) -> dict[str, object]:
        return {
            "tokens": step * module.config.training.batch_tokens,
            "solver": module.evaluation_settings,
            "data": self._fingerprint,
            "tokenizer": {"sha256": self._tokenizer.sha256, "document_token": self._tokenizer.document_token},
        }
