"""The contract of a solver: in which order an architecture's ``advance`` is called over a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from omegaconf import MISSING
from torch import Tensor

from pipeline.choices import Registry
from pipeline.errors import ConfigError
from pipeline.models import Architecture, Feedback
from pipeline.models.base import Memory
from pipeline.models.inputs import Inputs
from pipeline.solvers.schedules import Mixture, Stages, combinations, stages_at


@dataclass
class SolverConfig:
    """What all solvers share."""

    name: str = MISSING
    """Solver: ``parallel``, ``chunked``, ``unrolled`` or ``interleaved``."""
    activation_checkpointing: bool = False
    """Keep less for backward and compute it again: blocks of position-parallel stacks one by one, loops over time in
    segments. States are the same to the last bit, and so are gradients, but for the rounding of sums that solver
    ``chunked`` takes over other groups of positions."""

    def evaluated(self) -> SolverConfig:
        """Return the settings without those that training alone knows."""
        return self


@dataclass
class Carry:
    """All that a sequence needs in order to go on: what decoding carries from token to token.

    Attributes:
        memory: keys and values of the positions so far.
        length: positions so far.
        register: what the next position is fed, states [rows, 1, d]; None where nothing is fed back.
        starts: row index at which each row's current document begins, int64 [rows]; None where it is 0.
    """

    memory: Memory
    length: int = 0
    register: Feedback | None = None
    starts: Tensor | None = None


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Shapes: rows, positions n, width of a state s.

    Attributes:
        states: the state of every position, [rows, n, s].
        carry: with which the sequence goes on; None where none was asked for.
        terms: what is trained: states [rows, n, s], each with the weight of its mean loss; none: ``states`` alone.
        penalty: added to the loss, a scalar; None for nothing.
        residuals: how far each pass moved what is fed back, as a share of its root mean square, [passes - 1],
            in float32 at least; None where there is one pass.
    """

    states: Tensor
    carry: Carry | None = None
    terms: tuple[tuple[Tensor, float], ...] = ()
    penalty: Tensor | None = None
    residuals: Tensor | None = None

    @property
    def loss_terms(self) -> tuple[tuple[Tensor, float], ...]:
        """What is trained, never empty."""
        return self.terms or ((self.states, 1.0),)


