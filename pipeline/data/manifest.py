"""The manifest of a prepared data folder: what its shards hold, to the byte, and a fingerprint of the token stream."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.files import describe_os_error, sha256_file, write_atomically

FORMAT = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
TOKEN_BYTES_FILE = "token_bytes.bin"

# Names are taken from the manifest, which may come from anywhere: plain names only, so that none can leave the folder
# or mean a command to a library that opens "pipe:..." names.
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.tar")
MEMBER_NAME = re.compile(r"[0-9]{1,12}\.bin")
SPLIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
ITEM_BYTES = {"uint16": 2, "uint32": 4}
TAR_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a shard.

    Attributes:
        name: its name in the tar file.
        offset: where its data begin in the tar file, in bytes.
        tokens: tokens it holds.
    """

    name: str
    offset: int
    tokens: int


@dataclass(frozen=True)
class Shard:
    """One tar file of tokens.

    Attributes:
        file: plain file name.
        bytes: size of the file.
        sha256: hash of the file.
        tokens: tokens it holds.
        documents: documents that begin in it.
        source_bytes: UTF-8 bytes of their text.
        members: its members, in order.
    """

    file: str
    bytes: int
    sha256: str
    tokens: int
    documents: int
    source_bytes: int
    members: tuple[Member, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain containers, members as short lists."""
        plain = {name: getattr(self, name) for name in ("file", "bytes", "sha256", "tokens", "documents")}
        members = [[member.name, member.offset, member.tokens] for member in self.members]
        return {**plain, "source_bytes": self.source_bytes, "members": members}

    @classmethod
    def from_json(cls, plain: Any, where: str) -> Shard:
        """Build from plain containers, or raise DataError."""
        numbers = {name: _get(plain, name, int, where) for name in ("bytes", "tokens", "documents", "source_bytes")}
        members = []
        for entry in _get(plain, "members", list, where):
            if not (isinstance(entry, list) and [type(part) for part in entry] == [str, int, int]):
                raise DataError(f"{where}: a member is {entry!r}; it must be [name, offset, tokens]")
            # Large corpora have millions of members, whose names repeat from shard to shard.
            members.append(Member(sys.intern(entry[0]), entry[1], entry[2]))
        file, digest = _get(plain, "file", str, where), _get(plain, "sha256", str, where)
        return cls(file=file, sha256=digest, members=tuple(members), **numbers)


@dataclass(frozen=True)
class Split:
    """One split: the concatenation of its shards' tokens.

    Attributes:
        shards: the shards, in order.
        empty_documents: source documents left out because they hold no text.
    """

    shards: tuple[Shard, ...]
    empty_documents: int = 0

    @property
    def tokens(self) -> int:
        """Tokens, document tokens included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents."""
        return sum(shard.documents for shard in self.shards)

    @property
    def source_bytes(self) -> int:
        """UTF-8 bytes of text."""
        return sum(shard.source_bytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return plain containers, totals included for the human reader."""
        totals = {name: getattr(self, name) for name in ("tokens", "documents", "source_bytes", "empty_documents")}
        return {**totals, "shards": [shard.to_json() for shard in self.shards]}


@dataclass(frozen=True)
class TokenizerEntry:
    """What the manifest says of the tokenizer.

    Attributes:
        kind: how it was made (``bpe``, ``file`` or ``bytes``).
        sha256: hash of ``tokenizer.json``.
        vocab_size: one more than the largest id.
        document_token: text form of the token that begins every document.
        document_id: its id.
        token_bytes_sha256: hash of ``token_bytes.bin``.
        exact_bytes: whether token bytes add up to exactly the bytes of the text.
    """

    kind: str
    sha256: str
    vocab_size: int
    document_token: str
    document_id: int
    token_bytes_sha256: str
    exact_bytes: bool


@dataclass(frozen=True)
class Manifest:
    """A prepared data folder.

    Attributes:
        folder: where it lies; not part of the file.
        tokenizer: its tokenizer.
        dtype: type of a token in the shards, little-endian: ``uint16`` or ``uint32``.
        splits: the splits by name.
        plan: fingerprint of the plan of inputs and settings that it was made by.
        sources: what the inputs were, for the human reader.
        config: settings it was made with, for the human reader.
    """

    folder: Path
    tokenizer: TokenizerEntry
    dtype: str
    splits: Mapping[str, Split]
    plan: str = ""
    sources: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def item_bytes(self) -> int:
        """Bytes of a token in the shards."""
        return ITEM_BYTES[self.dtype]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that determines the token stream: shard hashes in order, token type and tokenizer.

        Paths, dates, and how the data were made are no part of it: a copied folder has the same fingerprint.
        """
        content = {
            "format": FORMAT,
            "dtype": self.dtype,
            "tokenizer": [self.tokenizer.sha256, self.tokenizer.document_id],
            "splits": {name: [shard.sha256 for shard in split.shards] for name, split in self.splits.items()},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def split(self, name: str) -> Split:
        """Return a split that holds tokens, or raise DataError."""
        if name not in self.splits:
            raise DataError(f"{self.folder / MANIFEST_FILE} has no split {name!r}; it has {', '.join(self.splits)}")
        if not self.splits[name].tokens:
            raise DataError(f"split {name!r} of {self.folder} is empty; prepare it with more text or a larger holdout")
        return self.splits[name]

    def path(self, shard: Shard) -> Path:
        """Return where a shard lies."""
        return self.folder / shard.file

    def save(self) -> None:
        """Write ``manifest.json`` into the folder, whole or not at all."""
        write_atomically(self.folder / MANIFEST_FILE, self.dumps())

    def dumps(self) -> str:
        """Return the content of ``manifest.json``; the same data give the same bytes."""
        content = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "plan": self.plan,
            "dtype": self.dtype,
            "tokenizer": asdict(self.tokenizer),
            "config": self.config,
            "sources": self.sources,
        }
        head = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")
        splits = ",\n".join(f"  {json.dumps(name)}: {_dump_split(split)}" for name, split in self.splits.items())
        return f'{head},\n "splits": {{\n{splits}\n }}\n}}\n'

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read and check the manifest of a folder that ``prepare`` made."""
        path = Path(folder) / MANIFEST_FILE
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(
                f"{path} does not exist; {Path(folder)} is not a prepared data folder, or its preparation has not "
                f"finished (run `backfeed prepare`, again if need be)"
            ) from None
        except OSError as error:
            raise DataError(describe_os_error(error, path)) from None
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}; restore it or prepare the data again") from None
        return cls._from_json(Path(folder), content, str(path))

    @classmethod
    def _from_json(cls, folder: Path, content: Any, where: str) -> Manifest:
        number = _get(content, "format", int, where)
        if number != FORMAT:
            raise DataError(f"{where} has format {number}; this version reads format {FORMAT}: prepare the data again")
        entry = _get(content, "tokenizer", dict, where)
        tokenizer = TokenizerEntry(
            kind=_get(entry, "kind", str, where),
            sha256=_get(entry, "sha256", str, where),
            vocab_size=_get(entry, "vocab_size", int, where),
            document_token=_get(entry, "document_token", str, where),
            document_id=_get(entry, "document_id", int, where),
            token_bytes_sha256=_get(entry, "token_bytes_sha256", str, where),
            exact_bytes=_get(entry, "exact_bytes", bool, where),
        )
        splits = {}
        for name, plain in _get(content, "splits", dict, where).items():
            shards = [Shard.from_json(shard, where) for shard in _get(plain, "shards", list, where)]
            splits[name] = Split(tuple(shards), _get(plain, "empty_documents", int, where))
        result = cls(
            folder=folder,
            tokenizer=tokenizer,
            dtype=_get(content, "dtype", str, where),
            splits=splits,
            plan=_get(content, "plan", str, where),
            sources=_get(content, "sources", list, where),
            config=_get(content, "config", dict, where),
        )
        result._check(where)
        if result.fingerprint != _get(content, "fingerprint", str, where):
            raise DataError(f"{where} was changed by hand: its fingerprint does not fit; restore it or prepare again")
        return result

    def _check(self, where: str) -> None:
        if self.dtype not in ITEM_BYTES:
            raise DataError(f"{where}: dtype is {self.dtype!r}; it must be uint16 or uint32")
        if not 0 <= self.tokenizer.document_id < self.tokenizer.vocab_size <= 1 << (8 * self.item_bytes):
            raise DataError(f"{where}: vocabulary, document token and dtype contradict each other")
        for name, split in self.splits.items():
            if not SPLIT_NAME.fullmatch(name):
                raise DataError(f"{where}: {name!r} is no name of a split")
            for shard in split.shards:
                self._check_shard(shard, where)

    def _check_shard(self, shard: Shard, where: str) -> None:
        if not SHARD_NAME.fullmatch(shard.file):
            raise DataError(f"{where}: shard {shard.file!r} is refused; a shard is a plain file name ending in .tar")
        end = 0
        for member in shard.members:
            if not MEMBER_NAME.fullmatch(member.name):
                raise DataError(
                    f"{where}: shard {shard.file} lists a member {member.name!r}, which is refused; members hold raw "
                    f"tokens and are named NNNNNN.bin"
                )
            if member.offset < end + TAR_BLOCK or member.offset % TAR_BLOCK or member.tokens < 1:
                raise DataError(f"{where}: member {member.name} of shard {shard.file} has an impossible place or size")
            end = member.offset + member.tokens * self.item_bytes
        if end > shard.bytes or sum(member.tokens for member in shard.members) != shard.tokens:
            raise DataError(f"{where}: the members of shard {shard.file} do not add up to its size or tokens")


