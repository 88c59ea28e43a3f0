"""``backfeed evaluate``: a trained model's loss on a split, in training mode and in the exact recurrence."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import solvers
from pipeline.evaluation.data import EvaluationData
from pipeline.evaluation.loss import LossSums, evaluate
from pipeline.files import write_atomically
from pipeline.progress import Progress
from pipeline.runs.loading import TrainedModel
from pipeline.solvers import Solver


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        mode: ``training`` (the solver as in the checkpoint's last step), ``asked`` (another one) or ``sequential`` (the
            exact recurrence that was trained).
        solver: the solver and its settings, in words.
        sums: the result.
        seconds: time it took; 0 where the training mode is the exact recurrence and was not measured twice.
    """

    mode: str
    solver: str
    sums: LossSums
    seconds: float


def report(trained: TrainedModel, split: str, *, data: Path | None = None, tokens: int = 0) -> list[Row]:
    """Evaluate a trained model.

    Args:
        trained: the model.
        split: split of the data.
        data: prepared data folder; None takes the run's own.
        tokens: evaluate on at most this many tokens from the start of the split; 0 takes it whole.

    Raises:
        DataError: the data were made with another tokenizer than the model's.
    """
    evaluation = EvaluationData.open(trained, split, data=data, tokens=tokens)

    def measured(mode: str, solver: Solver) -> Row:
        begin = time.perf_counter()
        with Progress(evaluation.rows, "rows", mode) as progress:
            batches, token_bytes = evaluation.batches(), evaluation.token_bytes
            sums = evaluate(trained.model, solver, batches, token_bytes, advanced=progress.advance)
        return Row(mode, str(solver), sums, time.perf_counter() - begin)

    first = measured("training" if trained.solver is trained.training_solver else "asked", trained.solver)
    # A model that was never fed anything has no other recurrence than the plain pass.
    feeding = [solver for solver in (trained.training_solver, trained.solver) if solver.feeding]
    exact = solvers.sequential(feeding[0]) if feeding else trained.solver
    if str(exact) == first.solver:  # nothing to measure twice
        return [first, replace(first, mode="sequential", seconds=0.0)]
    return [first, measured("sequential", exact)]


def table(rows: list[Row]) -> str:
    """Return the report as a table."""
    head = f"{'mode':<12}{'solver':<24}{'loss':>9}{'perplexity':>12}{'bits/byte':>11}{'tokens':>11}{'tokens/s':>10}"
    lines = [head]
    for row in rows:
        sums = row.sums
        rate = f"{sums.tokens / row.seconds:,.0f}" if row.seconds else "(same)"
        lines.append(
            f"{row.mode:<12}{row.solver:<24}{sums.loss:>9.4f}{sums.perplexity:>12.2f}{sums.bits_per_byte:>11.4f}"
            f"{sums.tokens:>11,}{rate:>10}"
        )
    return "\n".join(lines)


def save(rows: list[Row], trained: TrainedModel, split: str, path: Path) -> None:
    """Write the report as JSON."""
    content: dict[str, Any] = {
        "checkpoint": str(trained.checkpoint.path),
        "step": trained.checkpoint.step,
        "split": split,
        "rows": [
            {
                "mode": row.mode,
                "solver": row.solver,
                "loss": row.sums.loss,
                "perplexity": row.sums.perplexity,
                "bits_per_byte": row.sums.bits_per_byte,
                "tokens": row.sums.tokens,
                "text_bytes": row.sums.text_bytes,
                "seconds": row.seconds,
            }
            for row in rows
        ],
    }
    write_atomically(path, json.dumps(content, indent=1) + "\n")
