"""Weights as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, readable by whoever may read the rest of the folder.

    Raises:
        SafetensorError: the system's error, of which its text alone is left.
    """
    path.touch()
    mode = path.stat().st_mode  # safetensors would leave the file to its owner alone
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
    path.chmod(mode)
