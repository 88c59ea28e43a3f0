"""What the user reads while a run goes on."""

from __future__ import annotations

import contextlib
import sys

from tqdm import tqdm

from pipeline.training import distributed


def say(line: str) -> None:
    """Print a line on rank 0, without breaking a progress bar."""
    if distributed.is_first():
        with contextlib.suppress(OSError):  # nobody reads any more; the run goes on
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
