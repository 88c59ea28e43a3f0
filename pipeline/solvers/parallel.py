"""``parallel``: one pass over all positions, nothing fed back. The plain transformer, and RLT-0."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from pipeline.models import Architecture
from pipeline.solvers.base import SOLVERS, Carry, Solution, Solver, SolverConfig, place


@dataclass
class ParallelConfig(SolverConfig):
    """One pass, no feedback."""


@SOLVERS.register("parallel")
class Parallel(Solver):
    """One pass over all positions."""

    Config = ParallelConfig
    feeds_back = False

    @classmethod
    def check_fits(cls, config: SolverConfig, architecture: type[Architecture]) -> None:
        """Every architecture has a pass without feedback."""

    def run(
        self, model: Architecture, tokens: Tensor, starts: Tensor | None = None, carry: Carry | None = None
    ) -> Solution:
        """Compute all states in one pass; see ``Solver.run``."""
        index, starts = place(tokens, starts, carry)
        inputs, memory = model.prepare(tokens, index, starts, None if carry is None else carry.memory)
        states, memory = model.advance(inputs, None, None if carry is None else memory)
        if carry is None:
            return Solution(states)
        return Solution(states, replace(carry, memory=memory, length=inputs.stop))

    def flops_per_token(self, model: Architecture, length: int) -> float:
        """Return the forward FLOPs of one token; see ``Solver.flops_per_token``."""
        flops = model.flops(length)
        return flops.prepare + flops.advance + flops.readout
