"""The one LightningModule: any architecture under any solver."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pipeline.config import Config
from pipeline.models import Architecture
from pipeline.solvers import Solver
from pipeline.training import learning_rates, optimizers
from pipeline.training.objective import Objective, objective

if TYPE_CHECKING:
    from pipeline.data.stream import Batch


class PretrainingModule(pl.LightningModule):
    """Next-token prediction.

    Args:
        config: the run.
        model: architecture, its weights drawn.
        solver: how its recurrence is evaluated.

    Attributes:
        step_mean: objective of the step at hand, the mean over this rank's micro-batches so far, float32 scalars on the
            device; None before the first step.
        evaluation_settings: values of the solver's settings for evaluation and in checkpoints.
        gradient_norm: global norm of the step's gradient before clipping, likewise; None before the first step.
    """

    def __init__(self, config: Config, model: Architecture, solver: Solver) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.solver = solver
        self.step_mean: Objective | None = None
        self.evaluation_settings = solver.settings()
        self.gradient_norm: Tensor | None = None
        solver.adapt(model)

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
        found = objective(self.model, self.solver, batch["tokens"], batch["starts"])
        part = found.scaled(1 / self.config.training.accumulation)
        self.step_mean = part if micro_batch == 0 or self.step_mean is None else self.step_mean.plus(part)
        return found.value

    def configure_optimizers(self) -> Any:
        """Return the optimiser and the learning rate of every step."""
        peak = self.config.learning_rate.peak
        optimizer = optimizers.build(self.config.optimizer, self.model, peak)
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
        """Measure the gradient's global norm, and scale the gradient down to ``training.clip_norm``.

        What slept through the step, since nothing was fed back, is not touched by the optimiser either.
        """
        if not self.solver.feeding:
            for parameter in self.model.dormant_parameters():
                parameter.grad = None
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        limit = self.config.training.clip_norm
        if limit > 0:
            self.gradient_norm = clip_grad_norm_(parameters, limit)
        else:
            self.gradient_norm = get_total_norm(
                [parameter.grad for parameter in parameters if parameter.grad is not None]
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Set Lightning's count of micro-batches to what the present accumulation makes of the steps done.

        Checkpoints are written in ``on_train_batch_end``, when the micro-batch at hand does not yet count as completed.
        """
        done = checkpoint["global_step"] * self.config.training.accumulation
        counts = {"ready": done, "started": done, "processed": done, "completed": done - 1}
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for scope in ("total", "current"):
            progress[scope] = dict(counts)


def draw_weights(model: Architecture, seed: int) -> None:
    """Draw the model's weights from ``seed``, the same on every rank."""
    model.init_weights(torch.Generator(device=model.embedding.weight.device).manual_seed(seed))


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
