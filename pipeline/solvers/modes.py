"""In which order a trained model is decoded: as the exact recurrence, or in the modes of the FBT paper."""

from __future__ import annotations

from typing import Literal

from pipeline.errors import ConfigError
from pipeline.solvers.base import Solver
from pipeline.solvers.chunked import Chunked, ChunkedConfig
from pipeline.solvers.parallel import Parallel, ParallelConfig
from pipeline.solvers.unrolled import Unrolled, UnrolledConfig

DecodeMode = Literal["trained", "standard", "soft", "fused", "recurrent"]


def sequential(solver: Solver) -> Solver:
    """Return the solver of the exact recurrence; ``solver`` itself if it never feeds back, and so is exact."""
    return Chunked(ChunkedConfig(name="chunked", interval=1)) if solver.feeds_back else solver


def decoding(solver: Solver, mode: DecodeMode) -> Solver:
    """Return the solver with which a model that was trained with ``solver`` is decoded in a mode.

    Args:
        solver: as in training.
        mode: ``trained``: that one; ``standard``: nothing is fed back; ``soft``: the prompt in one plain pass, then
            every token is fed; ``fused``: the prompt in a plain and a fed pass, then every token is fed (FBT);
            ``recurrent``: every token of the prompt is fed as well, one after the other.

    Raises:
        ConfigError: the mode feeds back what training never did.
    """
    if mode == "trained" and (solver.feeding or not solver.feeds_back):
        return solver
    if mode in ("trained", "standard"):  # one plain pass is all that a solver knows that feeds nothing back
        return Parallel(ParallelConfig(name="parallel"))
    if not solver.feeding:
        raise ConfigError(
            f"decoding {mode!r} feeds states back, but the model was trained without (solver {solver}); use 'standard'"
        )
    if mode == "recurrent":
        return sequential(solver)
    return Unrolled(UnrolledConfig(name="unrolled", passes=1 if mode == "soft" else 2))
