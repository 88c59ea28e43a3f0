"""Schedules that change a solver's settings over a run: piecewise constant in the fraction of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

Stages = Sequence[tuple[float, Any]]


class SolverSchedule:
    """The value of every scheduled setting at any point of a run: a pure function of the tokens seen.

    Args:
        schedules: for each setting its stages, as (fraction of the run's tokens at which it begins, value), ascending
            from 0 (``Solver.check_schedules`` has seen to that).
        total_tokens: tokens of the whole run.
    """

    def __init__(self, schedules: Mapping[str, Stages], total_tokens: int) -> None:
        self._schedules = schedules
        self._total = total_tokens

    def values(self, tokens: int) -> dict[str, Any]:
        """Return the value of every scheduled setting for the batch that follows ``tokens`` tokens."""
        fraction = tokens / self._total
        found = {}
        for name, stages in self._schedules.items():
            stage = bisect_right([at for at, _ in stages], fraction) - 1
            found[name] = stages[stage][1]
        return found
