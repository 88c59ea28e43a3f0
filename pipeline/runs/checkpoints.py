"""Checkpoints on disk: whole or invisible.

A checkpoint is a folder ``step_0000001000``. It is written aside, under a hidden name; every file is flushed and hashed
into ``checkpoint.json``; then one rename makes it visible. A crash at any moment leaves either the whole or nothing but
a hidden folder, which the next start removes. Damage that comes later (a truncated file, a flipped bit) is found by
the hashes, and the newest whole checkpoint is used in its place.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import RunError, RunWarning
from pipeline.files import fsync_file, fsync_folder, sha256_file, write_atomically

DESCRIPTION = "checkpoint.json"
CONFIG = "config.yaml"
TOKENIZER = "tokenizer.json"
MODEL = "model"
WEIGHTS = f"{MODEL}.safetensors"
OPTIMIZER = "optimizer"
TRAINING = "training.pt"
SEAL = "sha256"
FORMAT = 2
_NAME = re.compile(r"step_(\d{10})")
_ASIDE = ".writing-"


def seal(description: dict[str, Any]) -> str:
    """Return the hash of a description's content."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def vouch(folder: Path, step: int, hashed: Mapping[str, Any] | None = None, **description: Any) -> None:
    """Flush and hash all files of a folder, and describe them and their hashes in ``checkpoint.json``.

    Args:
        folder: of a checkpoint.
        step: optimiser steps done.
        hashed: size and hash of files that whoever wrote them has flushed and hashed already.
        **description: plain values to record beside step and hashes.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if hashed and name in hashed:
            files[name] = hashed[name]
            continue
        fsync_file(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    content = {"format": FORMAT, "step": step, **description, "files": files}
    write_atomically(folder / DESCRIPTION, json.dumps({**content, SEAL: seal(content)}, indent=1) + "\n")
    for each in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync_folder(each)


@dataclass(frozen=True)
class Checkpoint:
    """A visible checkpoint.

    Attributes:
        path: its folder.
        step: optimiser steps done.
    """

    path: Path
    step: int

    def describe(self) -> dict[str, Any]:
        """Return what was recorded with it (``CheckpointStore.writing``), hashes included; RunError if unreadable."""
        try:
            found = json.loads((self.path / DESCRIPTION).read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path}: {DESCRIPTION} cannot be read ({error}); the checkpoint is damaged") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise RunError(f"{self.path}: {DESCRIPTION} is not of format {FORMAT}; use the version that wrote it")
        if found.pop(SEAL, None) != seal(found):
            raise RunError(f"{self.path}: {DESCRIPTION} was changed after it was written; the checkpoint is damaged")
        named = _NAME.fullmatch(self.path.name)
        if named and int(named[1]) != found["step"]:
            raise RunError(f"{self.path} holds the checkpoint of step {found['step']}; give it its own name back")
        return found

    def check_sizes(self, description: dict[str, Any]) -> None:
        """Raise RunError, naming the first, if a file is missing or of another size than ``description`` says."""
        for name, expected in description["files"].items():
            path = self.path / name
            if not path.is_file():
                raise RunError(f"{self.path}: {name} is missing; the checkpoint is damaged")
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise RunError(f"{path} has {size} bytes, not {expected['bytes']}; the checkpoint is damaged")

    def verify(self, advance: Callable[[int], object] = bool) -> dict[str, Any]:
        """Return ``describe()`` after comparing every file's size and hash; RunError names the first that differs.

        ``advance`` is told the bytes of each file that has been read.
        """
        description = self.describe()
        self.check_sizes(description)
        for name, expected in description["files"].items():
            path = self.path / name
            if sha256_file(path) != expected["sha256"]:
                raise RunError(f"{path} does not match its hash; the checkpoint is damaged")
            advance(expected["bytes"])
        return description


class CheckpointStore:
    """The checkpoints of a run.

    Args:
        folder: where they lie; made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self) -> list[Checkpoint]:
        """Return the visible checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = ((path, _NAME.fullmatch(path.name)) for path in self.folder.iterdir() if path.is_dir())
        return sorted((Checkpoint(path, int(match[1])) for path, match in found if match), key=lambda each: each.step)

    def last_good(self) -> str:
        """Say which checkpoint a run that went wrong can go on from."""
        found = self.list()
        return f"the last good checkpoint is {found[-1].path}" if found else "there is no checkpoint yet"

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of ``step``; RunError lists those that there are."""
        for checkpoint in self.list():
            if checkpoint.step == step:
                return checkpoint
        steps = ", ".join(str(each.step) for each in self.list()) or "none"
        raise RunError(f"{self.folder} has no checkpoint of step {step}; it has: {steps}")

    def newest_whole(self) -> Checkpoint | None:
        """Return the newest checkpoint whose hashes hold, with a warning for each damaged one that is passed over.

        Raises:
            RunError: there are checkpoints, but none is whole.
        """
        found = self.list()
        for checkpoint in reversed(found):
            try:
                checkpoint.verify()
            except RunError as error:
                warnings.warn(f"{error}; trying the one before", RunWarning, stacklevel=2)
                continue
            return checkpoint
        if found:
            raise RunError(
                f"{self.folder}: all {len(found)} checkpoints are damaged; restore one, or start another run"
            )
        return None

    @contextmanager
    def writing(self, step: int, **description: Any) -> Iterator[Path]:
        """Yield a folder to write the checkpoint of ``step`` into; make it visible when the block ends.

        If the block raises, the folder is removed and nothing becomes visible.

        Args:
            step: optimiser steps done.
            **description: plain values to record beside step and hashes.
        """
        aside = self.begin(step)
        try:
            yield aside
            self.finish(step, **description)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def aside(self, step: int) -> Path:
        """Return the hidden folder in which the checkpoint of ``step`` is written; the same on every rank."""
        return self.folder / f"{_ASIDE}{step:010d}"

    def begin(self, step: int) -> Path:
        """Make the hidden folder of ``step``, empty, and return it."""
        aside = self.aside(step)
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        return aside

    def finish(self, step: int, hashed: Mapping[str, Any] | None = None, **description: Any) -> Checkpoint:
        """Flush and hash what was written for ``step``, then make it visible.

        Args:
            step: optimiser steps done.
            hashed: size and hash of files that whoever wrote them has flushed and hashed already.
            **description: see ``writing``.
        """
        final = self.folder / f"step_{step:010d}"
        vouch(self.aside(step), step, hashed, **description)
        if final.exists():  # only a damaged one is ever written again
            shutil.rmtree(final)
        self.aside(step).rename(final)
        fsync_folder(self.folder)
        return Checkpoint(final, step)

    def remove_unfinished(self) -> None:
        """Remove what a crash left half-written. Only for the process that holds the run's lock."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"{_ASIDE}*"):
                shutil.rmtree(path, ignore_errors=True)

    def prune(self, written: int, keep_last: int, keep_every_steps: int) -> None:
        """Remove all but the newest ``keep_last`` and those at multiples of ``keep_every_steps`` (0: no such ones).

        Later ones than that of step ``written``, just made visible, are damaged: the run has resumed from before them.
        They do not count, or a whole one would go and a damaged one stay.
        """
        found = [checkpoint for checkpoint in self.list() if checkpoint.step <= written]
        for checkpoint in found[:-keep_last]:
            if keep_every_steps and checkpoint.step % keep_every_steps == 0:
                continue
            # Hide it first: a removal that is cut short must not leave half a checkpoint in sight.
            hidden = self.folder / f"{_ASIDE}removed-{checkpoint.step:010d}"
            checkpoint.path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
