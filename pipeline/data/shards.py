"""Shards: tar files of raw tokens, written as webdataset writes them, and read at random through memory maps."""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import resource
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.data.manifest import TAR_BLOCK, Manifest, Member, Shard, check_hash, check_size
from pipeline.errors import DataError
from pipeline.files import describe_os_error, fsync_folder


class ShardWriter:
    """Writes one shard: aside, flushed, hashed on the way, and renamed when it is whole.

    The bytes depend on the tokens alone: no time, no user. The tar members hold up to ``member_tokens`` tokens each,
    whatever the documents.

    Args:
        path: where the shard goes.
        aside: folder of the unfinished file, on the same file system.
        dtype: ``uint16`` or ``uint32``.
        member_tokens: tokens of a member; the last one may be shorter.
    """

    def __init__(self, path: Path, aside: Path, dtype: str, member_tokens: int) -> None:
        self.path = path
        self.tokens = 0
        self.documents = 0
        self.source_bytes = 0
        self._aside = aside / f"{path.name}.{os.getpid()}.partial"
        self._file = _HashedFile(self._aside)
        # As webdataset's own TarWriter does it (a test compares the bytes), which would load torch in every process.
        self._tar = tarfile.open(fileobj=cast(Any, self._file), mode="w|", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._member_tokens = member_tokens
        self._pending: list[NDArray[Any]] = []
        self._pending_tokens = 0
        self._members: list[Member] = []
        self._offset = 0

    def add_document(self, tokens: NDArray[np.integer], source_bytes: int) -> None:
        """Append one document, which begins with the document token."""
        self._pending.append(tokens.astype(self._dtype))
        self._pending_tokens += len(tokens)
        self.tokens += len(tokens)
        self.documents += 1
        self.source_bytes += source_bytes
        if self._pending_tokens >= self._member_tokens:
            self._write_members(self._member_tokens)

    def finish(self) -> Shard:
        """Complete the file on the disk under its name and return its entry in the manifest."""
        self._write_members(1)
        self._tar.close()
        self._file.sync_and_close()
        os.replace(self._aside, self.path)
        fsync_folder(self.path.parent)
        return Shard(
            file=self.path.name,
            bytes=self._file.size,
            sha256=self._file.digest.hexdigest(),
            tokens=self.tokens,
            documents=self.documents,
            source_bytes=self.source_bytes,
            members=tuple(self._members),
        )

    def abandon(self) -> None:
        """Drop the unfinished file."""
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def _write_members(self, least: int) -> None:
        """Write members while at least ``least`` tokens are pending."""
        if self._pending_tokens < least:
            return
        tokens = np.concatenate(self._pending)
        start = 0
        while len(tokens) - start >= least:
            data = tokens[start : start + self._member_tokens]
            self._write_member(data.tobytes(), len(data))
            start += len(data)
        self._pending = [tokens[start:].copy()]
        self._pending_tokens = len(tokens) - start

    def _write_member(self, data: bytes, tokens: int) -> None:
        header = tarfile.TarInfo(f"{len(self._members):06d}.bin")
        header.size = len(data)  # time and owner stay at 0
        self._tar.addfile(header, io.BytesIO(data))
        self._members.append(Member(header.name, self._offset + TAR_BLOCK, tokens))
        self._offset += TAR_BLOCK + -(-len(data) // TAR_BLOCK) * TAR_BLOCK


class _HashedFile:
    """The part of a file that a tar writer needs, with the hash and size of what went through."""

    def __init__(self, path: Path) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self.name = str(path)
        self._file = open(path, "wb")  # noqa: SIM115

    def write(self, data: bytes) -> int:
        if self._file.closed:
            return len(data)  # the tar writer of an abandoned file still writes its end
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def sync_and_close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        # Closing flushes, and so may fail once more on a full disk.
        with contextlib.suppress(OSError):
            self._file.close()


class TokenReader:
    """Random access to the tokens of a split, as if its shards were one long array.

    Shards are opened and checked when they are first touched. The reader can be copied to another process; each opens
    files of its own.

    Args:
        manifest: the data folder's manifest.
        split: name of the split.
        verify_hash: also check a shard's hash when it is first opened (reads it whole).
    """

    def __init__(self, manifest: Manifest, split: str, *, verify_hash: bool = False) -> None:
        self.manifest = manifest
        self.split = split
        self.verify_hash = verify_hash
        self._shards = manifest.split(split).shards
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._vocab_size = manifest.tokenizer.vocab_size
        self._index_members()
        self.total = int(self._ends[-1])
        self._checked: set[int] = set()
        self._maps: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._most_maps = _most_maps()

    def _index_members(self) -> None:
        """Tabulate, for every member of the split: its shard, its end in the split and its shift within the shard."""
        flat = [(number, member) for number, shard in enumerate(self._shards) for member in shard.members]
        counts = np.array([member.tokens for _, member in flat], dtype=np.int64)
        offsets = np.array([member.offset for _, member in flat], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self._shard_of = np.array([number for number, _ in flat], dtype=np.int64)
        # Token p of the split, in this member, is item p + shift of the shard's file.
        self._shift = offsets // self.manifest.item_bytes - (self._ends - counts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Return ``count`` tokens from ``start`` on."""
        if start < 0 or count < 0 or start + count > self.total:
            raise ValueError(f"tokens {start} to {start + count} are outside split {self.split!r} of {self.total}")
        result = np.empty(count, dtype=self._dtype)
        self._copy(start, result)
        self.check_range(result, np.array([start]))
        return result

    def read_rows(
        self, starts: NDArray[np.int64], length: int, out: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return rows of ``length`` tokens as int64 [rows, length]; ``starts`` are their first tokens."""
        rows = np.empty((len(starts), length), dtype=np.int64) if out is None else out
        shards, places = self.locate(starts, length)
        self.gather(starts, shards, places, rows)
        return rows

    def locate(self, starts: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each row and its first item in that shard's file; shard -1 where a row is cut up."""
        first = np.searchsorted(self._ends, starts, side="right")
        whole = starts + length <= self._ends[first]
        return np.where(whole, self._shard_of[first], -1), starts + self._shift[first]

    def gather(
        self,
        starts: NDArray[np.int64],
        shards: NDArray[np.int64],
        places: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        """Fill ``rows`` with located rows (see ``locate``) and check that every token is in the vocabulary."""
        length = rows.shape[1]
        maps = self._maps
        for row, (shard, place) in enumerate(zip(shards.tolist(), places.tolist(), strict=True)):
            if shard < 0:
                self._copy(int(starts[row]), rows[row])
                continue
            items = maps.get(shard)
            if items is None:
                items = self._open(shard)
            rows[row] = items[place : place + length]
        self.check_range(rows, starts)

    def check_range(self, tokens: NDArray[Any], starts: NDArray[np.int64]) -> None:
        """Raise DataError where a token is outside the vocabulary; ``starts`` are the first tokens of the rows."""
        if tokens.size == 0 or int(tokens.max()) < self._vocab_size:
            return
        rows = tokens.reshape(len(starts), -1)
        row, column = np.argwhere(rows >= self._vocab_size)[0]
        position = int(starts[row] + column)
        member = int(np.searchsorted(self._ends, position, side="right"))
        shard = self._shards[self._shard_of[member]]
        offset = (position + int(self._shift[member])) * self.manifest.item_bytes
        raise DataError(
            f"shard {self.manifest.path(shard)} holds token id {int(rows[row, column])} at byte {offset}, outside the "
            f"vocabulary of {self._vocab_size}; it is damaged: restore it or prepare the data again"
        )

    def _copy(self, start: int, out: NDArray[Any]) -> None:
        """Copy tokens that may cross members and shards."""
        done = 0
        member = int(np.searchsorted(self._ends, start, side="right"))
        while done < len(out):
            position = start + done
            count = min(len(out) - done, int(self._ends[member]) - position)
            shard = int(self._shard_of[member])
            items = self._maps.get(shard)
            if items is None:
                items = self._open(shard)
            place = position + int(self._shift[member])
            out[done : done + count] = items[place : place + count]
            done += count
            member += 1

    def _open(self, number: int) -> NDArray[Any]:
        shard = self._shards[number]
        path = self.manifest.path(shard)
        check_size(self.manifest, shard)
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = describe_os_error(error, path) if isinstance(error, OSError) else f"{path}: {error}"
            raise DataError(f"shard {reason}") from None
        if number not in self._checked:
            if self.verify_hash:
                check_hash(self.manifest, shard)
            check_headers(mapped, shard, path, self.manifest.item_bytes)
            self._checked.add(number)
        while len(self._maps) >= self._most_maps:
            self._maps.popitem(last=False)
        items = np.frombuffer(mapped, dtype=self._dtype, count=len(mapped) // self._dtype.itemsize)
        self._maps[number] = items
        return items


def _most_maps() -> int:
    """Return how many shards may be open at once: each holds a file descriptor, and most are left to others."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 16384 if limit == resource.RLIM_INFINITY else min(16384, max(8, limit // 4))


def check_headers(content: mmap.mmap | bytes, shard: Shard, path: Path, item_bytes: int) -> None:
    """Raise DataError unless the tar headers in a shard are those of the members that the manifest lists."""
    advice = "the file is not the one that was prepared: restore it or prepare the data again"
    for member in shard.members:
        header = content[member.offset - TAR_BLOCK : member.offset]
        try:
            found = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise DataError(f"shard {path} has no member at byte {member.offset}; {advice}") from None
        expected = (member.name, member.tokens * item_bytes)
        if not found.isreg() or (found.name, found.size) != expected:
            raise DataError(
                f"shard {path} has member {found.name!r} of {found.size} bytes where the manifest says "
                f"{expected[0]!r} of {expected[1]} bytes; {advice}"
            )
