"""Other processes of this machine: whether they live, and how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Fields of /proc/PID/stat behind the command's name, which may hold spaces and brackets itself.
_STATE, _START, _EXIT = 0, 19, 49


@dataclass(frozen=True)
class Life:
    """What is known of a process.

    Attributes:
        alive: it has not ended.
        stopped: it is stopped by a signal.
        status: how it ended, as ``waitpid`` gives it; None where that is not known.
    """

    alive: bool
    stopped: bool = False
    status: int | None = None


@dataclass(frozen=True)
class Process:
    """A process, told from a later one of the same number by when it began.

    Attributes:
        host: machine, as named since it was started.
        name: its name.
        pid: number.
        start: clock tick at which the process began; 0 where the system does not say.
    """

    host: str
    name: str
    pid: int
    start: int

    @classmethod
    def this(cls) -> Process:
        """Return this process."""
        stat = _stat(os.getpid())
        return cls(_host(), socket.gethostname(), os.getpid(), 0 if stat is None else int(stat[_START]))

    @property
    def here(self) -> bool:
        """It runs on this machine."""
        return self.host == _host()

    def life(self) -> Life | None:
        """Return what is known of it; None if it runs elsewhere, or the system does not say."""
        if not self.here or not self.start:
            return None
        stat = _stat(self.pid)
        if stat is None or int(stat[_START]) != self.start:
            return Life(alive=False)
        if stat[_STATE] in "ZXx":
            # 0 stands for a status that this user may not read, too.
            return Life(alive=False, status=(int(stat[_EXIT]) or None) if len(stat) > _EXIT else None)
        return Life(alive=True, stopped=stat[_STATE] == "T")

    def kill(self) -> None:
        """End it at once, if it is still there and on this machine."""
        life = self.life()
        if life is not None and life.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def how_it_ended(returncode: int | None) -> str:
    """Say how a process ended: its return code as ``subprocess`` gives it, None where it is not known."""
    if returncode is None:
        return "is gone"
    if returncode < 0:
        return f"was killed by signal {-returncode} ({_signal_name(-returncode)})"
    return f"ended with exit code {returncode}"


def returncode(status: int | None) -> int | None:
    """Return what ``subprocess`` would give for a status of ``waitpid``."""
    return None if status is None else os.waitstatus_to_exitcode(status)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of a process behind its name; None if there is none, or no such file system."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None


def _host() -> str:
    """Return a name of this machine that no other has; containers with a name of their own share no processes."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = ""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{boot}/{namespace}"
