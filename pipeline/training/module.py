"""The one LightningModule: any architecture under any solver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pipeline.config import Config
from pipeline.evaluation.loss import token_losses
from pipeline.models import Architecture
from pipeline.solvers import Solver
from pipeline.training import learning_rates, optimizers

if TYPE_CHECKING:
    from pipeline.data.stream import Batch


class PretrainingModule(pl.LightningModule):
    """Next-token prediction.

    Args:
        config: the run.
        model: architecture, its weights drawn.
        solver: how its recurrence is evaluated.

    Attributes:
        step_loss: mean loss of this rank's micro-batches of the step at hand, float32 scalar on the device.
        gradient_norm: global norm of the step's gradient before clipping, likewise; None before the first step.
    """

    def __init__(self, config: Config, model: Architecture, solver: Solver) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.solver = solver
        self.step_loss: Tensor | None = None
        self.gradient_norm: Tensor | None = None
        solver.adapt(model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of a micro-batch; all its targets are valid, so that means over ranks weigh equally."""
        tokens = batch["tokens"]
        states = self.solver.run(self.model, tokens[:, :-1], batch["starts"]).states
        loss = token_losses(self.model, states, tokens[:, 1:]).mean()
        part = loss.detach().float() / self.config.training.accumulation
        first = batch_idx % self.config.training.accumulation == 0
        self.step_loss = part if first or self.step_loss is None else self.step_loss + part
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimiser and the learning rate of every step."""
        peak = self.config.learning_rate.peak
        optimizer = optimizers.build(self.config.optimizer, self.model, peak)
        scheduler = LambdaLR(optimizer, lambda done: self.learning_rate(done + 1) / peak)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

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
        """Measure the gradient's global norm, and scale the gradient down to ``training.clip_norm``."""
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