class Solver(ABC):
    """One way to evaluate a recurrence.

    Attributes:
        Config: dataclass of its settings.
        feeds_back: states are fed back.
        iterates: it goes over the positions more than once, so that there is a residual between passes.
        schedulable: settings that may change over a run, each an attribute of the solver of the same name.
        training_only: those of them that evaluation ignores.
    """

    Config: ClassVar[type[SolverConfig]]
    feeds_back: ClassVar[bool]
    iterates: ClassVar[bool] = False
    schedulable: ClassVar[Sequence[str]] = ()
    training_only: ClassVar[Sequence[str]] = ()

    def __init__(self, config: SolverConfig) -> None:
        self.config = config
        for name in self.schedulable:
            setattr(self, name, getattr(config, name))

    def __str__(self) -> str:
        settings = {name: value for name, value in self.settings().items() if name not in self.training_only}
        return " ".join([self.config.name, *(f"{name}={value}" for name, value in settings.items())])

    @classmethod
    @abstractmethod
    def check_fits(cls, config: SolverConfig, architecture: type[Architecture]) -> None:
        """Raise ConfigError, with the reason, if this solver makes no sense for ``architecture``."""

    @classmethod
    def check_value(cls, setting: str, value: Any, name: str | None = None) -> None:
        """Raise ConfigError, calling it ``name`` (solver.SETTING), if a schedulable setting cannot take ``value``."""
        raise NotImplementedError(f"{cls.__name__} has no setting to change")

    @classmethod
    def closest(cls, setting: str, values: Sequence[Any]) -> Any:
        """Return which of the values of a schedulable setting comes closest to the exact recurrence."""
        return max(values)

    @classmethod
    def check_schedules(cls, config: SolverConfig, schedules: Mapping[str, Sequence[tuple[float, Any]]]) -> None:
        """Raise ConfigError if a schedule changes what cannot change, or is not in order.

        Args:
            config: settings of the solver.
            schedules: for each setting its stages, as (fraction of the run's tokens, value or mixture of values).
        """
        for name, stages in schedules.items():
            if name not in cls.schedulable:
                names = ", ".join(cls.schedulable) or "none"
                raise ConfigError(
                    f"schedules.{name}: solver {config.name!r} has no such setting to change; it has: {names}"
                )
            if not stages:
                raise ConfigError(f"schedules.{name} is empty; give it a stage at 0, or leave it out")
            starts = [at for at, _ in stages]
            if starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1:
                raise ConfigError(
                    f"schedules.{name} begins its stages at {starts}; they must ascend from 0 and stay below 1"
                )
            for _, value in stages:
                for each in value.values if isinstance(value, Mixture) else (value,):
                    cls.check_value(name, each, f"schedules.{name}: value")

    @property
    def feeding(self) -> bool:
        """The present settings feed something back."""
        return self.feeds_back

    @contextmanager
    def set_to(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Give settings that may change other values for a while."""
        before = self.settings()
        for name, value in settings.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def settings(self) -> dict[str, Any]:
        """Return the present values of the settings that may change."""
        return {name: getattr(self, name) for name in self.schedulable}

    def adapt(self, model: Architecture) -> None:
        """Set the model up for training: checkpointing, and no gradient for what stays unused without feedback."""
        model.checkpoint_blocks = self.config.activation_checkpointing
        model.checkpoint_finely = False
        for parameter in model.dormant_parameters():
            parameter.requires_grad_(self.feeds_back)

    def new_carry(
        self, model: Architecture, rows: int, *, capacity: int | None = None, starts: Tensor | None = None
    ) -> Carry:
        """Return the carry of ``rows`` empty sequences.

        Args:
            model: architecture.
            rows: sequences.
            capacity: positions to set buffers aside for, for inference; None grows, under autograd too.
            starts: row index at which each row's document begins, int64 [rows], for rows padded on the left.
        """
        register = model.initial_feedback(rows) if self.feeds_back else None
        return Carry(model.new_memory(capacity), 0, register, starts)

    @abstractmethod
    def run(
        self, model: Architecture, tokens: Tensor, starts: Tensor | None = None, carry: Carry | None = None
    ) -> Solution:
        """Compute the states of a sequence, or of the next part of one.

        Args:
            model: architecture.
            tokens: int64 [rows, n].
            starts: row index at which each position's document begins, int64 [rows, n]; None: that of the carry, or 0.
                Best on the host, wherever the tokens are: what hangs on it is decided there, and then nothing waits
                for the device.
            carry: from the part before; None: there is none, and none is wanted.
        """

    @abstractmethod
    def flops_per_token(self, model: Architecture, length: int) -> float:
        """Return the forward FLOPs of one token in training, logits included, averaged over a row of ``length``."""


def flops_by_stage(
    solver: Solver, model: Architecture, schedules: Mapping[str, Stages], length: int
) -> list[tuple[float, float]]:
    """Return the forward FLOPs of a token for each stage of a run: (fraction where it begins, FLOPs).

    Args:
        solver: solver whose settings the schedules change.
        model: architecture.
        schedules: for each setting its stages.
        length: tokens of a row.
    """
    found = []
    for begin in sorted({0.0, *(at for stages in schedules.values() for at, _ in stages)}):
        total = 0.0
        for share, settings in combinations(stages_at(schedules, begin)):
            with solver.set_to(settings):
                total += share * solver.flops_per_token(model, length)
        found.append((begin, total))
    return found


SOLVERS: Registry[type[Solver]] = Registry("solver")


def build(config: SolverConfig) -> Solver:
    """Return the solver that ``config`` names."""
    return SOLVERS[config.name](config)


def place(tokens: Tensor, starts: Tensor | None, carry: Carry | None) -> tuple[Tensor, Tensor | None]:
    """Return the row index [1, n] of each position, and ``starts`` beside the tokens, with the carry's filled in."""
    offset = 0 if carry is None else carry.length
    index = torch.arange(offset, offset + tokens.shape[1], device=tokens.device)[None]
    if starts is not None:
        return index, moved(starts, tokens.device)
    if carry is not None and carry.starts is not None:
        # Positions of the padding before a row's start make a document of their own.
        begin = carry.starts[:, None]
        starts = torch.where(index >= begin, begin, torch.zeros_like(begin))
    return index, starts


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device, without a wait for what the device has yet to do."""
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


MOST = 1_000_000
"""Positions, passes or subsets beyond which a setting is a slip."""


def check_feeds_back(config: SolverConfig, architecture: type[Architecture]) -> None:
    """Raise ConfigError if there is nothing for the solver to feed back."""
    if not architecture.feeds_back:
        raise ConfigError(
            f"solver.name is {config.name}, but this architecture feeds nothing back, so one pass is all there is; set "
            "solver.name=parallel"
        )


def check_count(name: str, value: Any, what: str) -> None:
    """Raise ConfigError, saying ``what`` the setting ``name`` is, unless ``value`` is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; {what} from 1 on")
    if value > MOST:
        raise ConfigError(f"{name} is {value}; it must be at most {MOST}")


def register_of(carry: Carry | None, model: Architecture, rows: int) -> Feedback:
    """Return what the first position at hand is fed, unless a document begins there."""
    if carry is None:
        return model.initial_feedback(rows)
    if carry.register is None:
        raise ValueError("the carry comes from a solver without feedback; begin with this solver's new_carry")
    return carry.register


def shifted(model: Architecture, fed: Tensor, register: Feedback, inputs: Inputs) -> Feedback:
    """Return what each position is fed: the state of the one before, or the initial one where a document begins.

    Args:
        model: architecture.
        fed: what of each position's state is fed back, [rows, n, d].
        register: what the first position is fed.
        inputs: the positions.
    """
    return restarted(model, behind(register, fed[:, :-1]), inputs)


def behind(register: Feedback, fed: Tensor) -> Feedback:
    """Return the feedback of the register and, behind it, of states of which ``fed`` [rows, n, d] is fed back."""
    rows, length = fed.shape[:2]
    states = torch.cat([register.states.expand(rows, -1, -1).to(fed.dtype), fed], dim=1)
    if register.fed is None:
        return Feedback(states)
    first = register.fed.expand(-1, 1, -1)
    return Feedback(states, torch.cat([first, first.new_ones(()).expand(len(first), length, 1)], dim=1))


def restarted(model: Architecture, feedback: Feedback, inputs: Inputs) -> Feedback:
    """Return the same feedback, the initial one where a document begins."""
    if inputs.starts is None:
        return feedback
    return model.initial_feedback(inputs.starts.shape[0]).where(inputs.index == inputs.starts, feedback)


def single_step(model: Architecture, inputs: Inputs, memory: Memory, carry: Carry) -> Solution:
    """Compute one position a row of the exact recurrence: decoding."""
    feedback = restarted(model, register_of(carry, model, inputs.index.shape[0]), inputs)
    states, memory = model.advance(model.prepare_feedback(inputs), feedback, memory)
    register = Feedback(model.fed_back(states))
    return Solution(states, replace(carry, memory=memory, length=inputs.stop, register=register))


@torch.no_grad()
def residual(new: Tensor, old: Tensor) -> Tensor:
    """Return the root mean square of the change over that of ``new``, a scalar in float32 at least."""
    dtype = torch.promote_types(torch.float32, new.dtype)
    new = new.to(dtype)
    change, size = torch.linalg.vector_norm(new - old), torch.linalg.vector_norm(new)
    return change / size.clamp(min=torch.finfo(torch.float32).tiny)
