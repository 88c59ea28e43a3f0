"""The folder of a run.

config.yaml          the resolved configuration, enough to repeat the run
run.json             the run's id, the same at every resume
environment.json     versions, machine, command (one entry a start)
git.patch            difference of the code to its commit, where there was one
metrics/             CSV files
checkpoints/         see ``checkpoints``
wandb/, tensorboard/ where switched on
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import uuid
from pathlib import Path
from typing import IO, Any, Literal

from pipeline import config_files
from pipeline.config import CHANGEABLE_ON_RESUME, Config
from pipeline.errors import RunError
from pipeline.files import write_atomically
from pipeline.runs.checkpoints import CONFIG, Checkpoint, CheckpointStore
from pipeline.runs.environment import environment, git_state

LOCK = ".lock"
Resume = Literal["auto", "never", "must"]


class RunFolder:
    """One run's folder; reading needs no lock.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = CheckpointStore(path / "checkpoints")
        self._lock: IO[str] | None = None
        self._made: list[Path] = []

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Folder of the CSV files."""
        return self.path / "metrics"

    @property
    def id(self) -> str:
        """The run's identity, the same at every resume."""
        found = self._read_id()
        if found is None:
            raise RunError(f"{self.path}/run.json is missing or damaged; the next start writes it anew")
        return found

    def exists(self) -> bool:
        """Return whether a run has begun here."""
        return self.config_file.is_file()

    def config(self) -> Config:
        """Return the run's configuration."""
        if not self.exists():
            raise RunError(f"{self.path} is not a run folder: it holds no config.yaml; give the folder of a run")
        return config_files.load(Config, [self.config_file], [])

    def open(self, config: Config, resume: Resume, data: str) -> None:
        """Take the folder for training: lock it, and check that it is this run's. Nothing is recorded yet.

        A run has begun when it has a checkpoint; before that there is nothing to lose, and it may begin anew.

        Args:
            config: resolved configuration.
            resume: ``never`` begins a run and refuses a folder that holds one; ``auto`` goes on if there is one;
                ``must`` goes on and refuses a folder without.
            data: fingerprint of the data.

        Raises:
            RunError: another process trains here, the folder holds another run, or ``resume`` says no.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose another run.name or run.root")
        if self.checkpoints.folder.exists() and not self.checkpoints.folder.is_dir():
            raise RunError(f"{self.checkpoints.folder} is a file; remove it, or choose another run.name")
        found = self.checkpoints.list()
        if found and resume == "never":
            raise RunError(f"{self.path} already holds a run; go on with --resume auto, or choose another run.name")
        if not found and resume == "must":
            raise RunError(f"{self.path} holds no checkpoint to resume; check run.name and run.root")
        self._made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if found:
            self._check_same(config, found[-1], data)

    def record(self, config: Config) -> None:
        """Write down that the run begins, or goes on: identity, configuration and environment.

        Called when nothing stands in the way of training any more, so that a failed start leaves no run behind.
        """
        self._made = []
        self.checkpoints.remove_unfinished()
        if self._read_id() is None:
            record = {"id": uuid.uuid4().hex[:8], "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            write_atomically(self.path / "run.json", json.dumps(record, indent=1) + "\n")
        self._record_environment()
        config_files.save(config, self.config_file)

    def _take_lock(self) -> None:
        """Hold the run's lock until the process ends, however it ends."""
        lock = (self.path / LOCK).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise RunError(f"{self.path} is in use by {holder}; wait for it, or choose another run.name") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        """Give the lock back, and remove the folder if this process made it and recorded nothing."""
        if self._lock is None:
            return
        if self._made:
            (self.path / LOCK).unlink(missing_ok=True)
            for made in self._made:
                with contextlib.suppress(OSError):  # somebody else has put something there
                    made.rmdir()
        self._lock.close()
        self._lock = None

    def _check_same(self, config: Config, newest: Checkpoint, data: str) -> None:
        """Raise RunError, naming what differs first, if ``config`` or ``data`` are another run's."""
        if not self.exists():
            raise RunError(
                f"{self.path} has checkpoints but no {CONFIG}, without which nobody knows whose they are; copy it back "
                f"from {newest.path}"
            )
        try:
            before = newest.describe()["data"]
        except RunError:  # a damaged one is dealt with when it is loaded
            before = data
        if before != data:
            raise RunError(
                f"{self.path} was trained on other data: the manifest's fingerprint was {before[:16]}... and is now "
                f"{data[:16]}...; restore the data, or choose another run.name"
            )
        for key, old, new in config_files.differences(self.config(), config):
            if not config_files.is_changeable(key, CHANGEABLE_ON_RESUME):
                raise RunError(
                    f"{self.path} belongs to another configuration: {key} was {old!r} and is now {new!r}; "
                    "choose another run.name, or restore the setting"
                )

    def _read_id(self) -> str | None:
        try:
            found = json.loads((self.path / "run.json").read_text())["id"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{8}", found) else None

    def _record_environment(self) -> None:
        """Add this start's environment to the earlier ones'."""
        path = self.path / "environment.json"
        starts: list[Any] = []
        if path.is_file():
            with contextlib.suppress(OSError, ValueError):
                starts = json.loads(path.read_text())
            if not isinstance(starts, list):
                starts = []
        git, patch = git_state()
        starts.append({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **environment(), "git": git})
        write_atomically(path, json.dumps(starts, indent=1) + "\n")
        if patch:
            write_atomically(self.path / "git.patch", patch)
