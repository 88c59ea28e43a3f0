"""Solvers: how the recurrence of an architecture is evaluated over a sequence. One file a solver."""

from pipeline.solvers.base import SOLVERS, Carry, Solver, SolverConfig, build, flops_by_stage
from pipeline.solvers.chunked import Chunked
from pipeline.solvers.interleaved import Interleaved
from pipeline.solvers.modes import decoding, sequential
from pipeline.solvers.parallel import Parallel
from pipeline.solvers.schedules import mean_over_stages
from pipeline.solvers.unrolled import Unrolled

__all__ = [
    "SOLVERS",
    "Carry",
    "Chunked",
    "Interleaved",
    "Parallel",
    "Solver",
    "SolverConfig",
    "Unrolled",
    "build",
    "decoding",
    "flops_by_stage",
    "mean_over_stages",
    "sequential",
]
