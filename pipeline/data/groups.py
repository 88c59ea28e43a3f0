"""The work of one process of ``prepare``: a group of units becomes shards and a record of them.

A group is the unit of resuming. Its record is written after all its shards are on the disk, so a group either counts
as done, whole, or is done again from its beginning with the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.manifest import TOKENIZER_FILE, Shard, Split
from pipeline.data.shards import ShardWriter
from pipeline.data.sources import Unit, documents
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError
from pipeline.files import describe_os_error, write_atomically

STATE_FOLDER = ".prepare"
TRAIN = "train"

# Texts are encoded in batches of about this many characters.
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Group:
    """Units that one process turns into shards at once.

    Attributes:
        number: its place in the order of the data.
        units: its units, in order.
    """

    number: int
    units: tuple[Unit, ...]

    @property
    def bytes(self) -> int:
        """Bytes on the disk that it reads."""
        return sum(unit.bytes for unit in self.units)


@dataclass(frozen=True)
class Settings:
    """What a process needs to know besides the group.

    Attributes:
        output: the data folder.
        plan: fingerprint of the plan.
        holdout: share of the training documents that goes to each other split.
        dtype: type of a token in the shards.
        shard_tokens: tokens after which a shard ends, at the end of a document.
        member_tokens: tokens of a member.
        document_token: the token that begins a document.
    """

    output: Path
    plan: str
    holdout: Mapping[str, float]
    dtype: str
    shard_tokens: int
    member_tokens: int
    document_token: str


class StoppedError(Exception):
    """The main process asked to stop; nothing is lost but the unfinished group."""


def divide(units: list[Unit], group_bytes: int) -> list[Group]:
    """Divide units into groups of at least ``group_bytes`` each, in order; the last may be smaller."""
    groups: list[Group] = []
    pending: list[Unit] = []
    size = 0
    for unit in units:
        pending.append(unit)
        size += unit.bytes
        if size >= group_bytes:
            groups.append(Group(len(groups), tuple(pending)))
            pending, size = [], 0
    if pending:
        groups.append(Group(len(groups), tuple(pending)))
    return groups


def split_of(text: str, split: str, holdout: Mapping[str, float]) -> str:
    """Return the split that a document goes to: held-out ones are chosen by the hash of their text.

    So the choice depends on nothing else, and copies of one text never lie on both sides.
    """
    if split != TRAIN or not holdout:
        return split
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    for name in sorted(holdout):
        if place < holdout[name]:
            return name
        place -= holdout[name]
    return split


def record_path(output: Path, number: int) -> Path:
    """Return where the record of a group lies while the preparation goes on."""
    return output / STATE_FOLDER / f"group-{number:05d}.json"


def load_record(output: Path, number: int, plan: str) -> dict[str, Split] | None:
    """Return what a finished group made, by split, or None where it is not finished."""
    try:
        record = json.loads(record_path(output, number).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{record_path(output, number)} cannot be read ({error}); delete it and start again") from None
    if record["plan"] != plan:
        return None
    splits = _splits_of(record, str(record_path(output, number)))
    for split in splits.values():
        for shard in split.shards:
            path = output / shard.file
            if not path.is_file() or path.stat().st_size != shard.bytes:
                return None
    return splits


def make_group(group: Group, settings: Settings, tokenizer: Tokenizer, stop: Event | None = None) -> dict[str, Split]:
    """Write the shards and the record of a group; return what it made, by split."""
    writers: dict[str, _SplitWriter] = {}
    try:
        for batch in _batches(group, settings.holdout, stop):
            arrays = tokenizer.encode_batch([text for _, text in batch])
            for (split, text), ids in zip(batch, arrays, strict=True):
                if split not in writers:
                    writers[split] = _SplitWriter(split, group.number, settings)
                writers[split].add(text, ids, tokenizer.document_id)
        splits = {name: writers[name].finish() for name in sorted(writers)}
        record = {"plan": settings.plan, "splits": {name: split.to_json() for name, split in splits.items()}}
        write_atomically(record_path(settings.output, group.number), json.dumps(record))
    except OSError as error:
        place = error.filename or settings.output
        raise DataError(
            f"cannot write {describe_os_error(error, place)} (what is finished is kept; the same command goes on from "
            f"there)"
        ) from None
    finally:
        for writer in writers.values():
            writer.abandon()
    return splits


def _batches(group: Group, holdout: Mapping[str, float], stop: Event | None) -> Iterator[list[tuple[str, str]]]:
    """Yield lists of (split, text), each of bounded size."""
    batch: list[tuple[str, str]] = []
    size = 0
    for unit in group.units:
        for text in documents(unit):
            if stop is not None and stop.is_set():
                raise StoppedError
            batch.append((split_of(text, unit.split, holdout) if text else unit.split, text))
            size += len(text) + 64
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Writes the shards of one split in one group."""

    def __init__(self, split: str, group: int, settings: Settings) -> None:
        self._prefix = f"{split}-{group:05d}"
        self._settings = settings
        self._shards: list[Shard] = []
        self._writer: ShardWriter | None = None
        self._empty = 0

    def add(self, text: str, ids: np.ndarray, document_id: int) -> None:
        if not text:
            self._empty += 1
            return
        if self._writer is None:
            path = self._settings.output / f"{self._prefix}-{len(self._shards):03d}.tar"
            aside = self._settings.output / STATE_FOLDER
            self._writer = ShardWriter(path, aside, self._settings.dtype, self._settings.member_tokens)
        self._writer.add_document(np.concatenate([[document_id], ids]), len(text.encode("utf-8")))
        if self._writer.tokens >= self._settings.shard_tokens:
            self._end_shard()

    def finish(self) -> Split:
        self._end_shard()
        return Split(tuple(self._shards), self._empty)

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()

    def _end_shard(self) -> None:
        if self._writer is not None:
            self._shards.append(self._writer.finish())
            self._writer = None


def _splits_of(record: dict[str, Any], where: str) -> dict[str, Split]:
    return {
        name: Split(tuple(Shard.from_json(shard, where) for shard in plain["shards"]), plain["empty_documents"])
        for name, plain in record["splits"].items()
    }


# What a worker process keeps between groups.
_worker: dict[str, Any] = {}


def start_worker(settings: Settings, stop: Event) -> None:
    """Set up a worker process."""
    # Ctrl-C reaches every process of the terminal; the main process alone decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # Each process encodes on one core; the processes are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    tokenizer = Tokenizer.from_file(settings.output / TOKENIZER_FILE, settings.document_token)
    _worker.update(settings=settings, tokenizer=tokenizer, stop=stop)


def work(group: Group) -> dict[str, Split]:
    """Make a group in a worker process."""
    return make_group(group, _worker["settings"], _worker["tokenizer"], _worker["stop"])


def _die_with_parent() -> None:
    """End this process when the main process has died, however it died."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
