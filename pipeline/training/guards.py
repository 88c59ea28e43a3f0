"""Leaves out the update of a step that went wrong: a spike of loss or gradient norm, or what is no number.

The verdict falls on the device, from values that all ranks share, and goes to the optimiser as a tensor: no rank waits
for its device, and all ranks do the same. It is torch's own way of leaving a step out, that of loss scaling: where the
optimiser's ``found_inf`` is 1, weights, moments and step counts stay as they are, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.config import GuardsConfig
from pipeline.training import distributed


class Judgement(NamedTuple):
    """What was found about a step; the same on every rank.

    Attributes:
        left_out: whether the update was left out.
        loss: what is minimised, mean over micro-batches and ranks.
        norm: the gradient's global norm before clipping.
        loss_limit: above it the loss is a spike; infinite where there is no limit yet.
        norm_limit: likewise.
    """

    left_out: bool
    loss: float
    norm: float
    loss_limit: float
    norm_limit: float

    @property
    def finite(self) -> bool:
        """Whether loss and norm are."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def words(self) -> str:
        """Say what was wrong."""
        pairs = (("loss", self.loss, self.loss_limit), ("gradient norm", self.norm, self.norm_limit))
        return ", ".join(f"{name} {value:.6g}{_against(limit, value)}" for name, value, limit in pairs)


def _against(limit: float, value: float) -> str:
    if not math.isfinite(value):
        return " is not finite"
    if not math.isfinite(limit):
        return ""
    return f" is above {limit:.6g}" if value > limit else f" is within {limit:.6g}"


class StepGuard:
    """Judges steps by the good ones before them.

    A step is good if loss and gradient norm are finite and neither lies above its limit: mean + ``spike_deviations``
    standard deviations over the last ``spike_window`` good steps, once half of those are there. Steps that were left
    out move no limit. (OLMo-core's ``SkipStepOptimizer`` has the same rule, but takes spikes into the window and leaves
    out what is far below the mean, too.)

    Args:
        config: the settings.

    Attributes:
        loss: of the step at hand, float scalar of this rank; set before ``judge``.
        judgement: of the last step judged, float64 [5] in the order of ``Judgement``; None before the first.
    """

    def __init__(self, config: GuardsConfig) -> None:
        self._deviations = config.spike_deviations
        self._window = config.spike_window
        self._values: Tensor | None = None  # of good steps, float64 [2, window], a ring
        self._count: Tensor | None = None  # good steps in all, int64 []
        self.loss: Tensor | None = None
        self.judgement: Tensor | None = None

    @torch.no_grad()
    def judge(self, norm: Tensor) -> Tensor:
        """Return 1 if the step at hand is to be left out and 0 if not, a float32 scalar on the device.

        Args:
            norm: the gradient's global norm, a float scalar.
        """
        assert self.loss is not None
        found = distributed.mean(torch.stack([self.loss.detach().double(), norm.detach().to(self.loss).double()]))
        if self._values is None:
            self._values = found.new_zeros(2, self._window)
            self._count = torch.zeros((), dtype=torch.int64, device=found.device)
        values, count = self._values.to(found.device), self._count.to(found.device)  # type: ignore[union-attr]
        limits = self._limits(values, count)
        good = (torch.isfinite(found) & (found <= limits)).all()
        places = torch.arange(self._window, device=found.device)
        self._values = torch.where(good & (places == count % self._window), found[:, None], values)
        self._count = count + good
        left_out = ~good
        self.judgement = torch.cat([left_out[None].double(), found, limits])
        return left_out.float()

    def _limits(self, values: Tensor, count: Tensor) -> Tensor:
        """Return the limits of loss and norm, float64 [2]."""
        if not self._deviations:
            return torch.full_like(values[:, 0], torch.inf)
        filled = torch.arange(self._window, device=values.device) < count
        number = filled.sum()
        mean = values.sum(dim=1) / number.clamp(min=1)  # empty places hold 0
        squares = ((values - mean[:, None]).square() * filled).sum(dim=1)
        limits = mean + self._deviations * (squares / (number - 1).clamp(min=1)).sqrt()
        return torch.where(count >= self._window // 2, limits, torch.inf)

    def forget(self) -> None:
        """Begin a new window: what is to come cannot be judged by what was."""
        if self._values is not None and self._count is not None:
            self._values, self._count = torch.zeros_like(self._values), torch.zeros_like(self._count)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the window and the count of good steps, on the host; waits for the device."""
        if self._values is None or self._count is None:
            return {"window": torch.zeros(2, 0, dtype=torch.float64), "count": torch.zeros((), dtype=torch.int64)}
        return {"window": self._values.cpu(), "count": self._count.cpu()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the window up; of one of another size, the last steps that fit."""
        values, count = state["window"].double(), int(state["count"])
        if values.shape[1] != self._window:
            held = min(values.shape[1], count)
            order = [place % values.shape[1] for place in range(count - held, count)][-self._window :]
            count = len(order)
            values = torch.cat([values[:, order], values.new_zeros(2, self._window - count)], dim=1)
        self._values, self._count = values.clone(), torch.tensor(count)


def leave_out(optimizer: Optimizer, left_out: Tensor) -> None:
    """Let the optimiser's next step change nothing where ``left_out``, a float32 scalar on its device, is 1.

    An optimiser that does not know of such a thing is given no gradients instead, for which the host must wait.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = left_out  # type: ignore[attr-defined]
    elif bool(left_out):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class EngineGuard:
    """A guard within a DeepSpeed engine, whose ``step`` measures the norm, clips and updates by itself.

    ZeRO calls the optimiser that it wraps once for each group of weights, at all stages after the global norm is known
    (``_global_grad_norm``). A hook before that call judges the step once and tells the optimiser; ZeRO then hands on
    weights that have not changed. A norm that is not finite never comes so far: ZeRO leaves that step out by itself
    (``overflow``), on all ranks, since the norm is one for all; ``settle`` judges it afterwards.

    Args:
        guard: judges; its ``loss`` must be set before each ``engine.step``.
        engine: DeepSpeed's, at stage 1, 2 or 3.
    """

    def __init__(self, guard: StepGuard, engine: Any) -> None:
        self._guard = guard
        self._engine = engine
        self._steps: int = engine.global_steps
        self._verdict: Tensor | None = None
        for optimizer in _wrapped(engine.optimizer):
            optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._verdict is None:
            self._verdict = self._judge()
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        device = next((each.device for each in parameters), self._verdict.device)  # the host, where that is offloaded
        leave_out(optimizer, self._verdict.to(device))

    def _judge(self) -> Tensor:
        loss = self._guard.loss
        assert loss is not None
        return self._guard.judge(torch.as_tensor(self._engine.optimizer._global_grad_norm, device=loss.device))

    def settle(self) -> None:
        """Note that ``engine.step`` is over; judge the step if it was one, and ZeRO has left it out by itself."""
        if self._engine.global_steps == self._steps:  # it only accumulates
            return
        if self._verdict is None:
            self._judge()
        self._steps, self._verdict = self._engine.global_steps, None


def _wrapped(zero: Any) -> list[Optimizer]:
    """Return the optimisers that a ZeRO optimiser calls: one, or two where a part of the states is offloaded."""
    found = [zero.optimizer, getattr(zero, "backup_optimizer", None)]
    return list({id(each): each for each in found if isinstance(each, Optimizer)}.values())
