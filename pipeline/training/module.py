"""The one LightningModule: any architecture under any solver."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pipeline import models
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.models import Architecture
from pipeline.models.base import build_on_meta, count_parameters
from pipeline.solvers import Solver
from pipeline.training import guards, learning_rates, optimizers, sleeping
from pipeline.training.objective import Objective, ObjectiveModule
from pipeline.training.state import TrainingState
from pipeline.training.strategies import resumable

if TYPE_CHECKING:
    from pipeline.data.stream import Batch


class PretrainingModule(pl.LightningModule):
    """Next-token prediction.

    Args:
        config: the run.
        solver: how the recurrence is evaluated.
        begin: sets the weights that a run starts from, unless it is resumed.

    Attributes:
        objective: model, solver and loss; None before ``configure_model``.
        step_mean: objective of the step at hand, the mean over this rank's micro-batches so far, float32 scalars on the
            device; None before the first step.
        evaluation_settings: values of the solver's settings for evaluation and in checkpoints.
        gradient_norm: global norm of the step's gradient before clipping, likewise; None before the first step.
        guard: judges every step before its update; None where none is left out.
    """

    def __init__(self, config: Config, solver: Solver, begin: Callable[[TrainingState], None]) -> None:
        super().__init__()
        self.config = config
        self.solver = solver
        self.objective: ObjectiveModule | None = None
        self._begin = begin
        self.step_mean: Objective | None = None
        self.evaluation_settings = solver.settings()
        self.gradient_norm: Tensor | None = None
        self.guard = guards.StepGuard(config.guards) if config.guards.leave_out else None

    @property
    def model(self) -> Architecture:
        """The architecture; under ZeRO-3 held in parts."""
        assert self.objective is not None
        return self.objective.model

    def configure_model(self) -> None:
        """Build the model where and how the strategy wants it: on its device, or in parts.

        Raises:
            ConfigError: it does not fit into memory.
        """
        if self.objective is None:
            model = build(self.config)
            self.solver.adapt(model)
            self.objective = ObjectiveModule(model, self.solver)

    def on_fit_start(self) -> None:
        """Set the first weights; those of a checkpoint come after."""
        if self.trainer.ckpt_path is None:
            state = resumable(self.trainer).state
            self._begin(state)
            state.set_moments({})

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Move the tokens alone: what hangs on the borders of documents is decided on the host (``Solver.run``)."""
        return {**batch, "tokens": batch["tokens"].to(device, non_blocking=True)}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return what a micro-batch adds to the objective.

        All its targets are valid, so that means over micro-batches and ranks weigh equally.
        """
        micro_batch = batch_idx % self.config.training.accumulation
        seed_draws(
            self.device, draw_seed(self.config.run.seed, self.trainer.global_step, micro_batch, self.global_rank)
        )
        assert self.objective is not None
        last = torch.zeros((), device=self.device, requires_grad=True)
        found = Objective(*self.objective(batch["tokens"], batch["starts"], last))
        part = found.scaled(1 / self.config.training.accumulation)
        self.step_mean = part if micro_batch == 0 or self.step_mean is None else self.step_mean.plus(part)
        return found.value

    def configure_optimizers(self) -> Any:
        """Return the optimiser and the learning rate of every step."""
        peak = self.config.learning_rate.peak
        skeleton = build_on_meta(self.config.model)
        optimizer = optimizers.build(self.config.optimizer, skeleton, peak, dict(self.model.named_parameters()))
        scheduler = LambdaLR(optimizer, lambda done: self.learning_rate(done + 1) / peak)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Set the weight decay of the step at hand, a function of its number alone."""
        optimizers.set_weight_decay(
            self.config.optimizer, optimizer, self.trainer.global_step, self.config.training.steps
        )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        config, training = self.config.learning_rate, self.config.training
        batch = training.batch_tokens
        return config.peak * learning_rates.factor(config, step * batch, training.steps * batch)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Measure the gradient's global norm, scale the gradient down to ``training.clip_norm``, and ask the guard.

        What slept through the step, since nothing was fed back, is not touched by the optimiser either. Under ZeRO,
        DeepSpeed measures and scales, and the guard is asked there.
        """
        sleeping.put_to_sleep(optimizer, not self.solver.feeding)
        if self.guard is not None and self.step_mean is not None:
            self.guard.loss = self.step_mean.value
        if self.config.training.zero_stage:
            return
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        limit = self.config.training.clip_norm
        if limit > 0:
            self.gradient_norm = clip_grad_norm_(parameters, limit)
        else:
            self.gradient_norm = get_total_norm(
                [parameter.grad for parameter in parameters if parameter.grad is not None]
            )
        if self.guard is not None:
            guards.leave_out(optimizer, self.guard.judge(self.gradient_norm))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Set Lightning's count of micro-batches to what the present accumulation makes of the steps done.

        Checkpoints are written in ``on_train_batch_end``, when the micro-batch at hand does not yet count as completed.
        """
        done = checkpoint["global_step"] * self.config.training.accumulation
        counts = {"ready": done, "started": done, "processed": done, "completed": done - 1}
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for scope in ("total", "current"):
            progress[scope] = dict(counts)


def build(config: Config) -> Architecture:
    """Return the model, its weights not yet drawn.

    Raises:
        ConfigError: it does not fit into memory.
    """
    try:
        return models.build(config.model)
    except RuntimeError as error:
        if "alloc" not in str(error) and "memory" not in str(error):
            raise
        raise too_large(count_parameters(build_on_meta(config.model))) from None


def check_memory(config: Config, device: str) -> None:
    """Raise ConfigError where a model that ranks hold whole is larger than the machine, before anything is made."""
    count = count_parameters(build_on_meta(config.model))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cpu" and config.training.zero_stage < 3 and 4 * count > memory:
        raise too_large(count)


def too_large(count: int) -> ConfigError:
    """Return the error of a model with so many parameters that does not fit."""
    return ConfigError(
        f"the model has {count:,} parameters, {4 * count / 1e9:,.0f} GB in float32, more than this machine can hold; "
        "choose a smaller width, vocab_size or depth, or training.strategy=zero3"
    )


def seed_draws(device: torch.device, seed: int) -> None:
    """Seed what is drawn on the host and on one device.

    ``torch.manual_seed`` does so for every kind of device that torch knows of, present or not, and notes where it was
    called from for each: that takes longer than all of Lightning's bookkeeping.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu" and device.type != "meta":
        torch.get_device_module(device).manual_seed(seed)


def draw_seed(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """Return the seed of all that a micro-batch draws (dropout, jitter, prefixes): the same again on resume."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
