"""A run's state as files of a checkpoint, each written by one rank.

    model.safetensors      weights, float32
    optimizer.safetensors  what the optimiser keeps of each parameter: ``<parameter>/<state>``
    training.pt            all else (loops, schedules, data position, the optimiser's settings); small, of rank 0

Of the first two every rank writes its share: with several ranks, ``model-00001-of-00002.safetensors`` and an index. No
code ever comes out of a checkpoint: training.pt is read back with ``weights_only=True``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import RunError
from pipeline.files import fsync_file, sha256_file
from pipeline.runs.checkpoints import MODEL, OPTIMIZER, TRAINING
from pipeline.runs.tensors import INDEX_SUFFIX, TensorReader, TensorShape, TensorWriter, file_name, shares, write_index
from pipeline.training import distributed
from pipeline.training.state import TrainingState


@dataclass(frozen=True)
class Layout:
    """Who writes what.

    Attributes:
        rank: this rank.
        files: for each of ``model`` and ``optimizer``, what each rank's file holds, in order.
    """

    rank: int
    files: Mapping[str, list[dict[str, TensorShape]]]

    @classmethod
    def of(cls, state: TrainingState) -> Layout:
        """Divide the parameters among the ranks, so that all write about as much."""
        shapes = {name: TensorShape(tuple(shape)) for name, shape in state.shapes.items()}
        kept = {name: state.moment_shapes(name) for name in shapes}
        sizes = {
            name: each.bytes + sum(moment.bytes for moment in kept[name].values()) for name, each in shapes.items()
        }
        parts = shares(sizes, distributed.ranks())
        model = [{name: shapes[name] for name in part} for part in parts]
        optimizer = [{f"{name}/{key}": each for name in part for key, each in kept[name].items()} for part in parts]
        return cls(distributed.rank(), {MODEL: model, OPTIMIZER: optimizer})

    @property
    def ranks(self) -> int:
        """Ranks that write."""
        return len(self.files[MODEL])

    def own(self, stem: str) -> dict[str, TensorShape]:
        """Return what this rank's file holds."""
        return self.files[stem][self.rank]

    def file(self, stem: str, rank: int | None = None) -> str:
        """Return the name of a rank's file."""
        return file_name(stem, self.rank if rank is None else rank, self.ranks)

    def tensors(self, state: TrainingState) -> Iterator[tuple[str, str, Tensor]]:
        """Yield file, name and value of what this rank writes; every rank must go to the end, and at once."""
        own = self.own(MODEL)
        for name in state.shapes:  # some states are put together by all ranks
            weight, moments = state.weight(name), state.moments(name)
            if name in own:
                yield MODEL, name, weight.float()
                for key, value in moments.items():
                    yield OPTIMIZER, f"{name}/{key}", value
        state.close()


class StateFiles:
    """This rank's files of a checkpoint.

    Args:
        state: the run's; every rank calls this at once.
        rest: what Lightning keeps.
        folder: where the files go.
        copied: take a copy of the state on the host first; only then may ``write`` be called from another thread, or
            later.

    Attributes:
        failure: why they could not be written; None where they were. It is kept rather than raised, since the other
            ranks may be in the middle of putting tensors together, and a rank that raised would leave them waiting.
        files: size and hash of each, as ``checkpoint.json`` has them.
    """

    def __init__(self, state: TrainingState, rest: Mapping[str, Any], folder: Path, copied: bool = False) -> None:
        self.failure: OSError | None = None
        self.files: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._layout = Layout.of(state)
        self._tensors = self._layout.tensors(state)
        if copied:
            taken = [(stem, name, value.to("cpu", copy=True)) for stem, name, value in self._tensors]
            self._tensors = iter(taken)
        self._rest: bytes | None = None
        if self._layout.rank == 0:
            content = io.BytesIO()
            torch.save({name: value for name, value in rest.items() if name != "state_dict"}, content)
            self._rest = content.getvalue()

    def write(self) -> None:
        """Write, flush and hash the files."""
        layout = self._layout
        writers: dict[str, TensorWriter] = {}
        try:
            for stem in layout.files:
                writers[stem] = TensorWriter(self._folder / layout.file(stem), layout.own(stem))
            for stem, name, value in self._tensors:
                writers[stem].write(name, value)
            for stem, writer in writers.items():
                writer.close()
                self.files[layout.file(stem)] = {"bytes": writer.size, "sha256": writer.sha256}
            if self._rest is not None:
                self._write_rest(self._rest)
        except OSError as error:
            self.failure = error
            for writer in writers.values():
                writer.abandon()
            for _ in self._tensors:  # the other ranks go on
                pass

    def _write_rest(self, content: bytes) -> None:
        layout = self._layout
        written = [self._folder / TRAINING]
        written[0].write_bytes(content)
        if layout.ranks > 1:
            for stem, parts in layout.files.items():
                written.append(self._folder / f"{stem}{INDEX_SUFFIX}")
                write_index(written[-1], {layout.file(stem, rank): each for rank, each in enumerate(parts)})
        for path in written:
            fsync_file(path)
            self.files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


class SavedState:
    """What a checkpoint holds of a run.

    Args:
        folder: of the checkpoint, its hashes checked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def rest(self) -> dict[str, Any]:
        """Return what Lightning keeps: loops, schedules, callbacks."""
        found: dict[str, Any] = torch.load(self._folder / TRAINING, map_location="cpu", weights_only=True)
        return {"state_dict": {}, **found}

    def restore_weights(self, state: TrainingState) -> None:
        """Set the weights; RunError if they are those of another model."""
        set_weights(state, TensorReader(self._folder, MODEL), self._folder)

    def restore_moments(self, state: TrainingState, groups: list[dict[str, Any]]) -> None:
        """Set what the optimiser keeps, and its settings."""
        reader = TensorReader(self._folder, OPTIMIZER)
        keys: dict[str, list[str]] = {}
        for full in reader:
            name, _, key = full.rpartition("/")
            keys.setdefault(name, []).append(key)
        state.set_moments({name: _Moments(reader, name, keys.get(name, [])) for name in state.shapes})
        state.set_groups(groups)


class _Moments(Mapping[str, Tensor]):
    """What the optimiser kept of a parameter, each read when it is asked for."""

    def __init__(self, reader: TensorReader, name: str, keys: list[str]) -> None:
        self._reader, self._name, self._keys = reader, name, keys

    def __getitem__(self, key: str) -> Tensor:
        return self._reader[f"{self._name}/{key}"]

    def __iter__(self) -> Any:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def set_weights(state: TrainingState, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Set all weights of a run from those in a folder; RunError if they are those of another model."""
    if set(weights) != set(state.shapes):
        odd = sorted(set(weights) ^ set(state.shapes))[0]
        raise RunError(f"{folder}: weights and configuration do not fit each other: {odd}")
    for name, shape in state.shapes.items():
        value = weights[name]
        if value.shape != shape:
            raise RunError(f"{folder}: {name} is of shape {list(value.shape)}, not {list(shape)}")
        state.set_weight(name, value)
    state.commit()
