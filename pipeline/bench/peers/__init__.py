"""A training step of ours beside that of other projects' code, at the same size, with the same optimiser and threads.

First RLT beside the one on the package index (``recurrent``), then a plain transformer beside three codebases that are
widely used (``plain``). The steps take turns in one process. Peers are optional: what is not installed is named, with
the command that installs it, and the rest is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.bench.options import Options
from pipeline.bench.peers import installing, plain, recurrent
from pipeline.bench.peers.comparison import COLUMNS
from pipeline.bench.table import Row, Table

REPEATS = 5
SHAPES = {**recurrent.SHAPES, **plain.SHAPES}


def run(options: Options) -> list[Row]:
    """Measure, print both tables, return their rows.

    A row holds shape, code, version, parameters, loss (of the first step), rows, length, seconds (median of ``runs``),
    ratio (to ours) and tokens_per_second. A peer that is not installed has None for its numbers, and so has one that
    cannot be used, with the reason.
    """
    if options.install:
        installing.install()
    chosen = options.choose(SHAPES)
    repeats = options.repeats or REPEATS
    rows: list[Row] = []
    recurrences = {name: shape for name, shape in chosen.items() if isinstance(shape, recurrent.Shape)}
    if recurrences:
        print("RLT at B = 1")
        table = Table(COLUMNS).begin()
        for name, recurrence in recurrences.items():
            recurrent.measure(name, recurrence, repeats, table)
        rows += table.rows
    sizes = {name: shape for name, shape in chosen.items() if isinstance(shape, plain.Size)}
    if sizes:
        print("transformer")
        table = Table(COLUMNS).begin()
        for name, size in sizes.items():
            plain.measure(name, size, repeats, table)
        rows += table.rows
    tell_missing(rows)
    return rows


def tell_missing(rows: Sequence[Row]) -> None:
    """Say which codes were not measured, and why."""
    absent = dict.fromkeys(row["code"] for row in rows if row["seconds"] is None and row["reason"] is None)
    if absent:
        print(f"not installed: {', '.join(absent)}; backfeed bench peers --install adds what is missing")
    for code, reason in {row["code"]: row["reason"] for row in rows if row["reason"] is not None}.items():
        print(f"{code} cannot be used here: {reason}")
