"""What all strategies share: a run is saved and resumed by parameter, never as one rank holds it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from torch.optim import Optimizer

from pipeline.errors import RunError
from pipeline.runs.checkpoints import CheckpointStore
from pipeline.training import distributed
from pipeline.training.screen import say
from pipeline.training.state import ReplicatedState, TrainingState
from pipeline.training.state_files import SavedState, StateFiles

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from pipeline.training.module import PretrainingModule

    Base = Strategy
else:
    Base = object


class Resumable(Base):
    """Part of a strategy, ahead of Lightning's own.

    Lightning hands over what it keeps itself (loops, schedules, callbacks); weights and the optimiser's states are
    taken from ``state``, and go to files of ``StateFiles``.
    """

    files: StateFiles | None = None
    """This rank's files of the checkpoint that was saved last: still to be written, if a copy was asked for."""
    copies: bool = False
    """Whether ``save_checkpoint`` takes a copy, and leaves it to others to write it."""
    _saved: SavedState | None = None

    @property
    def module(self) -> PretrainingModule:
        """The module that is trained."""
        return cast("PretrainingModule", self.lightning_module)

    @property
    def state(self) -> TrainingState:
        """Weights and states of the optimiser; once the strategy is set up."""
        return ReplicatedState(dict(self.module.model.named_parameters()), self.optimizers[0])

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which every rank has all weights, for passes outside a training step."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the precision of passes outside a training step."""
        return self.precision_plugin.forward_context()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether states are restored where they will be used; always."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether ``load_optimizer_state_dict`` is called; always."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: weights go from ``state`` to files one at a time."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the settings of the optimiser's groups; its moments go to files one at a time."""
        return {"groups": self.state.groups()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write this rank's files into the folder ``filepath``, or copy what is to be written; every rank calls it."""
        self.files = StateFiles(self.state, checkpoint, Path(filepath), self.copies)
        if not self.copies:
            self.files.write()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the newest whole checkpoint of the store ``checkpoint_path``, the same one on every rank."""
        folder = distributed.first_decides(lambda: newest(Path(checkpoint_path)))
        self._saved = SavedState(folder)
        return self._saved.rest()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Set the weights."""
        assert self._saved is not None
        self._saved.restore_weights(self.state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Set what the optimiser keeps."""
        assert self._saved is not None
        self._saved.restore_moments(self.state, checkpoint["optimizer_states"][0]["groups"])
        self._saved = None

    def remove_checkpoint(self, filepath: Any) -> None:
        """Not called: checkpoints are removed by their store."""
        raise NotImplementedError


def resumable(trainer: pl.Trainer) -> Resumable:
    """Return the trainer's strategy."""
    found = trainer.strategy
    assert isinstance(found, Resumable)
    return found


def newest(store: Path) -> Path:
    """Return the newest whole checkpoint's folder, or raise RunError."""
    found = CheckpointStore(store).newest_whole()
    if found is None:
        raise RunError(f"{store} holds no checkpoint")
    say(f"resuming from {found.path}")
    return found.path
