"""The parts of a run, wired together: trainer, module, data and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pipeline import devices, solvers
from pipeline.config import Config
from pipeline.data.loader import EvaluationLoader, StreamLoader
from pipeline.data.manifest import Manifest
from pipeline.data.skips import Skips, merged
from pipeline.data.stream import EvaluationStream, TrainStream
from pipeline.data.tokenizer import Tokenizer, load_token_bytes
from pipeline.errors import ConfigError
from pipeline.models.base import build_on_meta, count_parameters
from pipeline.progress import Progress
from pipeline.runs.folder import RunFolder
from pipeline.solvers import flops_by_stage, mean_over_stages
from pipeline.solvers.schedules import SolverSchedule
from pipeline.training import distributed, loggers, peak, strategies
from pipeline.training.callbacks.checkpointing import Checkpointing
from pipeline.training.callbacks.data_position import DataPosition
from pipeline.training.callbacks.finite_loss import FiniteLoss
from pipeline.training.callbacks.guarding import Guarding
from pipeline.training.callbacks.interruption import Interruption
from pipeline.training.callbacks.metrics import TrainingMetrics
from pipeline.training.callbacks.phase_marks import PhaseMarks
from pipeline.training.callbacks.solver_schedule import SolverScheduler
from pipeline.training.callbacks.steps import due
from pipeline.training.callbacks.validation import Validation
from pipeline.training.launcher import Launcher
from pipeline.training.module import PretrainingModule
from pipeline.training.screen import say
from pipeline.training.state import TrainingState
from pipeline.training.stopwatch import Stopwatch
from pipeline.training.watch import MEETING_SECONDS, Watch

PRECISIONS: dict[tuple[str, bool], Any] = {
    ("float32", False): "32-true",
    ("float32", True): "32-true",
    ("bf16-mixed", False): "bf16-mixed",
    ("bf16-mixed", True): "32-true",  # the strategy sees to autocasting
    ("bf16", True): "bf16-true",  # DeepSpeed keeps float32 masters
}
"""Lightning's name of a precision, with and without ZeRO."""


