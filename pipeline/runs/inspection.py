"""``backfeed checkpoint``: which checkpoints a run has, whether they are whole, and their weights in one file."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RunError
from pipeline.files import fsync_folder, refuse_existing
from pipeline.progress import Progress
from pipeline.runs import loading
from pipeline.runs.checkpoints import (
    CONFIG,
    DESCRIPTION,
    MODEL,
    SEAL,
    TOKENIZER,
    WEIGHTS,
    Checkpoint,
    vouch,
)
from pipeline.runs.folder import RunFolder
from pipeline.runs.tensors import TensorReader, TensorWriter


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a list.

    Attributes:
        checkpoint: where it lies.
        tokens: trained on so far; None if its description cannot be read.
        bytes: size of its files.
        written: when, in seconds since 1970.
        parts: files of its weights, one a rank that wrote them.
        damage: why it cannot be used, as far as that shows without reading it all; empty if nothing shows.
    """

    checkpoint: Checkpoint
    tokens: int | None
    bytes: int
    written: float
    parts: int
    damage: str = ""


def found(path: Path) -> list[Listed]:
    """Return the checkpoints of a run folder, oldest first, or the one whose folder ``path`` is.

    Raises:
        RunError: it is neither.
    """
    if (path / DESCRIPTION).is_file():
        return [listed(Checkpoint(path, int(Checkpoint(path, 0).describe()["step"])))]
    return [listed(each) for each in run_folder(path).checkpoints.list()]


def run_folder(path: Path) -> RunFolder:
    """Return a run's folder; RunError if it is none."""
    folder = RunFolder(path)
    if not path.is_dir() or not folder.exists():
        raise RunError(f"{path} is neither a run folder (config.yaml) nor a checkpoint ({DESCRIPTION})")
    return folder


def listed(checkpoint: Checkpoint) -> Listed:
    """Return what a list says of a checkpoint: sizes are compared, hashes are not."""
    written = checkpoint.path.stat().st_mtime
    try:
        description = checkpoint.describe()
        checkpoint.check_sizes(description)
    except RunError as error:
        return Listed(checkpoint, None, 0, written, 0, str(error))
    files = description["files"]
    parts = sum(name.startswith(MODEL) and name.endswith(".safetensors") for name in files)
    return Listed(checkpoint, description["tokens"], sum(each["bytes"] for each in files.values()), written, parts)


def table(rows: list[Listed]) -> str:
    """Return a list of checkpoints as text."""
    if not rows:
        return "no checkpoints"
    lines = [f"{'step':>12}{'tokens':>18}{'size':>14}{'parts':>7}  written"]
    for each in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.written))
        if each.damage:
            lines.append(f"{each.checkpoint.step:>12,}{'damaged':>18}{'':>21}  {when}  {each.damage}")
        else:
            lines.append(
                f"{each.checkpoint.step:>12,}{each.tokens:>18,}{each.bytes / 1e6:>11,.1f} MB{each.parts:>7}  {when}"
            )
    return "\n".join(lines)


def verify(path: Path, step: int | None, say: Callable[[str], None] = print) -> bool:
    """Check every hash of a checkpoint, or of all that a run has; say of each whether it is whole.

    Args:
        path: a run folder, or the folder of one checkpoint.
        step: of a run folder, the checkpoint to check; None checks all.
        say: prints a line.

    Returns:
        Whether all are whole.

    Raises:
        RunError: there is no checkpoint to check.
    """
    if (path / DESCRIPTION).exists():
        chosen = [Checkpoint(path, 0)]
    else:
        store = run_folder(path).checkpoints
        chosen = store.list() if step is None else [store.at(step)]
    if not chosen:
        raise RunError(f"{path} has no checkpoint yet")
    whole = True
    for each in chosen:
        try:
            with verifying(each) as progress:
                each.verify(progress.advance)
            say(f"{each.path}: whole")
        except RunError as error:
            say(str(error))
            whole = False
    return whole


def verifying(checkpoint: Checkpoint) -> Progress:
    """Return the display of a check."""
    with contextlib.suppress(RunError):
        files = checkpoint.describe()["files"]
        return Progress(sum(each["bytes"] for each in files.values()), "B", "verify")
    return Progress(None, "B", "verify")


def consolidate(path: Path, step: int | None, output: Path, say: Callable[[str], None] = print) -> None:
    """Make a checkpoint that holds weights alone, in one file, to evaluate, convert or export; training needs more.

    Tensors are read and written one at a time, so that memory does not grow with the model.

    Args:
        path: a run folder, or the folder of one checkpoint.
        step: of a run folder, the checkpoint to take; None takes the newest whole one.
        output: folder to make: whole or not at all.
        say: prints a line.

    Raises:
        RunError: there is no whole checkpoint, or something is at ``output``.
    """
    refuse_existing(output)
    source = loading.find(path, step)
    description = {
        key: value for key, value in source.describe().items() if key not in ("format", "step", "files", SEAL)
    }
    aside = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        aside.mkdir(parents=True)
        for name in (CONFIG, TOKENIZER):
            shutil.copyfile(source.path / name, aside / name)
        hashed = {WEIGHTS: in_one_file(TensorReader(source.path, MODEL), aside / WEIGHTS)}
        vouch(aside, source.step, hashed, **description)
        aside.rename(output)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync_folder(output.parent)
    say(f"{output}: weights of step {source.step} in {WEIGHTS}")


def in_one_file(reader: TensorReader, path: Path) -> dict[str, object]:
    """Write all tensors of a reader into one file, by name; return its size and hash."""
    shapes = {name: reader.shape(name) for name in sorted(reader)}
    with (
        Progress(sum(each.bytes for each in shapes.values()), "B", "consolidate") as progress,
        TensorWriter(path, shapes) as writer,
    ):
        for name, shape in shapes.items():
            writer.write(name, reader[name])
            progress.advance(shape.bytes)
    return {"bytes": writer.size, "sha256": writer.sha256}
