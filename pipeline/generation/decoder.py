"""A model that goes on from what it has read: caches, weights and the recurrent state of some rows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from pipeline.generation.weights import HeldWeights
from pipeline.models import Architecture
from pipeline.models.collector import collecting
from pipeline.solvers import Solver


class Decoder:
    """Rows that are read part by part, each from the caches of those before it. To be used in inference mode.

    States and logits come apart, so that logits are taken only where they are wanted, and each can be timed alone.

    Args:
        model: architecture.
        solver: how the recurrence is evaluated.
        rows: rows.
        capacity: positions that the rows may come to.
        starts: row index at which each row begins, int64 [rows], for rows padded on the left; None: all at 0.
        weights: the model's, held; None reads them from the model.
    """

    def __init__(
        self,
        model: Architecture,
        solver: Solver,
        rows: int,
        capacity: int,
        *,
        starts: Tensor | None = None,
        weights: HeldWeights | None = None,
    ) -> None:
        self._model, self._solver, self._weights = model, solver, weights
        self._carry = solver.new_carry(model, rows, capacity=capacity, starts=starts)

    def read(self, tokens: Tensor) -> Tensor:
        """Read the next tokens of every row, int64 [rows, n]; return the states of the last, [rows, s]."""
        with self._holding():
            solution = self._solver.run(self._model, tokens, carry=self._carry)
        assert solution.carry is not None
        self._carry = solution.carry
        return solution.states[:, -1]

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [rows, V] of states [rows, s]."""
        with self._holding():
            return self._model.readout(states)

    def _holding(self) -> AbstractContextManager[None]:
        return nullcontext() if self._weights is None else collecting(self._weights)
