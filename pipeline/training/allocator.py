"""The host's memory between steps, for training on a CPU."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, for the rest of the process; return whether it can.

    Every step asks for the same large tensors again. glibc gives them back to the system when they are freed; then the
    system zeroes each of their pages anew at the first touch, which at the demo's size takes a fifth of a step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))
