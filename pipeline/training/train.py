"""``backfeed train``: checks a run, takes its folder, runs it to its end or to a signal."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline import devices
from pipeline.config import Config
from pipeline.conversion import initial_weights
from pipeline.cores import available_cores
from pipeline.data.manifest import Manifest, check_shards
from pipeline.errors import ConfigError, RunError, RunWarning
from pipeline.models import ArchitectureConfig
from pipeline.models.base import build_on_meta, count_parameters
from pipeline.runs.checkpoints import MODEL, TOKENIZER
from pipeline.runs.folder import Resume, RunFolder
from pipeline.runs.tensors import TensorReader
from pipeline.training import distributed, ending
from pipeline.training.allocator import keep_freed_memory
from pipeline.training.assembly import Assembly
from pipeline.training.drawing import draw_into
from pipeline.training.launcher import StartWatch
from pipeline.training.module import check_memory
from pipeline.training.screen import say
from pipeline.training.state import TrainingState
from pipeline.training.state_files import set_weights


@dataclass(frozen=True)
class Outcome:
    """How a call of ``train`` ended.

    Attributes:
        folder: the run's folder.
        step: optimiser steps done.
        signal: the signal on which it stopped, or 0.
    """

    folder: Path
    step: int
    signal: int = 0


def train(config: Config, resume: Resume = "never") -> Outcome:
    """Train a run from its start, or from its newest whole checkpoint, to its end.

    Args:
        config: the run, checked.
        resume: see ``RunFolder.open``.

    Raises:
        UserError: whatever a user can mend, in one line.
    """
    manifest = Manifest.load(config.data.path)
    check_shards(
        manifest, [config.data.train_split, *([config.validation.split] if config.validation.every_steps else [])]
    )
    config = replace(config, model=with_vocabulary(config.model, manifest, config.run.initial_weights))
    device = devices.kind(config.training.accelerator)
    check_memory(config, device)
    torch.set_num_threads(threads(config))
    if device == "cpu":
        keep_freed_memory()
    if config.training.ranks > 1:
        ending.prepare()
        StartWatch.of_parent()
    folder = RunFolder(config.run.folder)
    try:
        if distributed.is_first():
            folder.open(config, resume, manifest.fingerprint)
        return fit(config, folder, manifest)
    finally:
        folder.close()


def threads(config: Config) -> int:
    """Return the CPU threads of this rank: ranks that each took all cores would wait for one another all the time."""
    return config.training.threads or max(1, available_cores() // config.training.devices)


def with_vocabulary(model: ArchitectureConfig, manifest: Manifest, weights: str | None = None) -> ArchitectureConfig:
    """Return the model's settings with the vocabulary that the data ask for.

    Args:
        model: its settings.
        manifest: the data.
        weights: folder of the weights that it starts from, if it does.

    Raises:
        ConfigError: the model's is smaller than the tokenizer's.
    """
    size = manifest.tokenizer.vocab_size
    if model.vocab_size is None:
        return replace(model, vocab_size=size)
    if model.vocab_size < size:
        advice = "leave it out, or set at least that many"
        if weights is not None:
            advice = f"prepare the data with the tokenizer of the weights, {Path(weights) / TOKENIZER}"
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size}, but the tokenizer of {manifest.folder} has {size} ids; {advice}"
        )
    return model


def check_space(folder: RunFolder, config: Config) -> None:
    """Raise RunError if the checkpoints that will lie side by side do not fit on the disk."""
    one = 3 * 4 * count_parameters(build_on_meta(config.model))  # weights and two moments in float32
    needed = one * max(1, config.checkpoint.keep_last + 1 - len(folder.checkpoints.list()))
    free = shutil.disk_usage(folder.path).free
    if free < needed:
        raise RunError(
            f"{folder.path} has {free / 1e6:,.1f} MB free; checkpoint.keep_last={config.checkpoint.keep_last} needs "
            f"{needed / 1e6:,.1f} MB; free some or set run.root to another disk"
        )


def fit(config: Config, folder: RunFolder, manifest: Manifest) -> Outcome:
    """Train in an opened folder; see ``train``."""
    found = folder.checkpoints.list()
    if found and found[-1].step >= config.training.steps:
        newest = folder.checkpoints.newest_whole()  # a damaged last one is trained again
        if newest is not None and newest.step >= config.training.steps:
            say(f"{folder.path} is complete at step {newest.step}: nothing is left to train")
            return Outcome(folder.path, newest.step)
    quieten()
    assembly = Assembly(config, folder, manifest, first_weights(config, manifest, resumed=bool(found)))
    if distributed.is_first():
        check_space(folder, config)
        folder.record(config)
        assembly.start_logging()
    assembly.greet()
    try:
        assembly.trainer.fit(
            assembly.module,
            train_dataloaders=assembly.loader,
            ckpt_path=folder.checkpoints.folder if found else None,
            weights_only=True,
        )
        assembly.watch.finish()
    except BaseException as error:
        # SystemExit is Lightning's answer to Ctrl-C before the first step, or to a second one.
        failure = KeyboardInterrupt() if isinstance(error, SystemExit) else assembly.watch.explained(error)
        assembly.watch.abandon(failure)
        if failure is error:
            raise
        raise failure from None
    finally:
        assembly.close()
    distributed.leave()
    assembly.watch.reap()
    return Outcome(folder.path, assembly.trainer.global_step, assembly.interruption.signal)


def first_weights(config: Config, manifest: Manifest, resumed: bool) -> Callable[[TrainingState], None]:
    """Return what sets the weights that the run starts from: drawn, or those that ``run.initial_weights`` names.

    Raises:
        UserError: there are no such weights, or they do not fit the run.
    """
    if config.run.initial_weights is None or resumed:
        return lambda state: draw_into(state, build_on_meta(config.model), config.run.seed)
    path, remarks = initial_weights.check(config, manifest)
    if distributed.is_first():
        for remark in remarks:
            warnings.warn(remark, RunWarning, stacklevel=2)
        say(f"starting from the weights in {config.run.initial_weights}")
    return lambda state: set_weights(state, TensorReader(path, MODEL), path)


def quieten() -> None:
    """Keep Lightning from advice that is taken already: its lines would hide ours."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "Your `IterableDataset` has `__len__` defined",  # the loader deals its micro-batches out itself
        "The 'train_dataloader' does not have many workers",  # data.workers is the user's choice
        "The `srun` command is available on your system",  # slurm/train.sbatch uses it
        "Be aware that when using `ckpt_path`",  # a guard that was switched off leaves its state behind
        ".*isinstance.treespec, LeafSpec.. is deprecated",  # Lightning's own affair with torch
        ".*torch.distributed.* is deprecated",  # and DeepSpeed's
        "Since DeepSpeed handles gradient clipping internally",  # ``configure_gradient_clipping`` knows
    ):
        warnings.filterwarnings("ignore", message)
