"""Lightning's launcher, which starts the ranks of a node as children of its first one, without its observer.

The observer kills the first rank, without a word, as soon as it finds that a child has ended badly. Here the first rank
says which one and how; and children end when the first rank is gone.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from pipeline.training import ending
from pipeline.training.processes import how_it_ended

PARENT = "BACKFEED_FIRST_RANK"
"""Variable that tells a child the process of the first rank of its node."""
_LOOK_SECONDS = 0.2


class Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks of this node."""

    @classmethod
    def replace(cls, trainer: pl.Trainer) -> Launcher | None:
        """Take the place of Lightning's own launcher; return None where ranks are started from outside."""
        launcher = trainer.strategy.launcher
        if not isinstance(launcher, _SubprocessScriptLauncher):
            return None
        own = cls(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        trainer.strategy._launcher = own
        return own

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes, and call ``function``."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[PARENT]
            StartWatch.of_children(self).start()
        return function(*args, **kwargs)

    @property
    def children(self) -> dict[int, subprocess.Popen[bytes]]:
        """The other ranks of this node."""
        first = self.cluster_environment.node_rank() * self.num_processes
        return {first + local: process for local, process in enumerate(self.procs, start=1)}

    def returncode(self, rank: int) -> int | None:
        """Return how a child ended; None while it runs, or where this is not a child."""
        child = self.children.get(rank)
        return None if child is None else child.poll()

    def reap(self, seconds: float) -> dict[int, int]:
        """Wait for all children, kill those that are left after so many seconds; return the codes of each."""
        end = time.monotonic() + seconds
        for child in self.procs:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        return {rank: child.returncode for rank, child in self.children.items()}


class StartWatch(threading.Thread):
    """Ends this process if another one ends while ranks start, until they watch each other (``watch.Watch``).

    Args:
        found: says which process has ended, and how; None while all is well.
        last: done before this process ends.
    """

    _current: StartWatch | None = None

    def __init__(self, found: Callable[[], str | None], last: Callable[[], object] = lambda: None) -> None:
        super().__init__(name="start-watch", daemon=True)
        self._found, self._last = found, last
        self._over = threading.Event()

    @classmethod
    def of_children(cls, launcher: Launcher) -> StartWatch:
        """Watch the children of this process."""

        def found() -> str | None:
            for rank, child in launcher.children.items():
                if child.poll():
                    return f"rank {rank} {how_it_ended(child.returncode)} before training began"
            return None

        return cls(found, lambda: launcher.reap(0.0))

    @classmethod
    def of_parent(cls) -> None:
        """Watch the first rank, if it started this process."""
        parent = os.environ.get(PARENT)
        if parent is not None:
            cls(lambda: None if os.getppid() == int(parent) else "rank 0 is gone before training began").start()

    @classmethod
    def stop(cls) -> None:
        """Watch no longer."""
        if cls._current is not None:
            cls._current._over.set()
            cls._current.join()
            cls._current = None

    def start(self) -> None:
        """Begin."""
        StartWatch._current = self
        super().start()

    def run(self) -> None:
        """Look now and then."""
        while not self._over.wait(_LOOK_SECONDS):
            found = self._found()
            if found is not None:
                ending.tell(f"{found}; see its message")
                self._last()
                ending.at_once(1)
