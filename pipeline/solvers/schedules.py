"""Schedules that change a solver's settings over a run: piecewise constant in the fraction of tokens.

A stage's value may be a mixture, from which one value is drawn for every step: a pure function of (seed, setting,
step), so that every rank draws the same and a resumed run draws again what it drew.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

Stages = Sequence[tuple[float, Any]]


@dataclass(frozen=True)
class Mixture:
    """Values of which one is drawn.

    Attributes:
        values: the values.
        weights: how often each is drawn, relative to the others.
    """

    values: tuple[Any, ...]
    weights: tuple[float, ...]

    def draw(self, seed: int, setting: str, step: int) -> Any:
        """Return the value of a step."""
        digest = hashlib.blake2b(f"{seed}/{setting}/{step}".encode(), digest_size=8).digest()
        borders = list(accumulate(self.weights))
        place = int.from_bytes(digest, "little") / 2**64 * borders[-1]
        return self.values[min(bisect_right(borders, place), len(self.values) - 1)]


class SolverSchedule:
    """The value of every scheduled setting at any point of a run.

    Args:
        schedules: for each setting its stages, as (fraction of the run's tokens at which it begins, value or mixture),
            ascending from 0 (``Solver.check_schedules`` has seen to that).
        steps: steps of the whole run.
        seed: of the draws.
        closest: picks, for a setting, the value of a mixture that evaluation takes (``Solver.closest``).
    """

    def __init__(
        self,
        schedules: Mapping[str, Stages],
        *,
        steps: int,
        seed: int,
        closest: Callable[[str, Sequence[Any]], Any],
    ) -> None:
        self._schedules = schedules
        self._steps = steps
        self._seed = seed
        self._closest = closest

    def values(self, step: int) -> dict[str, Any]:
        """Return the value of every scheduled setting in a step of training, counted from 0."""
        return {
            name: value.draw(self._seed, name, step) if isinstance(value, Mixture) else value
            for name, value in self._stages(step).items()
        }

    def evaluation_values(self, step: int) -> dict[str, Any]:
        """Return the same for evaluation after that step: of a mixture, the value closest to the exact recurrence."""
        return {
            name: self._closest(name, value.values) if isinstance(value, Mixture) else value
            for name, value in self._stages(step).items()
        }

    def stage_begins(self, step: int) -> bool:
        """Return whether a setting has another value or mixture in a step, counted from 0, than in the one before."""
        return step > 0 and self._stages(step) != self._stages(step - 1)

    def _stages(self, step: int) -> dict[str, Any]:
        return stages_at(self._schedules, step / self._steps)


def stages_at(schedules: Mapping[str, Stages], fraction: float) -> dict[str, Any]:
    """Return the value or mixture of every scheduled setting at a fraction of the run."""
    found = {}
    for name, stages in schedules.items():
        found[name] = stages[bisect_right([at for at, _ in stages], fraction) - 1][1]
    return found


def combinations(settings: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield every combination of values that mixtures may draw, with its probability."""
    if not settings:
        yield 1.0, {}
        return
    (name, value), *rest = settings.items()
    choices = [(value, 1.0)]
    if isinstance(value, Mixture):
        choices = [
            (each, weight / sum(value.weights)) for each, weight in zip(value.values, value.weights, strict=True)
        ]
    for share, others in combinations(dict(rest)):
        yield from ((share * part, {name: each, **others}) for each, part in choices if part)


def mean_over_stages(stages: Sequence[tuple[float, float]]) -> float:
    """Return the mean over the run of what is constant in stages, (fraction at which it begins, value)."""
    borders = [*(at for at, _ in stages), 1.0]
    return sum((end - begin) * value for (begin, end), (_, value) in zip(pairwise(borders), stages, strict=True))
