"""Readers of text, JSONL and Parquet files, plain or compressed, that say exactly where a file is at fault."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from pipeline.errors import DataError
from pipeline.files import describe_os_error

_CHUNK = 1 << 20
_BOM = "\ufeff"
_ROWS = 256


def _zstd() -> Any:
    # Files made with --long need a larger window than the default.
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


class _ZstdReader(io.RawIOBase):
    """Decompresses Zstandard, and notices where the file ends too early, which the library's own reader does not."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._inner = _zstd()
        self._fresh = True  # between two frames
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._inner.eof:
                rest = self._inner.unused_data
                self._inner, self._fresh = _zstd(), True
            else:
                rest = b""
            chunk = rest or self._file.read(_CHUNK)
            if not chunk:
                if not self._fresh:
                    raise EOFError("the compressed data end too early")
                return 0
            self._fresh = False
            self._ready = self._inner.decompress(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda path: io.BufferedReader(_ZstdReader(path), _CHUNK),
}
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressing by its suffix."""
    return COMPRESSIONS.get(path.suffix.lower(), lambda plain: open(plain, "rb"))(path)


def read_text(path: Path) -> str:
    """Return the text of a file that is one document."""
    try:
        with open_binary(path) as file:
            content = file.read()
    except _DAMAGE as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.errno is None:  # bz2 reports damage so
            raise _damaged(path, error) from None
        raise
    try:
        return content.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte {error.start} is not valid UTF-8 ({error.reason}); convert the file to UTF-8"
        ) from None


def documents_of_jsonl(path: Path, text_field: str, start: int, stop: int) -> Iterator[str]:
    """Yield the texts of the lines that begin in a range of bytes; ``stop`` -1 means the end of the file."""
    for offset, number, line in _lines(path, start, stop):
        if line.isspace():
            continue
        try:
            yield _text_of_line(line, text_field, first=offset == 0)
        except ValueError as error:
            place = number if start == 0 else number + _count_lines(path, start)
            raise DataError(f"{path}, line {place}: {error}") from None


def _lines(path: Path, start: int, stop: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield each line that begins in the range: its offset, its number from the start of the range, its content."""
    try:
        with open_binary(path) as file:
            offset = start
            if start:
                # The line that spans the border belongs to the range in which it begins.
                file.seek(start - 1)
                offset = start - 1 + len(file.readline())
            number = 1
            while stop < 0 or offset < stop:
                line = file.readline()
                if not line:
                    return
                yield offset, number, line
                offset += len(line)
                number += 1
    except _DAMAGE as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.errno is None:
            raise _damaged(path, error) from None
        raise


def _text_of_line(line: bytes, text_field: str, *, first: bool) -> str:
    """Return the text in a line, or raise ValueError with the reason."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 ({error.reason} at byte {error.start} of the line)") from None
    try:
        record = json.loads(text.removeprefix(_BOM) if first else text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON ({error.msg} at column {error.colno}); each line must be one object"
        ) from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object; each line must be one")
    if text_field not in record:
        raise ValueError(f"no field {text_field!r}; it has {', '.join(map(repr, record)) or 'none'} (text_field)")
    return _checked(record[text_field], text_field)


def _checked(value: Any, text_field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {text_field!r} is {type(value).__name__}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"field {text_field!r} holds half of a surrogate pair, which is no character") from None
    return value


def _count_lines(path: Path, stop: int) -> int:
    """Count the lines that begin before a byte, to name a line in a message."""
    count, left, last = 0, stop, b"\n"
    with open(path, "rb") as file:
        while left and (chunk := file.read(min(_CHUNK, left))):
            count += chunk.count(b"\n")
            left -= len(chunk)
            last = chunk[-1:]
    return count + (last != b"\n")


def count_row_groups(path: Path, text_field: str) -> list[int]:
    """Return the bytes of each row group of a Parquet file, after a check of its column of text."""
    import pyarrow

    with _open_parquet(path) as file:
        schema = file.schema_arrow
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        if not file.metadata.num_rows:
            raise DataError(f"{path} has no rows; remove it or leave it out with `files`")
        if text_field not in schema.names:
            raise DataError(f"{path} has no column {text_field!r}; it has {', '.join(map(repr, schema.names))}")
        kind = schema.field(text_field).type
        inner = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        views = getattr(pyarrow.types, "is_string_view", lambda _: False)
        if not (pyarrow.types.is_string(inner) or pyarrow.types.is_large_string(inner) or views(inner)):
            raise DataError(f"{path}: column {text_field!r} is {kind}, not text")
    return [sum(group.column(column).total_compressed_size for column in range(group.num_columns)) for group in groups]


def documents_of_parquet(path: Path, text_field: str, group: int) -> Iterator[str]:
    """Yield the texts of one row group of a Parquet file."""
    import pyarrow

    with _open_parquet(path) as file:
        row = sum(file.metadata.row_group(number).num_rows for number in range(group))
        try:
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[text_field], use_threads=False):
                for value in batch.column(0):
                    row += 1
                    try:
                        yield _checked(value.as_py(), text_field)
                    except UnicodeDecodeError:
                        raise DataError(f"{path}, row {row}: column {text_field!r} is not valid UTF-8") from None
                    except ValueError as error:
                        raise DataError(f"{path}, row {row}: {error}") from None
        except (pyarrow.ArrowException, OSError) as error:
            raise _damaged(path, error) from None


def _open_parquet(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise DataError(f"cannot read {describe_os_error(error, path)}") from None


def _damaged(path: Path, error: BaseException) -> DataError:
    return DataError(f"{path} is damaged or not of the kind that its name says: {' '.join(str(error).split())}")
