"""What a benchmark ran on, and how fast that machine can be at all."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline import __version__
from pipeline.cores import available_cores
from pipeline.training.peak import measured_peak


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Let torch use so many threads meanwhile; 0 takes the cores that this process may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or available_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe() -> dict[str, Any]:
    """Return what is to be known of the machine and of the software."""
    return {
        "processor": processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "backfeed": __version__,
    }


def line(described: Mapping[str, Any]) -> str:
    """Return the same as a line of text."""
    threads, cores = described["threads"], described["cores"]
    text = f"{threads} thread{'s' if threads > 1 else ''} on {cores} core{'s' if cores > 1 else ''}"
    text += f" ({described['processor']}), torch {described['torch']}, float32"
    # Whoever reads the times should know that others were at work.
    return text + (f"; load at the start {described['load']:.1f}" if (described["load"] or 0) > 0.5 else "")


def load() -> float | None:
    """Return the mean number of processes that wanted to run in the last minute; None where nobody counts them."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [each.partition(":")[2].strip() for each in lines if each.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Peak:
    """The most FLOP/s that a large matrix product has reached so far.

    Attributes:
        flops_per_second: that rate; 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.flops_per_second = 0.0

    def measure(self, seconds: float = 0.2) -> None:
        """Measure again for about so long, and keep the better result."""
        found = measured_peak(torch.device("cpu"), torch.float32, seconds=seconds)
        self.flops_per_second = max(self.flops_per_second, found)
