"""Named ranges of training samples that a run leaves out: the batch that broke it, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


class Skips:
    """Which sample of the global order comes at each place of a run.

    A run takes the samples 0, 1, 2, ... of ``GlobalOrder`` in turn, without those in the ranges. So the sample at place
    p is the p-th that is left: a pure function of p, whatever ranks and loader processes there are. A range has no
    effect on the places before it, so that one may be added, changed or taken away while it lies ahead of a run.

    Args:
        ranges: [first, last] sample of each, both left out; in any order.

    Raises:
        ValueError: a range ends before it begins, begins below 0, or overlaps another.
    """

    def __init__(self, ranges: Sequence[Sequence[int]] = ()) -> None:
        self.ranges = sorted((first, last) for first, last in ranges)
        ends = [-1, *(last for _, last in self.ranges)]
        for end, (first, last) in zip(ends, self.ranges, strict=False):
            if first <= end or last < first:
                raise ValueError(f"range [{first}, {last}] is empty or overlaps another, or begins below 0")
        firsts, lasts = np.array(self.ranges, dtype=np.int64).reshape(-1, 2).T
        self._left_out = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lasts - firsts + 1)])
        self._borders = firsts - self._left_out[:-1]  # the first place behind each range

    @overload
    def sample(self, place: int) -> int: ...

    @overload
    def sample(self, place: I64) -> I64: ...

    def sample(self, place: int | I64) -> int | I64:
        """Return the sample at a place, counted from 0; or those at many, of any shape."""
        found = place + self._left_out[np.searchsorted(self._borders, place, side="right")]
        return found if isinstance(place, np.ndarray) else int(found)

    def runs(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the samples at ``count`` places from ``first`` on, as [first, last] of each unbroken run of them."""
        borders = {int(border) for border in self._borders if first < border < first + count}
        begins = [first, *sorted(borders)]
        ends = [*begins[1:], first + count]
        return [(self.sample(begin), self.sample(end - 1)) for begin, end in zip(begins, ends, strict=True)]

    def passed(self, place: int) -> str:
        """Return the ranges that lie behind a run for which ``place`` is next, as a configuration would name them.

        It is all that must stay the same for ``place``, and the places before it, to mean the same samples. A range
        that the run stands right before lies ahead.
        """
        newest = self.sample(place - 1) if place else -1
        return str(merged([each for each in self.ranges if each[0] < newest]))


def merged(ranges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return ranges in order, those that touch or overlap made one: how to name them in a configuration."""
    found: list[list[int]] = []
    for first, last in sorted((first, last) for first, last in ranges):
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return found
