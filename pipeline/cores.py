"""How many processors this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the cores that the system lets this process use: a job's share of a node, not the whole of it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
