"""Progress of long work: a bar on a terminal, a plain line now and then in a log file."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm


class Progress:
    """Shows how much is done, how fast, and how long it will take.

    On a terminal this is a tqdm bar. Elsewhere (a Slurm log, a pipe) it is at most one line every ``every_seconds``
    and one at the end, so that log files stay short and readable.

    Args:
        total: amount of work; None where it is not known.
        unit: what is counted ("B" for bytes, "tokens", ...); amounts are shown with k, M, G.
        label: what the work is, in a word or two.
        stream: where to show it; standard error by default.
        every_seconds: least time between two plain lines.
        initial: amount done before this start; it does not count for the rate.
    """

    def __init__(
        self,
        total: float | None,
        unit: str,
        label: str,
        *,
        stream: TextIO | None = None,
        every_seconds: float = 10.0,
        initial: float = 0,
    ) -> None:
        self.total = total
        self.unit = unit
        self.label = label
        self.done = initial
        self._stream = stream if stream is not None else sys.stderr
        self._every = every_seconds
        self._initial = initial
        self._start = self._last = time.monotonic()
        self._fields: dict[str, Any] = {}
        self._closed = False
        self._printed: float | None = None
        self._bar = self._terminal_bar() if self._stream.isatty() else None

    def _terminal_bar(self) -> tqdm:
        return tqdm(
            total=self.total,
            initial=self._initial,
            desc=self.label,
            unit=self.unit,
            unit_scale=True,
            dynamic_ncols=True,
            file=self._stream,
        )

    def advance(self, amount: float, **fields: Any) -> None:
        """Count ``amount`` more as done; ``fields`` (a loss, say) are shown beside it until replaced."""
        self.done += amount
        self._fields.update(fields)
        if self._bar is not None:
            with contextlib.suppress(OSError):
                if fields:
                    self._bar.set_postfix(self._fields, refresh=False)
                self._bar.update(amount)
        elif time.monotonic() - self._last >= self._every:
            self._print_line()

    def close(self) -> None:
        """Show the final state; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
        elif self._printed != self.done or self.done != self.total:
            self._print_line()

    def _print_line(self) -> None:
        self._last, self._printed = time.monotonic(), self.done
        with contextlib.suppress(OSError):  # nobody reads any more; the work goes on
            self._stream.write(self._line() + "\n")
            self._stream.flush()

    def _line(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        rate = (self.done - self._initial) / elapsed
        parts = [f"{self.label}: {_short(self.done)}"]
        if self.total is not None:
            percent = f" ({100 * self.done / self.total:.1f}%)" if self.total > 0 else ""
            parts[0] += f"/{_short(self.total)}"
            parts[0] += f" {self.unit}{percent}"
        else:
            parts[0] += f" {self.unit}"
        parts.append(f"{_short(rate)} {self.unit}/s")
        if self._closed or self.total is None or self.done >= self.total:
            parts.append(f"{_clock(elapsed)} elapsed")
        else:
            parts.append(f"{_clock((self.total - self.done) / rate)} left" if rate > 0 else "time left unknown")
        parts += [f"{name}={_value(value)}" for name, value in self._fields.items()]
        return ", ".join(parts)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _short(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:.0f}" if number == int(number) else f"{number:.2f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