class Assembly:
    """One run.

    Args:
        config: the run.
        folder: its folder, opened.
        manifest: its data.
        begin: sets the weights that the run starts from.

    Attributes:
        trainer: Lightning's trainer, with all callbacks.
        module: LightningModule.
        loader: training data.
        interruption: what a signal does.
        watch: looks after the other ranks.
    """

    def __init__(
        self, config: Config, folder: RunFolder, manifest: Manifest, begin: Callable[[TrainingState], None]
    ) -> None:
        self.config, self.folder, self.manifest = config, folder, manifest
        self.module = PretrainingModule(config, solvers.build(config.solver), begin)
        self._skeleton = build_on_meta(config.model)
        self._stopwatch = Stopwatch()
        self.trainer = self._trainer()
        self.watch = self._watch()
        self.loader = self._loader()
        self._schedule = SolverSchedule(
            config.stages, steps=config.training.steps, seed=config.run.seed, closest=self.module.solver.closest
        )
        self._finite = self._guard()
        self._metrics = self._training_metrics()
        self._checkpointing = Checkpointing(
            folder, Tokenizer.load(manifest), manifest.fingerprint, self._finite.check, self._stopwatch
        )
        self.interruption = Interruption(self._checkpointing)
        self.trainer.callbacks.extend(self._callbacks())  # type: ignore[attr-defined]

    def _callbacks(self) -> list[pl.Callback]:
        """Return the callbacks in the order in which they act at the end of a step.

        The position counts the step before a checkpoint is taken of it; a loss that is no number stops the run before
        it is logged, validated or saved; a checkpoint implies that the step's validation is done; a signal comes last.
        """
        position = DataPosition(self.loader, self._rows(self.config.training.batch_tokens))
        first = [position, SolverScheduler(self._schedule), self._finite]
        validation = [self._validation()] if self.config.validation.every_steps else []
        marks = PhaseMarks(self.watch)
        return [marks, *first, self._metrics, *validation, self._checkpointing, self.interruption]

    def _watch(self) -> Watch:
        training = self.config.training
        launcher = Launcher.replace(self.trainer)
        return Watch(
            training.ranks, training.silence_seconds, training.timeout_seconds, training.grace_seconds, launcher
        )

    def _trainer(self) -> pl.Trainer:
        try:
            return self._make_trainer()
        except (MisconfigurationException, RuntimeError, ValueError) as error:
            training = self.config.training
            reason = str(error).strip().splitlines()[0]
            asked = f"accelerator={training.accelerator}, devices={training.devices}, nodes={training.nodes}"
            raise ConfigError(f"training.{asked} cannot be had here: {reason}") from None

    def _make_trainer(self) -> pl.Trainer:
        training = self.config.training
        accelerator = devices.kind(training.accelerator)
        timeout = timedelta(seconds=training.timeout_seconds + MEETING_SECONDS)
        return pl.Trainer(
            accelerator=accelerator,
            devices=training.devices,
            num_nodes=training.nodes,
            strategy=strategies.build(self.config, accelerator, timeout),
            precision=PRECISIONS[training.precision, bool(training.zero_stage)],
            max_steps=training.steps,
            max_epochs=-1,
            accumulate_grad_batches=training.accumulation,
            log_every_n_steps=1,
            logger=False,
            default_root_dir=self.folder.path,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def start_logging(self) -> None:
        """Open the loggers, which write into the run's folder."""
        self.trainer.loggers = loggers.build(self.config, self.folder)

    def _rows(self, tokens: int) -> int:
        return tokens // self.config.data.sequence_length

    def _loader(self) -> StreamLoader:
        data, training = self.config.data, self.config.training
        stream = TrainStream(
            self.manifest,
            data.train_split,
            sequence_length=data.sequence_length,
            seed=self.config.run.seed,
            document_boundaries=data.document_boundaries,
            rows_per_batch=self._rows(training.batch_tokens),
            rows_per_micro_batch=self._rows(training.micro_batch_tokens),
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            total_samples=training.steps * self._rows(training.batch_tokens),
            skips=Skips(data.skip_samples),
        )
        return StreamLoader(stream, data.workers, pin_memory=self._device.type == "cuda")

    def _validation(self) -> Validation:
        data, validation = self.config.data, self.config.validation
        stream = EvaluationStream(
            self.manifest,
            validation.split,
            sequence_length=data.sequence_length,
            document_boundaries=data.document_boundaries,
            rows_per_micro_batch=self._rows(validation.micro_batch_tokens or self.config.training.micro_batch_tokens),
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            limit_tokens=validation.tokens,
        )
        token_bytes = torch.from_numpy(load_token_bytes(self.manifest))
        return Validation(EvaluationLoader(stream), token_bytes, self._stopwatch, say)

    def _training_metrics(self) -> TrainingMetrics:
        training = self.config.training
        dtype = torch.bfloat16 if training.precision == "bf16-mixed" else torch.float32
        best = peak.measured_peak(self._device, dtype) * training.ranks if distributed.is_first() else 1.0

        def progress(step: int) -> Progress:
            batch = training.batch_tokens
            return Progress(training.steps * batch, "tok", self.config.run.name, initial=step * batch)

        counts = self._finite.metrics if isinstance(self._finite, Guarding) else dict
        return TrainingMetrics(self._stopwatch, best, self._skeleton, progress, counts)

    def _guard(self) -> FiniteLoss | Guarding:
        """Return what watches over the steps: it ends the run at what is no number, or first leaves updates out."""
        if self.module.guard is None:
            return FiniteLoss(self.folder.checkpoints, self.describe_data, self._verdict_due)
        return Guarding(
            self.module.guard,
            self.config.guards,
            self.folder.checkpoints,
            describe=self.describe_data,
            advise=self._advise_skips,
            due=self._verdict_due,
            stage_begins=self._schedule.stage_begins,
            say=say,
        )

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device

    def _verdict_due(self, step: int) -> bool:
        every = (self.config.logging, self.config.validation, self.config.checkpoint)
        return any(due(step, each.every_steps, self.config.training.steps) for each in every)

    def describe_data(self, step: int) -> str:
        """Say in words which data a step, counted from 1, has seen."""
        runs = self.samples_of(step)
        samples = " and ".join(f"{first} to {last}" for first, last in runs)
        return (
            f"epoch {runs[0][0] // self.loader.stream.count}, samples {samples}, tokens from "
            f"{(step - 1) * self.config.training.batch_tokens}"
        )

    def _advise_skips(self, steps: list[int]) -> str:
        """Return the setting that leaves out the data of some steps, besides those that are left out already."""
        ranges = merged([*self.config.data.skip_samples, *(run for step in steps for run in self.samples_of(step))])
        return f"data.skip_samples='{ranges}'"

    def samples_of(self, step: int) -> list[tuple[int, int]]:
        """Return the samples of a step, counted from 1, as [first, last] of each unbroken run of them."""
        rows = self._rows(self.config.training.batch_tokens)
        return self.loader.stream.skips.runs((step - 1) * rows, rows)

    def greet(self) -> None:
        """Say what is about to be trained."""
        config, model = self.config, self._skeleton
        count = count_parameters(model)
        length = config.data.sequence_length
        flops = 3 * mean_over_stages(flops_by_stage(self.module.solver, model, config.stages, length))
        say(
            f"{config.model.architecture}, {count:,} parameters, {flops / 1e6:.1f} MFLOP a token in training; "
            f"{self.trainer.world_size} rank(s) on {self._device.type}, {config.training.precision}"
        )
        say(f"{config.training.steps} steps of {config.training.batch_tokens:,} tokens; run folder {self.folder.path}")

    def close(self) -> None:
        """Give back signals and screen."""
        self.interruption.restore()
        self._metrics.close()
