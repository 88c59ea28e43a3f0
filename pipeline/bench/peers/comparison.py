"""Codes whose training steps take turns, and their rows in a table: ours first, then the peers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from pipeline.bench.peers.installing import missing, version
from pipeline.bench.table import Column, Table
from pipeline.bench.timing import alternate, medians
from pipeline.models.base import count_parameters

OURS = "backfeed"

COLUMNS = (
    Column("shape", "shape", width=15, text=True),
    Column("code", "code", width=15, text=True),
    Column("version", "version", width=9, text=True),
    Column("parameters", "parameters", ",d", width=12),
    Column("loss", "loss", ".5f"),
    Column("seconds", "s a step", ".3f"),
    Column("ratio", "of ours", ".2f", width=9),
    Column("tokens_per_second", "tokens/s", ",.0f"),
)


@dataclass
class Side:
    """A code that takes part.

    Attributes:
        module: its model.
        step: a training step.
    """

    module: nn.Module
    step: Callable[[], None]


@dataclass
class Comparison:
    """One size, and the codes that are measured on it.

    Attributes:
        shape: name of the size.
        rows: rows of a step.
        length: inputs of a row.
        sides: codes that take part, by the name of their distribution; ours first.
        reasons: why a code does not take part; None for what is not installed.
        losses: of each code before its first step, in nats; where losses compare.
    """

    shape: str
    rows: int
    length: int
    sides: dict[str, Side] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def invite(self, distribution: str, make: Callable[[], Side]) -> None:
        """Let a code take part if it is installed and can be used."""
        if missing(distribution):
            self.reasons[distribution] = None
            return
        try:
            self.sides[distribution] = make()
        except Exception as error:  # whatever another version of it, or of what it needs, may raise
            self.reasons[distribution] = " ".join(traceback.format_exception_only(error)[-1].split())[:200]

    def measure(self, repeats: int, table: Table) -> None:
        """Let the steps take turns, and add a row for each code."""
        runs = alternate({code: side.step for code, side in self.sides.items()}, repeats, self.shape)
        seconds = medians(runs)
        for code in (*self.sides, *self.reasons):
            took = seconds.get(code)
            table.add(
                {
                    "shape": self.shape,
                    "code": code,
                    "version": version(code),
                    "parameters": count_parameters(self.sides[code].module) if code in self.sides else None,
                    "loss": self.losses.get(code),
                    "rows": self.rows,
                    "length": self.length,
                    "seconds": took,
                    "runs": runs.get(code),
                    "ratio": None if took is None else took / seconds[OURS],
                    "tokens_per_second": None if took is None else self.rows * self.length / took,
                    "reason": self.reasons.get(code),
                }
            )
