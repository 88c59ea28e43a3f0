"""Lightning's checkpoint, as files of a ``CheckpointStore``.

Weights go into ``model.safetensors``, all else (optimiser, schedules, loops, data position) into ``training.pt``, which
is read back with ``weights_only=True``: no code ever comes out of a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from safetensors.torch import load_file

from pipeline.errors import RunError
from pipeline.runs.checkpoints import TRAINING, WEIGHTS, CheckpointStore
from pipeline.runs.weights import save_weights
from pipeline.training import distributed
from pipeline.training.screen import say

PREFIX = "model."  # of the architecture within the LightningModule


class FolderCheckpointIO(CheckpointIO):
    """Saves into a folder that the caller made and will make visible.

    An error of the file system is kept in ``failure`` rather than raised: Lightning lets all ranks wait for the writer
    after it, and a writer that raised would leave them waiting.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` into the folder ``path``."""
        folder = Path(path)
        rest = {name: value for name, value in checkpoint.items() if name != "state_dict"}
        weights = checkpoint["state_dict"]
        try:
            save_weights({name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}, folder / WEIGHTS)
            torch.save(rest, folder / TRAINING)
        except OSError as error:
            self.failure = error
        except RuntimeError as error:  # torch's writer wraps the system's error and keeps its text alone
            self.failure = OSError(str(error).splitlines()[0])
        except Exception as error:
            if "SafetensorError" not in type(error).__name__:
                raise
            self.failure = OSError(str(error))

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the newest whole checkpoint of the store ``path`` back, the same one on every rank."""
        folder = distributed.first_decides(lambda: newest(Path(path)))
        checkpoint = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
        checkpoint["state_dict"] = {PREFIX + name: tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the folder ``path``."""
        shutil.rmtree(path, ignore_errors=True)


def newest(store: Path) -> Path:
    """Return the newest whole checkpoint's folder, or raise RunError."""
    found = CheckpointStore(store).newest_whole()
    if found is None:
        raise RunError(f"{store} holds no checkpoint")
    say(f"resuming from {found.path}")
    return found.path
