"""Writes checkpoints beside training: it goes on as soon as the state is copied.

Each rank's thread writes the rank's files, and then says so in a small file beside them; the first rank's waits for all
of these, vouches for the whole and makes it visible. No thread calls a collective: those belong to training.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.files import describe_os_error, write_atomically
from pipeline.training.state_files import StateFiles

_LOOK_SECONDS = 0.1


class BackgroundSave:
    """A checkpoint on its way to the disk.

    Args:
        step: optimiser steps done.
        files: this rank's, copied.
        folder: where they go.
        rank: this rank.
        ranks: number of ranks.
        finish: makes the checkpoint visible, given size and hash of all files; of the first rank.
    """

    def __init__(
        self,
        step: int,
        files: StateFiles,
        folder: Path,
        rank: int,
        ranks: int,
        finish: Callable[[dict[str, Any]], None],
    ) -> None:
        self.step = step
        self._files, self._folder, self._rank, self._ranks, self._finish = files, folder, rank, ranks, finish
        self._failure: str | None = None
        self._given_up = threading.Event()
        # A process that has to end does so; what it leaves behind stays hidden.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> str | None:
        """Wait for this rank's part, on the first rank for the whole; return why it failed, None if it did not."""
        self._thread.join(seconds)
        return "it took too long" if self._thread.is_alive() else self._failure

    def give_up(self) -> None:
        """Wait for the other ranks no more: they are gone."""
        self._given_up.set()

    def _run(self) -> None:
        try:
            self._files.write()
            if self._files.failure is not None:
                raise self._files.failure
            write_atomically(self._record(self._rank), json.dumps(self._files.files))
            if self._rank == 0:
                files = self._all_files()
                if files is not None:
                    self._finish(files)
        except OSError as error:
            self._failure = describe_os_error(error, self._folder)
            with contextlib.suppress(OSError):
                write_atomically(self._record(self._rank), json.dumps(None))

    def _record(self, rank: int) -> Path:
        return self._folder / f".written-{rank}.json"

    def _all_files(self) -> dict[str, Any] | None:
        """Return size and hash of all ranks' files once they are there; None if they cannot be any more."""
        found: dict[str, Any] = {}
        for rank in range(self._ranks):
            record = self._record(rank)
            while not record.exists():
                if self._given_up.wait(_LOOK_SECONDS):
                    return None
                with contextlib.suppress(OSError):  # a network file system looks again
                    next(self._folder.iterdir(), None)
            files = json.loads(record.read_text())
            if files is None:  # that rank tells why
                return None
            found.update(files)
            record.unlink()
        return found
