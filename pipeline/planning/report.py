"""A plan as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from pipeline.planning.plan import RESERVED, Option, Plan

PHASES = {
    "passes": "forward, outside the loop",
    "loop": "forward, in the loop",
    "loss": "loss",
    "passes, backward": "backward, outside the loop",
    "loop, backward": "backward, in the loop",
    "update": "the optimiser's update",
}
COLUMNS = (
    ("weights", ("weights", "gathered weights")),
    ("optimizer", ("float32 masters", "optimizer's moments", "copies for the update")),
    ("gradients", ("gradients", "gradient buckets")),
    ("logits", ("logits and loss",)),
    ("loop", ("keys and values of the loop", "rows for weight gradients")),
    ("activations", ("activations", "temporaries of backward", "kept for backward")),
    ("reserved", (RESERVED,)),
)
"""Columns of the table, and what each adds up."""


def gib(size: float) -> str:
    """Return bytes in GiB."""
    return f"{size / 2**30:,.2f}"


def text(found: Plan) -> str:
    """Return the whole plan."""
    machine = found.machine
    lines = [
        f"{found.run}: {found.architecture} under {found.solver}, {found.parameters:,} parameters, {found.precision}",
        f"{found.ranks} x {machine.name} of {gib(machine.memory)} GiB; micro-batches of {found.rows} rows of "
        f"{found.sequence_length:,} tokens, {found.accumulation} a step",
        "",
        *table([found.chosen], "as configured, GiB a rank at the peak"),
        f"the peak is in: {moment(found.chosen)}",
        "",
        *(table(found.options, "other strategies, without and with activation checkpointing") if found.options else []),
        *(f"{name}: {reason}" for name, reason in found.refused.items()),
    ]
    if any(each.strategy == "zero3" for each in found.options):
        lines.append("zero3 gathers all weights for each pass, and holds a pass's gradients until its end")
    if not all(each.exact for each in [found.chosen, *found.options]):
        lines.append("loops too long to be gone through step by step were continued from shorter ones")
    return "\n".join([*lines, "", *times(found), "", *verdict(found)])


def table(options: Sequence[Option], title: str) -> list[str]:
    """Return options as lines."""
    names = [name for name, _ in COLUMNS]
    head = f"{'':<20}" + "".join(f"{name:>12}" for name in [*names, "peak", "host"])
    rows = []
    for each in options:
        sums = [sum(each.parts.get(part, 0) for part in parts) for _, parts in COLUMNS]
        label = f"{each.strategy}{' checkpointed' if each.activation_checkpointing else ''}"
        numbers = [*sums, each.peak, each.host + each.disk]
        rows.append(f"  {label:<18}" + "".join(f"{gib(size):>12}" for size in numbers) + ("" if each.fits else "  no"))
    return [title, head, *rows]


def moment(option: Option) -> str:
    """Return when a peak is, in words."""
    settings = ", ".join(f"{name}={value}" for name, value in option.settings.items())
    return PHASES.get(option.when, option.when) + (f" (at {settings})" if settings else "")


def times(found: Plan) -> list[str]:
    """Return the lines on time."""
    time, machine = found.time, found.machine
    again = f", {time.recomputed:.4g} of them computed again" if time.recomputed else ""
    hours = machine.time_limit / 3600
    return [
        f"{'FLOPs a token':<20}{time.flops:>16.4g}  (forward and backward{again})",
        f"{'tokens a day':<20}{time.tokens_a_day:>16,.0f}  (at {machine.utilization:.0%} of "
        f"{machine.peak_flops:.4g} FLOP/s a rank)",
        f"{'wall time':<20}{duration(time.seconds):>16}  ({found.tokens:,} tokens)",
        f"{'jobs':<20}{time.jobs:>16,}  (of {hours:g} hours)",
    ]


def duration(seconds: float) -> str:
    """Return a time as days, hours and minutes."""
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    return f"{days} d {hours} h" if days else f"{hours} h {minutes % 60} min"


def verdict(found: Plan) -> list[str]:
    """Return whether it fits, and what would make it."""
    chosen, memory = found.chosen, found.machine.memory
    if chosen.fits:
        return [f"it fits: {gib(chosen.peak)} of {gib(memory)} GiB"]
    largest = max((name for name in chosen.parts if name != RESERVED), key=lambda name: chosen.parts[name])
    lines = [
        f"it does not fit: {gib(chosen.peak)} of {gib(memory)} GiB; most goes to {largest}, "
        f"{gib(chosen.parts[largest])} GiB"
    ]
    if found.advice is None:
        return [
            *lines,
            "no number of ranks up to 128 times as many makes it fit: choose a smaller model or shorter rows",
        ]
    return [*lines, f"with this it would, at {gib(found.advice.peak)} GiB:", "    " + " ".join(found.advice.overrides)]


class Looking:
    """Says on a terminal what is looked at."""

    def __enter__(self) -> Looking:
        """Begin."""
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        return self

    def __call__(self, what: str) -> None:
        """Say it, in the place of what was said before."""
        if self._shown:
            print(f"\r\x1b[Kplan: {what}", end="", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wipe it away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
