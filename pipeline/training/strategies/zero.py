"""ZeRO by DeepSpeed (Rajbhandari et al. 2020): on GPUs, and with real processes on the CPU over gloo."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.models.base import build_on_meta, count_parameters
from pipeline.training.guards import EngineGuard
from pipeline.training.objective import ObjectiveModule
from pipeline.training.state import PartitionedGradients, PartitionedState, PartitionedWeights
from pipeline.training.strategies.deepspeed_options import options
from pipeline.training.strategies.resumable import Resumable


class ZeRO(Resumable, DeepSpeedStrategy):
    """A stage of ZeRO.

    Under stage 3 the whole objective is one leaf: its weights are gathered before forward and before backward, never
    for a layer or a token.

    Args:
        config: the run.
        device: kind of device.
        timeout: how long a rank waits for the others in a collective.
    """

    def __init__(self, config: Config, device: str, timeout: timedelta) -> None:
        if device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
        import deepspeed

        if device == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
        if config.training.nvme_path is not None:
            check_disk(config.training.nvme_path)
        skeleton = build_on_meta(config.model)
        self._shapes = {name: each.shape for name, each in skeleton.named_parameters()}
        self._config = config
        self._guard: EngineGuard | None = None
        super().__init__(
            config=options(config, device, count_parameters(skeleton)),
            logging_level=logging.ERROR,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Set up the ranks; Lightning's own refuses the CPU."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Meet the other ranks."""
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any | None = None
    ) -> tuple[Any, Optimizer]:
        import deepspeed

        deepspeed.utils.set_z3_leaf_modules(model, [ObjectiveModule], raise_if_not_found=False)
        engine, wrapped, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank),  # the CPU's index is None
            config=self.config,
            model=model,
            model_parameters=[each for each in model.parameters() if each.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        self._guard = None if self.module.guard is None else EngineGuard(self.module.guard, engine)
        return engine, wrapped

    @property
    def state(self) -> PartitionedState:
        """Weights and states of the optimiser; once the strategy is set up."""
        kind = PartitionedWeights if self.zero_stage_3 else PartitionedGradients
        return kind(self._shapes, self.deepspeed_engine, dict(self.module.model.named_parameters()))

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which every rank has all weights, for passes outside a training step."""
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
            list(self.module.model.parameters()), enabled=self.zero_stage_3
        )
        return gathered

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the precision of passes outside a training step."""
        if self._config.training.precision == "bf16-mixed":
            return torch.autocast(self.root_device.type, dtype=torch.bfloat16)
        return super().forward_context()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Go backward. Lightning has divided the loss by the number of micro-batches; DeepSpeed would again."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Let DeepSpeed reduce, clip and update; keep the gradient's norm from before it was clipped."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._guard is not None:
            self._guard.settle()
        norm = self.deepspeed_engine.get_global_grad_norm()
        if norm is not None:
            self.module.gradient_norm = norm if isinstance(norm, Tensor) else torch.tensor(float(norm))
        return result


def check_disk(path: str) -> None:
    """Raise ConfigError unless DeepSpeed can offload to a folder."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not Path(path).is_dir():
        raise ConfigError(f"training.nvme_path is {path}, which is no folder; make it on a fast local disk")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError("offloading to nvme needs libaio and its headers: apt install libaio-dev")
