"""The contract of a solver: in which order an architecture's ``advance`` is called over a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from omegaconf import MISSING
from torch import Tensor

from pipeline.choices import Registry
from pipeline.errors import ConfigError
from pipeline.models import Architecture
from pipeline.models.base import Memory


@dataclass
class SolverConfig:
    """What all solvers share."""

    name: str = MISSING
    """Solver: ``parallel`` or ``chunked``."""
    activation_checkpointing: bool = False
    """Keep less for backward and compute it again: blocks of position-parallel stacks one by one, loops over time in
    segments. The result is the same to the last bit."""


@dataclass
class Carry:
    """All that a sequence needs in order to go on: what decoding carries from token to token.

    Attributes:
        memory: keys and values of the positions so far.
        length: positions so far.
        register: the state that the next position is fed, [rows, 1, d]; None where nothing is fed back.
        starts: row index at which each row's current document begins, int64 [rows]; None where it is 0.
    """

    memory: Memory
    length: int = 0
    register: Tensor | None = None
    starts: Tensor | None = None


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        states: the state of every position, [rows, n, d].
        carry: with which the sequence goes on; None where none was asked for.
    """

    states: Tensor
    carry: Carry | None = None


class Solver(ABC):
    """One way to evaluate a recurrence.

    Attributes:
        Config: dataclass of its settings.
        feeds_back: states are fed back.
        schedulable: settings that may change over a run, each an attribute of the solver of the same name.
    """

    Config: ClassVar[type[SolverConfig]]
    feeds_back: ClassVar[bool]
    schedulable: ClassVar[Sequence[str]] = ()

    def __init__(self, config: SolverConfig) -> None:
        self.config = config
        for name in self.schedulable:
            setattr(self, name, getattr(config, name))

    @classmethod
    @abstractmethod
    def check_fits(cls, config: SolverConfig, architecture: type[Architecture]) -> None:
        """Raise ConfigError, with the reason, if this solver makes no sense for ``architecture``."""

    @classmethod
    def check_value(cls, name: str, value: Any) -> None:
        """Raise ConfigError, calling the setting ``name``, if it cannot take ``value``."""
        raise NotImplementedError(f"{cls.__name__} has no setting to change")

    @classmethod
    def check_schedules(cls, config: SolverConfig, schedules: Mapping[str, Sequence[tuple[float, Any]]]) -> None:
        """Raise ConfigError if a schedule changes what cannot change, or is not in order.

        Args:
            config: settings of the solver.
            schedules: for each setting its stages, as (fraction of the run's tokens, value).
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
                cls.check_value(f"schedules.{name}: value", value)

    def settings(self) -> dict[str, Any]:
        """Return the present values of the settings that may change."""
        return {name: getattr(self, name) for name in self.schedulable}

    def adapt(self, model: Architecture) -> None:
        """Set the model up for training: checkpointing, and no gradient for what stays unused without feedback."""
        model.checkpoint_blocks = self.config.activation_checkpointing
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
        register = model.initial_state(rows) if self.feeds_back else None
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
            carry: from the part before; None: there is none, and none is wanted.
        """

    def flops_per_token(self, model: Architecture, length: int) -> float:
        """Return the forward FLOPs of one token in a row of ``length`` tokens; see ``Architecture``."""
        return model.flops_per_token(length, feedback=float(self.feeds_back))


SOLVERS: Registry[type[Solver]] = Registry("solver")


def build(config: SolverConfig) -> Solver:
    """Return the solver that ``config`` names."""
    return SOLVERS[config.name](config)


def place(tokens: Tensor, starts: Tensor | None, carry: Carry | None) -> tuple[Tensor, Tensor | None]:
    """Return the row index [1, n] of each position, and ``starts`` with the carry's filled in."""
    offset = 0 if carry is None else carry.length
    index = torch.arange(offset, offset + tokens.shape[1], device=tokens.device)[None]
    if starts is None and carry is not None and carry.starts is not None:
        # Positions of the padding before a row's start make a document of their own.
        begin = carry.starts[:, None]
        starts = torch.where(index >= begin, begin, torch.zeros_like(begin))
    return index, starts
