"""When a checkpoint is written and which are kept; how is ``runs.checkpoints``' business."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable

import lightning.pytorch as pl

from pipeline import config_files
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import RunError, UserError
from pipeline.files import describe_os_error
from pipeline.runs.checkpoints import CONFIG, TOKENIZER
from pipeline.runs.folder import RunFolder
from pipeline.training import distributed
from pipeline.training.callbacks.steps import StepCallback, due
from pipeline.training.checkpoint_io import FolderCheckpointIO
from pipeline.training.module import PretrainingModule
from pipeline.training.stopwatch import Stopwatch


class Checkpointing(StepCallback):
    """Saves every ``checkpoint.every_steps`` steps and after the last; only then removes old ones.

    Args:
        folder: the run's folder.
        io: writes Lightning's checkpoint.
        tokenizer: stored with every checkpoint.
        fingerprint: of the data.
        before: called before anything is saved; raises where the state is not worth saving.
        stopwatch: stopped meanwhile.
    """

    def __init__(
        self,
        folder: RunFolder,
        io: FolderCheckpointIO,
        tokenizer: Tokenizer,
        fingerprint: str,
        before: Callable[[], None],
        stopwatch: Stopwatch,
    ) -> None:
        self._folder = folder
        self._io = io
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._before = before
        self._stopwatch = stopwatch
        self._saved_step = 0

    def on_step_end(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Save if it is due."""
        if due(step, module.config.checkpoint.every_steps, module.config.training.steps):
            self.save(trainer, module, step)

    def save(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> None:
        """Save now, unless this step is saved already.

        Raises:
            RunError: on every rank, if the checkpoint could not be written; no old one has been touched then.
        """
        if step == self._saved_step:
            return
        self._before()
        with self._stopwatch.paused():
            failure = self._write(trainer, module, step)
        if failure is not None:
            raise failure
        self._saved_step = step

    def _write(self, trainer: pl.Trainer, module: PretrainingModule, step: int) -> UserError | None:
        store, first = self._folder.checkpoints, trainer.is_global_zero
        aside = store.aside(step)
        failure: OSError | None = None
        if first:
            try:
                if not self._folder.exists():
                    raise FileNotFoundError(errno.ENOENT, "the run folder was moved or removed", self._folder.path)
                store.begin(step)
                config_files.save(module.config, aside / CONFIG)
                (aside / TOKENIZER).write_bytes(self._tokenizer.content)
            except OSError as error:
                failure = error
        if (failure := distributed.from_first(failure)) is None:
            self._io.failure = None
            trainer.save_checkpoint(aside)
            failure = self._io.failure
        if first:
            try:
                if failure is None:
                    store.finish(step, **self._description(module, step))
                    keep = module.config.checkpoint
                    store.prune(step, keep.keep_last, keep.keep_every_steps)
            except OSError as error:
                failure = error
            if failure is not None:
                shutil.rmtree(aside, ignore_errors=True)
        failure = distributed.from_first(failure)
        if failure is None:
            return None
        kept = [str(each.step) for each in store.list()]
        last = f"the newest whole checkpoint is that of step {kept[-1]}" if kept else "there is no checkpoint yet"
        return RunError(f"step {step} could not be saved: {describe_os_error(failure, aside)}; {last}")

    def _description(self, module: PretrainingModule, step: int) -> dict[str, object]:
        return {
            "tokens": step * module.config.training.batch_tokens,
            "solver": module.evaluation_settings,
            "data": self._fingerprint,
            "tokenizer": {"sha256": self._tokenizer.sha256, "document_token": self._tokenizer.document_token},
        }