def check_shards(manifest: Manifest, splits: Iterable[str] | None = None) -> None:
    """Make sure that every shard is there and has its size: quick, so that a run fails at its start and not later.

    Args:
        manifest: the manifest.
        splits: names of the splits that are needed; by default all.
    """
    names = list(manifest.splits) if splits is None else list(splits)
    for name in names:
        for shard in manifest.split(name).shards if splits is not None else manifest.splits[name].shards:
            check_size(manifest, shard)


def check_size(manifest: Manifest, shard: Shard) -> None:
    """Raise DataError unless the shard exists and has the size that the manifest says."""
    path = manifest.path(shard)
    advice = "restore the file or prepare the data again"
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise DataError(f"shard {describe_os_error(error, path)}; {advice}") from None
    if size is None:
        raise DataError(f"shard {path} is missing; {advice}")
    if size != shard.bytes:
        cut = "truncated" if size < shard.bytes else "changed"
        raise DataError(f"shard {path} is {cut}: it has {size} bytes, the manifest says {shard.bytes}; {advice}")


def check_hash(manifest: Manifest, shard: Shard) -> None:
    """Raise DataError unless the shard's content is what the manifest says."""
    path = manifest.path(shard)
    check_size(manifest, shard)
    try:
        digest = sha256_file(path)
    except OSError as error:
        raise DataError(f"shard {describe_os_error(error, path)}") from None
    if digest != shard.sha256:
        raise DataError(
            f"shard {path} is damaged: its SHA-256 is {digest[:16]}..., the manifest says {shard.sha256[:16]}...; "
            f"restore the file or prepare the data again"
        )


def _dump_split(split: Split) -> str:
    """Return a split as JSON, one shard a line, so that people and diffs can follow it."""
    plain = split.to_json()
    shards = ",\n".join(f"   {json.dumps(shard)}" for shard in plain.pop("shards"))
    return f'{json.dumps(plain).removesuffix("}")}, "shards": [\n{shards}\n  ]}}'


def _get(content: Any, name: str, kind: type, where: str) -> Any:
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind) or (
        isinstance(value, int) and kind is int and (isinstance(value, bool) or value < 0)
    ):
        raise DataError(f"{where} is damaged: {name!r} is missing or is no {kind.__name__}; prepare the data again")
    return value
