"""Solvers: how the recurrence of an architecture is evaluated over a sequence. One file a solver."""

from pipeline.solvers.base import SOLVERS, Carry, Solver, SolverConfig, build
from pipeline.solvers.chunked import Chunked, sequential
from pipeline.solvers.parallel import Parallel

__all__ = ["SOLVERS", "Carry", "Chunked", "Parallel", "Solver", "SolverConfig", "build", "sequential"]
