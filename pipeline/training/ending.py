"""How the process of a rank ends.

Python's own way would wait, after a failure, for threads that wait for ranks that are gone. After a success, torch's
threads may abort it (see ``distributed.leave``): DeepSpeed holds on to its groups.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

_code: int | None = None
_registered = False


def prepare() -> None:
    """Arrange that the process ends as is said later; what else registers itself for its end after this comes first."""
    global _registered
    if not _registered:
        atexit.register(_end)
        _registered = True


def after_failure(code: int, seconds: float) -> None:
    """End the process with ``code``: when its main thread has said and closed what it has to, or after so long."""
    global _code
    _code = code

    def wait() -> None:
        time.sleep(seconds)
        at_once(code)

    threading.Thread(target=wait, name="last-resort", daemon=True).start()


def among_ranks(code: int) -> None:
    """End the process with ``code`` once its main thread is at its end, if it is one of several ranks."""
    global _code
    if _registered and _code is None:
        _code = code


def tell(message: str) -> None:
    """Print an error as the command line does, from any thread."""
    # Past the stream's lock, which the main thread may hold.
    _bounded(lambda: os.write(2, f"backfeed: {message}\n".encode()))


def at_once(code: int) -> NoReturn:
    """End the process from any thread, and the loader processes with it."""
    _bounded(sys.stdout.flush)
    _bounded(sys.stderr.flush)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _bounded(write: Callable[[], object], seconds: float = 1.0) -> None:
    """Write, but wait for a reader who no longer reads, or for a lock, no longer than that."""

    def attempt() -> None:
        with contextlib.suppress(OSError, ValueError):
            write()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


def _end() -> None:
    if _code is not None:
        logging.shutdown()
        at_once(_code)
