"""Many tensors in safetensors files: written one after the other, read one at a time.

Several writers each write a file of their own; an index then says which file holds which tensor, as Hugging Face's
``model.safetensors.index.json`` does. So nobody ever holds all tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import RunError
from pipeline.files import fsync_file

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_ALIGNMENT = 8  # of the tensors' bytes in the file
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
}


@dataclass(frozen=True)
class TensorShape:
    """What is known of a tensor before it is there.

    Attributes:
        shape: sizes.
        dtype: type of its numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def file_name(stem: str, part: int, parts: int) -> str:
    """Return the name of a part's file, counted from 0, as Hugging Face names them."""
    return f"{stem}{SUFFIX}" if parts == 1 else f"{stem}-{part + 1:05d}-of-{parts:05d}{SUFFIX}"


class TensorWriter:
    """A safetensors file, written tensor by tensor; no more than one is held.

    Args:
        path: the file.
        shapes: what will be written, in this order.

    Attributes:
        sha256: hash of all that was written; after ``close``.
        size: its bytes.
    """

    def __init__(self, path: Path, shapes: Mapping[str, TensorShape]) -> None:
        self._left = list(shapes.items())
        self._path = path
        self._hash = hashlib.sha256()
        self.size = 0
        header, offset = {}, 0
        for name, each in shapes.items():
            header[name] = {
                "dtype": _NAMES[each.dtype],
                "shape": list(each.shape),
                "data_offsets": [offset, offset + each.bytes],
            }
            offset += each.bytes
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._file = path.open("wb")
        try:
            self._write(len(text).to_bytes(8, "little"))
            self._write(text)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor; ValueError if another one is due."""
        due, shape = self._left.pop(0)
        if name != due or tuple(tensor.shape) != shape.shape or tensor.dtype != shape.dtype:
            raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} instead of {due} {shape.shape}")
        self._write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hash.update(content)
        self.size += len(content)

    def close(self) -> None:
        """Finish the file, and flush it to the disk; ValueError if a tensor is missing."""
        self._file.close()
        if self._left:
            raise ValueError(f"{self._left[0][0]} was not written")
        fsync_file(self._path)

    def abandon(self) -> None:
        """Close the file as it is, after an error."""
        with contextlib.suppress(OSError):  # what is left in its buffer may not fit either
            self._file.close()

    @property
    def sha256(self) -> str:
        """Hash of all that was written."""
        return self._hash.hexdigest()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def write_index(path: Path, files: Mapping[str, Mapping[str, TensorShape]]) -> None:
    """Write which file holds which tensor.

    Args:
        path: the index.
        files: for each file what it holds.
    """
    total = sum(each.bytes for shapes in files.values() for each in shapes.values())
    where = {name: file for file, shapes in files.items() for name in shapes}
    path.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=1)
    )


def tensor_files(folder: Path, stem: str) -> list[str]:
    """Return the names of the files that hold the tensors of ``stem``, in order.

    Raises:
        RunError: there are none, or the index cannot be read.
    """
    if (folder / f"{stem}{SUFFIX}").is_file():
        return [f"{stem}{SUFFIX}"]
    return sorted(set(_weight_map(folder, stem).values()))


def _weight_map(folder: Path, stem: str) -> dict[str, str]:
    index = folder / f"{stem}{INDEX_SUFFIX}"
    try:
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except FileNotFoundError:
        raise RunError(f"{folder} holds neither {stem}{SUFFIX} nor {index.name}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{index} cannot be read ({error}); it is damaged") from None
    for file in found.values():
        if Path(file).name != file:
            raise RunError(f"{index} names {file!r}, which lies outside its folder; it is damaged")
    return found


class TensorReader(Mapping[str, Tensor]):
    """The tensors of ``stem`` in a folder, each read when it is asked for.

    Args:
        folder: where the files lie.
        stem: ``model`` for ``model.safetensors``, or for the files that ``model.safetensors.index.json`` names.

    Raises:
        RunError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._opened: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in tensor_files(folder, stem):
            try:
                opened = safe_open(folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise RunError(f"{folder / file} cannot be read ({error}); it is damaged") from None
            self._opened[file] = opened
            self._where.update(dict.fromkeys(opened.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._opened[self._where[name]].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def shape(self, name: str) -> TensorShape:
        """Return what a tensor looks like, its content not read."""
        part = self._opened[self._where[name]].get_slice(name)
        dtypes = {text: dtype for dtype, text in _NAMES.items()}
        return TensorShape(tuple(part.get_shape()), dtypes[part.get_dtype()])


def shares(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Divide named things into parts of about equal sizes: each, largest first, to the part that has least.

    Every part keeps the order of ``sizes``.
    """
    loads, owner = [0] * parts, {}
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        least = loads.index(min(loads))
        owner[name] = least
        loads[least] += sizes[name]
    return [[name for name in sizes if owner[name] == part] for part in range(parts)]
