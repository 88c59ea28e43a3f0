"""The parts of a run, wired together: trainer, module, data and callbacks."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pipeline import devices, solvers
from pipeline.config import Config
from pipeline.data.loader import EvaluationLoader, StreamLoader
from pipeline.data.manifest import Manifest
from pipeline.data.stream import EvaluationStream, TrainStream
from pipeline.data.tokenizer import Tokenizer, load_token_bytes
from pipeline.errors import ConfigError
from pipeline.models import Architecture
from pipeline.models.base import count_parameters
from pipeline.progress import Progress
from pipeline.runs.folder import RunFolder
from pipeline.solvers import flops_by_stage, mean_over_stages
from pipeline.solvers.schedules import SolverSchedule
from pipeline.training import distributed, loggers, peak, strategies
from pipeline.training.callbacks.checkpointing import Checkpointing
from pipeline.training.callbacks.data_position import DataPosition
from pipeline.training.callbacks.finite_loss import FiniteLoss
from pipeline.training.callbacks.interruption import Interruption
from pipeline.training.callbacks.metrics import TrainingMetrics
from pipeline.training.callbacks.solver_schedule import SolverScheduler
from pipeline.training.callbacks.steps import due
from pipeline.training.callbacks.validation import Validation
from pipeline.training.checkpoint_io import FolderCheckpointIO
from pipeline.training.module import PretrainingModule
from pipeline.training.screen import say
from pipeline.training.stopwatch import Stopwatch


class Assembly:
    """One run.

    Args:
        config: the run.
        folder: its folder, opened.
        manifest: its data.
        model: its architecture, with weights drawn.

    Attributes:
        trainer: Lightning's trainer, with all callbacks.
        module: LightningModule.
        loader: training data.
        interruption: what a signal does.
    """

    def __init__(self, config: Config, folder: RunFolder, manifest: Manifest, model: Architecture) -> None:
        self.config, self.folder, self.manifest = config, folder, manifest
        self.module = PretrainingModule(config, model, solvers.build(config.solver))
        self._io = FolderCheckpointIO()
        self._stopwatch = Stopwatch()
        self.trainer = self._trainer()
        self.loader = self._loader()
        self._finite = FiniteLoss(folder.checkpoints, self.describe_data, self._verdict_due)
        self._metrics = self._training_metrics()
        self._checkpointing = Checkpointing(
            folder, self._io, Tokenizer.load(manifest), manifest.fingerprint, self._finite.check, self._stopwatch
        )
        self.interruption = Interruption(self._checkpointing)
        self.trainer.callbacks.extend(self._callbacks())  # type: ignore[attr-defined]

    def _callbacks(self) -> list[pl.Callback]:
        """Return the callbacks in the order in which they act at the end of a step.

        The position counts the step before a checkpoint is taken of it; a loss that is no number stops the run before
        it is logged, validated or saved; a checkpoint implies that the step's validation is done; a signal comes last.
        """
        training = self.config.training
        schedule = SolverSchedule(
            self.config.stages, steps=training.steps, seed=self.config.run.seed, closest=self.module.solver.closest
        )
        first = [DataPosition(self.loader, self._rows(training.batch_tokens)), SolverScheduler(schedule), self._finite]
        validation = [self._validation()] if self.config.validation.every_steps else []
        return [*first, self._metrics, *validation, self._checkpointing, self.interruption]

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
        accelerator = devices.choose("auto").type if training.accelerator == "auto" else training.accelerator
        return pl.Trainer(
            accelerator=accelerator,
            devices=training.devices,
            num_nodes=training.nodes,
            strategy=strategies.build(training),
            precision="bf16-mixed" if training.precision == "bf16-mixed" else "32-true",
            plugins=[self._io],
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

        return TrainingMetrics(self._stopwatch, best, progress)

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device

    def _verdict_due(self, step: int) -> bool:
        every = (self.config.logging, self.config.validation, self.config.checkpoint)
        return any(due(step, each.every_steps, self.config.training.steps) for each in every)

    def describe_data(self, step: int) -> str:
        """Say in words which data a step, counted from 1, has seen."""
        rows = self._rows(self.config.training.batch_tokens)
        first = (step - 1) * rows
        return (
            f"epoch {first // self.loader.stream.count}, samples {first} to {first + rows - 1}, tokens from "
            f"{(step - 1) * self.config.training.batch_tokens}"
        )

    def greet(self) -> None:
        """Say what is about to be trained."""
        config, model = self.config, self.module.model
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
