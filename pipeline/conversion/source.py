"""What a conversion starts from: a plain transformer's settings, tokenizer and tensors, wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import DataError
from pipeline.files import describe_os_error, sha256_file
from pipeline.models.transformer import TransformerConfig

FLOATS = {"F64", "F32", "F16", "BF16"}  # as safetensors calls them; all else is quantised


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file.

    Attributes:
        file: the file.
        name: its name there.
        shape: its shape.
    """

    file: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Return the tensor as float32."""
        try:
            with safe_open(self.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise unreadable(self.file, error) from None
        return tensor.float()


@dataclass(frozen=True)
class Zeros:
    """A tensor that is nowhere stored since it is zero.

    Attributes:
        shape: its shape.
    """

    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Return the zeros."""
        return torch.zeros(self.shape)


Part = Stored | Zeros


@dataclass(frozen=True)
class Source:
    """A plain transformer.

    Attributes:
        path: folder that it lies in.
        origin: what ``path`` is, and whatever else is worth a record.
        config: its settings.
        tokenizer: content of its tokenizer's file.
        document_token: token that began its documents; None: not recorded.
        tensors: for each name in the state dict of ``config``, the parts it is made of, one below the other.
        files: all files that it is read from, by name.
        remarks: what a user should know of its conversion.
    """

    path: Path
    origin: Mapping[str, Any]
    config: TransformerConfig
    tokenizer: bytes
    document_token: str | None
    tensors: Mapping[str, tuple[Part, ...]]
    files: Mapping[str, Path]
    remarks: tuple[str, ...] = field(default=())

    def read(self, name: str) -> Tensor:
        """Return a tensor of the state dict as float32."""
        parts = [part.read() for part in self.tensors[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def describe(self) -> dict[str, Any]:
        """Return plain values for the record: where it lies, and the hash of every file."""
        hashes = {name: sha256_file(path) for name, path in self.files.items()}
        return {**self.origin, "path": str(self.path.absolute()), "files": hashes}


def stored(file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name, their content not yet read.

    Raises:
        DataError: the file is damaged, or holds a tensor that is not of floats.
    """
    found = {}
    if not file.is_file():
        raise DataError(f"{file} is missing")
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                header = opened.get_slice(name)
                if header.get_dtype() not in FLOATS:
                    raise DataError(f"{file}: {name} is of type {header.get_dtype()}; only float weights are converted")
                found[name] = Stored(file, name, tuple(header.get_shape()))
    except (OSError, SafetensorError) as error:
        raise unreadable(file, error) from None
    return found


def unreadable(file: Path, error: Exception) -> DataError:
    """Return one line for a safetensors file that cannot be read."""
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(describe_os_error(error, file))
    return DataError(f"{file} is damaged, or no safetensors file: {' '.join(str(error).split())}")
