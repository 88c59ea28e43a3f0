"""Where this process is within a step: what the other ranks are told of it when it dies or hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

Part = TypeVar("Part")

START = "start"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer step"
BETWEEN = "between steps"
SAVE, VALIDATION = "save", "validation"
ALL = (START, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, SAVE, VALIDATION)


@dataclass(frozen=True)
class Moment:
    """A place in a run.

    Attributes:
        step: optimiser step at hand, counted from 1; 0 before the first.
        phase: what is done in it.
        count: moments before this one. Ranks that train together go through the same ones, so the rank with the
            smallest count is the one that the others wait for.
        since: when it began, in seconds of the monotonic clock.
    """

    step: int = 0
    phase: str = START
    count: int = 0
    since: float = field(default_factory=time.monotonic)


_now = Moment()
_listener: Callable[[Moment], object] | None = None


def now() -> Moment:
    """Return where this process is."""
    return _now


def listen(listener: Callable[[Moment], object] | None) -> None:
    """Call ``listener`` with every moment from now on; None: nobody."""
    global _listener
    _listener = listener
    if listener is not None:
        listener(_now)


def enter(phase: str, step: int | None = None) -> None:
    """Say that a phase begins, of the same step unless another is given."""
    global _now
    _now = Moment(_now.step if step is None else step, phase, _now.count + 1)
    if _listener is not None:
        _listener(_now)


def progressed() -> None:
    """Say that a long phase goes on."""
    global _now
    _now = replace(_now, count=_now.count + 1, since=time.monotonic())


def marked(parts: Iterable[Part]) -> Iterator[Part]:
    """Return the parts of a long phase, each of which is progress."""
    for part in parts:
        yield part
        progressed()


@contextmanager
def within(phase: str) -> Iterator[None]:
    """Enter a phase, and the one before again afterwards; not after an exception, whose cause lies in the phase."""
    before = _now.phase
    enter(phase)
    yield
    enter(before)
