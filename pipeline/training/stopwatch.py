"""Time spent training, without what validation and checkpoints take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """A clock that can be stopped.

    Attributes:
        pauses: seconds it stood still so far.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.pauses = 0.0

    def seconds(self) -> float:
        """Return the seconds that it has run."""
        return time.perf_counter() - self._start - self.pauses

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.pauses += time.perf_counter() - begin
