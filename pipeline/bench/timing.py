"""Times of several things that take turns in one process, so that what else the machine does falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from pipeline.progress import Progress

WARM_UP = 1
"""Rounds before those that count: memory is fetched and kernels are chosen in them."""


def alternate(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    label: str,
    *,
    between: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of every timed run of each contestant.

    Args:
        contestants: what is timed, by name; they take turns in this order.
        repeats: rounds that count.
        label: what the rounds are called on the screen.
        between: called after each round, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    rounds = WARM_UP + repeats
    with Progress(rounds * len(contestants), "runs", label) as progress:
        for number in range(rounds):
            for name, contestant in contestants.items():
                begin = time.perf_counter()
                contestant()
                took = time.perf_counter() - begin
                if number >= WARM_UP:
                    seconds[name].append(took)
                progress.advance(1)
            if between is not None:
                between()
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each contestant's times."""
    return {name: statistics.median(each) for name, each in seconds.items()}
