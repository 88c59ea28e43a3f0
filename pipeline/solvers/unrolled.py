"""``unrolled``: K whole passes, each fed the last one's states, shifted by a position (Jacobi iteration).

The first pass is plain. In pass k position t is fed the state that pass k - 1 gave to t - 1, so the states of the first
k - 1 positions of a document (k, where a first position is computed alike with and without feedback) are those of the
exact recurrence after k passes. The passes of CRT (its K), FBT and of LRT's multi-refinement, which counts the passes
after the first.

With a carry, one position is one exact step of the recurrence, and several are K passes given the past: the K = 1 and
K = 2 prefills of FBT's soft and fused decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.models import Architecture, Feedback
from pipeline.models.base import Memory
from pipeline.models.inputs import Inputs
from pipeline.models.memory import KeyValueMemory
from pipeline.solvers.base import (
    SOLVERS,
    Carry,
    Solution,
    Solver,
    SolverConfig,
    check_count,
    check_feeds_back,
    place,
    register_of,
    residual,
    shifted,
    single_step,
)

# Finished positions are left out of a pass once they are this share of the row. So 32 passes over rows of 64 take 14 %
# less time, 16 passes 4 %. Smaller shares save no more, while keys and values must be kept and a mask be made.
FREEZE_SHARE = 1 / 8


@dataclass
class UnrolledConfig(SolverConfig):
    """K whole passes."""

    passes: int = 3
    """Passes K, the plain first one included."""
    loss: Literal["last", "mean", "weighted", "plain_and_fed"] = "last"
    """Which passes are trained: the ``last`` (CRT); all by their ``mean``, or ``weighted`` by ``loss_weights`` (LRT);
    or the plain one, plus the mean of the others times ``fed_loss_weight`` (``plain_and_fed``, FBT)."""
    loss_weights: list[float] = field(default_factory=list)
    """With ``loss: weighted``: a weight for each pass; they are divided by their sum."""
    fed_loss_weight: float = 1.0
    """With ``loss: plain_and_fed``: weight of the passes with feedback (FBT's lambda)."""
    convergence_weight: float = 0.0
    """Weight of the mean square between what the recurrent part would take in after the last pass and what it took in
    (CRT's convergence loss), where there are two passes or more."""
    detach_passes: bool = False
    """Stop gradients between passes."""
    prefix: float = 0.0
    """In training, each pass with feedback stays plain up to a boundary drawn for every document of every row, at most
    this share of it: 1 draws uniformly from its positions (FBT's prefix mixing), 0 feeds all."""
    tolerance: float = 0.0
    """Outside training, stop once a pass moves what is fed back by less than this share of its root mean square."""

    def evaluated(self) -> UnrolledConfig:
        """Return the settings without those of training."""
        return replace(self, loss="last", loss_weights=[], fed_loss_weight=1.0, convergence_weight=0.0, prefix=0.0)

    def check(self) -> None:
        """Raise ConfigError on values out of range or that contradict each other."""
        for name in Unrolled.schedulable:
            Unrolled.check_value(name, getattr(self, name))
        for name in ("fed_loss_weight", "convergence_weight", "tolerance"):
            if getattr(self, name) < 0:
                raise ConfigError(f"solver.{name} is {getattr(self, name)}; it must be at least 0")
        if self.loss_weights and self.loss != "weighted":
            raise ConfigError(f"solver.loss_weights is set; it has no use with solver.loss={self.loss}")
        if self.loss == "weighted" and not self.loss_weights:
            raise ConfigError("solver.loss is weighted; it needs solver.loss_weights, one for each of solver.passes")
        if self.loss_weights and (min(self.loss_weights) < 0 or self.loss_weights[-1] <= 0):
            raise ConfigError(f"solver.loss_weights is {self.loss_weights}; they must be at least 0, the last above it")
        if self.loss_weights and len(self.loss_weights) != self.passes:
            raise ConfigError(
                f"solver.loss_weights has {len(self.loss_weights)} weights; there must be one for each of "
                f"solver.passes={self.passes}"
            )
        if self.loss != "plain_and_fed" and self.fed_loss_weight != 1.0:
            raise ConfigError(f"solver.fed_loss_weight is set; it has no use with solver.loss={self.loss}")


@SOLVERS.register("unrolled")
class Unrolled(Solver):
    """K whole passes.

    Attributes:
        passes: K; may be changed between calls.
        prefix: likewise.
    """

    Config = UnrolledConfig
    feeds_back = True
    iterates = True
    schedulable = ("passes", "prefix")
    training_only = ("prefix",)
    passes: int
    prefix: float
    config: UnrolledConfig

    @classmethod
    def check_fits(cls, config: SolverConfig, architecture: type[Architecture]) -> None:
        """Refuse architectures that feed nothing back."""
        check_feeds_back(config, architecture)

    @classmethod
    def check_value(cls, setting: str, value: Any, name: str | None = None) -> None:
        """Raise ConfigError unless K is a whole number from 1 on, or the prefix a share."""
        name = name or f"solver.{setting}"
        if setting == "passes":
            check_count(name, value, "a number of passes is a whole number")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(f"{name} is {value!r}; a prefix is a share of a document, from 0 to 1")

    @classmethod
    def check_schedules(cls, config: SolverConfig, schedules: Any) -> None:
        """Refuse to change the number of passes under weights for a fixed one; see ``Solver.check_schedules``."""
        super().check_schedules(config, schedules)
        assert isinstance(config, UnrolledConfig)
        if "passes" in schedules and config.loss == "weighted":
            raise ConfigError(
                "schedules.passes changes the number of passes, solver.loss_weights are for a fixed one; choose "
                "another solver.loss"
            )

    @property
    def feeding(self) -> bool:
        """There is a pass after the plain one."""
        return self.passes > 1

    def run(
        self, model: Architecture, tokens: Tensor, starts: Tensor | None = None, carry: Carry | None = None
    ) -> Solution:
        """Compute the states in K passes; see ``Solver.run``."""
        index, starts = place(tokens, starts, carry)
        inputs, memory = model.prepare(tokens, index, starts, None if carry is None else carry.memory)
        if carry is not None and inputs.length == 1:
            return single_step(model, inputs, memory, carry)
        passes = Passes(self, model, inputs, register_of(carry, model, tokens.shape[0]))
        passes.run(None if carry is None else memory)
        solution = Solution(
            passes.states,
            terms=passes.terms(),
            penalty=passes.penalty(),
            residuals=torch.stack(passes.residuals) if passes.residuals else None,
        )
        if carry is None:
            return solution
        register = Feedback(model.fed_back(passes.states[:, -1:]))
        return replace(solution, carry=replace(carry, memory=passes.memory, length=inputs.stop, register=register))

    def weights(self, count: int) -> list[float]:
        """Return the weight of each pass in the loss; ``count`` passes were run, and stand for all K."""
        match self.config.loss:
            case "mean":
                weights = [1 / self.passes] * self.passes
            case "weighted":
                weights = [weight / sum(self.config.loss_weights) for weight in self.config.loss_weights]
            case "plain_and_fed":
                fed = self.passes - 1
                weights = [1.0] + [self.config.fed_loss_weight / fed for _ in range(fed)]
            case _:
                weights = [0.0] * (self.passes - 1) + [1.0]
        return [*weights[: count - 1], sum(weights[count - 1 :])]

    def finished(self, model: Architecture, passes: int) -> int:
        """Return how many positions of a document are exact after that many passes."""
        return passes if model.begins_plain else passes - 1

    def flops_per_token(self, model: Architecture, length: int) -> float:
        """Return the forward FLOPs of one token; a pass leaves out what is finished, where that is worth it."""
        flops = model.flops(length)
        total, count = flops.prepare + flops.advance, 1
        if self.passes > 1:
            total += flops.prepare_feedback
        for number in range(2, self.passes + 1):
            done = self.finished(model, number - 1)
            if done >= length:
                break
            done = done if self.freezes(model, done, length) else 0
            left_out = done * model.flops(done).advance if done else 0.0
            total += flops.advance - left_out / length
            total += (1 - done / length) * (flops.fed_position + flops.fed_state)
            count = number
        if self.config.convergence_weight and count > 1:
            total += 2 * (flops.fed_position + flops.fed_state)
        return total + flops.readout * sum(weight > 0 for weight in self.weights(count))

    def freezes(self, model: Architecture, done: int, length: int) -> bool:
        """Return whether so many finished positions of a row are left out of a pass.

        What every pass draws anew is never finished.
        """
        drawn = model.training and (self.prefix > 0 or model.draws)
        return done >= FREEZE_SHARE * length and not drawn


class Passes:
    """The passes over one batch.

    Attributes:
        states: of the last pass, [rows, n, s].
        residuals: of each pass after the first.
        memory: what the last pass left.
    """

    states: Tensor

    def __init__(self, solver: Unrolled, model: Architecture, inputs: Inputs, register: Feedback) -> None:
        self._solver, self._model, self._register = solver, model, register
        self._inputs = inputs
        self._feedback: Feedback | None = None
        self._mask: Tensor | None = None
        self._trained: list[Tensor] = []
        self._count = 1
        self.residuals: list[Tensor] = []
        self.memory: Memory = {}

    def run(self, memory: Memory | None) -> None:
        """Run the passes.

        Args:
            memory: of the positions before; None: there are none, and none of these is to be kept.
        """
        solver, model = self._solver, self._model
        fresh = self._freezing() if memory is None else None
        self.states, self.memory = model.advance(self._inputs, None, memory if fresh is None else fresh())
        if solver.passes == 1:
            return
        self._inputs = model.prepare_feedback(self._inputs)
        fed = self._fed_back()
        for number in range(2, solver.passes + 1):
            done = solver.finished(model, number - 1) if fresh is not None else 0
            if done >= self._inputs.length:
                break
            self._feedback = self._fed(fed)
            if fresh is not None and solver.freezes(model, done, self._inputs.length):
                self._next(self._rest(done))
            else:
                states, self.memory = model.advance(self._inputs, self._feedback, memory if fresh is None else fresh())
                self._next(states)
            before, fed = fed, self._fed_back()
            self.residuals.append(residual(fed, before))
            if self._close_enough():
                break

    def terms(self) -> tuple[tuple[Tensor, float], ...]:
        """Return the states that are trained, each with its weight; those of early passes that are not were let go."""
        weights = [weight for weight in self._solver.weights(self._count)[:-1] if weight]
        last = self._solver.weights(self._count)[-1]
        return (*zip(self._trained, weights, strict=True), (self.states, last))

    def _next(self, states: Tensor) -> None:
        """Go on from a pass to the states of the next."""
        if self._solver.weights(self._solver.passes)[self._count - 1]:
            self._trained.append(self.states)
        self.states = states
        self._count += 1

    def _fed_back(self) -> Tensor:
        """Return what of the pass's states is fed back, [rows, n, d]."""
        return self._model.fed_back(self.states.detach() if self._solver.config.detach_passes else self.states)

    def penalty(self) -> Tensor | None:
        """Return the weighted convergence loss, where there is one."""
        weight = self._solver.config.convergence_weight
        if not weight or self._feedback is None or not torch.is_grad_enabled():
            return None
        with torch.no_grad():
            taken = self._model.fed_input(self._inputs, self._feedback).detach()
        following = shifted(self._model, self._fed_back(), self._register, self._inputs)
        if self._mask is not None:
            following = following.only(self._mask)
        return weight * (self._model.fed_input(self._inputs, following) - taken).square().mean()

    def _freezing(self) -> Any:
        """Return what makes a memory for each whole pass, if finished positions will be left out; else None.

        Where rows hold several documents, or something is drawn anew in every pass, nothing is.
        """
        solver, model, inputs = self._solver, self._model, self._inputs
        done = solver.finished(model, solver.passes - 1)
        if inputs.starts is not None or not solver.freezes(model, done, inputs.length):
            return None
        return model.rewritable_memory

    def _rest(self, done: int) -> Tensor:
        """Return the states of a pass that leaves out the first ``done`` positions."""
        assert self._feedback is not None
        inputs = self._inputs.cut(done, self._inputs.length, self._inputs.stop)
        memory = {name: first_of(each, done) for name, each in self.memory.items()}
        states, self.memory = self._model.advance(inputs, self._feedback.cut(done), memory)
        return torch.cat([self.states[:, :done], states], dim=1)

    def _fed(self, fed: Tensor) -> Feedback:
        """Return what a pass feeds back, given what of the last one's states is."""
        feedback = shifted(self._model, fed, self._register, self._inputs)
        if self._solver.prefix > 0 and self._model.training:
            self._mask = ~self._prefix()
            feedback = feedback.only(self._mask)
        return feedback

    def _prefix(self) -> Tensor:
        """Draw for each document of each row how many of its positions stay plain; return them, bool [rows, n]."""
        inputs, rows, length = self._inputs, len(self.states), self._inputs.length
        places = torch.arange(length, device=inputs.index.device).expand(rows, -1)
        starts = torch.zeros_like(places)
        if inputs.starts is not None:  # a document that began in an earlier call goes on from place 0
            starts = (inputs.starts - (inputs.stop - length)).clamp(min=0)
        ends = torch.full_like(starts, length)
        following = torch.where(places == starts, places, length)[:, 1:]
        ends[:, :-1] = following.flip(1).cummin(dim=1).values.flip(1)
        draw = torch.rand(rows, length, device=starts.device).gather(1, starts)
        most = ((ends - starts) * self._solver.prefix).ceil().clamp(min=1)
        return places - starts < 1 + (draw * most).long()

    def _close_enough(self) -> bool:
        tolerance = self._solver.config.tolerance
        if not tolerance or torch.is_grad_enabled():
            return False
        return float(self.residuals[-1]) < tolerance


def first_of(memory: KeyValueMemory, count: int) -> KeyValueMemory:
    """Return a rewritable memory of whole rows as it was after their first ``count`` positions."""
    if memory.index is None:
        return memory
    keys, values = ([each[:, :, :count] for each in tensors] for tensors in (memory.keys, memory.values))
    return replace(memory, index=memory.index[:, :count], keys=keys, values=values, stop=count)
