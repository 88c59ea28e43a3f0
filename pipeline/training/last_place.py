"""Where a process was when it ended, for others on its machine: in memory that outlives it."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path

from pipeline.training import phases

_FORMAT = struct.Struct("<qq")


class LastPlace:
    """A page of memory that one process writes and others read.

    It lies in a file until all have opened it; then the file is removed, so that nothing is ever left behind.

    Args:
        path: the file; None makes one.
    """

    def __init__(self, path: str | None = None) -> None:
        own = path is None
        if path is None:
            memory = Path("/dev/shm")
            folder = memory if os.access(memory, os.W_OK) else None
            file, path = tempfile.mkstemp(prefix="backfeed-", dir=folder)
            os.ftruncate(file, mmap.PAGESIZE)
        else:
            file = os.open(path, os.O_RDONLY)
        try:
            self._page = mmap.mmap(file, _FORMAT.size, access=mmap.ACCESS_WRITE if own else mmap.ACCESS_READ)
        finally:
            os.close(file)
        self.path = path

    def write(self, moment: phases.Moment) -> None:
        """Note where this process is."""
        _FORMAT.pack_into(self._page, 0, moment.step, phases.ALL.index(moment.phase))

    def read(self) -> tuple[int, str]:
        """Return the step and the phase at which the process is, or was at its end."""
        step, phase = _FORMAT.unpack_from(self._page)
        return step, phases.ALL[phase]

    def remove_file(self) -> None:
        """Remove the file, once everybody has opened it."""
        Path(self.path).unlink(missing_ok=True)
