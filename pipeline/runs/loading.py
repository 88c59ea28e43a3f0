"""A trained model, out of a run folder or of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import config_files, models, solvers
from pipeline.choices import chosen_by
from pipeline.config import Config, solver_configs
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import ConfigError, RunError
from pipeline.models import ARCHITECTURES, Architecture
from pipeline.runs.checkpoints import CONFIG, DESCRIPTION, MODEL, TOKENIZER, Checkpoint
from pipeline.runs.folder import RunFolder
from pipeline.runs.tensors import TensorReader
from pipeline.solvers import SOLVERS, Solver, SolverConfig


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint, loaded for inference.

    Attributes:
        config: configuration of its run.
        checkpoint: where it lies.
        description: what was recorded with it.
        model: architecture with its weights, in evaluation mode.
        solver: as in the checkpoint's last training step, or as asked for.
        training_solver: as in the checkpoint's last training step.
        tokenizer: its tokenizer.
    """

    config: Config
    checkpoint: Checkpoint
    description: dict[str, Any]
    model: Architecture
    solver: Solver
    training_solver: Solver
    tokenizer: Tokenizer


def load(
    path: Path, *, step: int | None = None, device: torch.device | str = "cpu", overrides: Sequence[str] = ()
) -> TrainedModel:
    """Load a trained model after its hashes have been checked.

    Args:
        path: a run folder, or the folder of one checkpoint.
        step: of a run folder, the checkpoint to take; None takes the newest whole one.
        device: where the weights go.
        overrides: ``solver.key=value``: another solver, or other settings of it, than in training.

    Raises:
        RunError: no whole checkpoint is there, or it does not fit its configuration.
        ConfigError: an override is none of the solver's, or does not fit.
    """
    checkpoint = find(path, step)
    description = checkpoint.describe()
    config = config_files.load(Config, [checkpoint.path / CONFIG], [])
    model = models.build(config.model).to(device).eval()
    try:
        model.load_state_dict(TensorReader(checkpoint.path, MODEL))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{checkpoint.path}: weights and configuration do not fit each other: {reason}") from None
    trained = solver_of(config, description["solver"], ())
    solver = solver_of(config, description["solver"], overrides) if overrides else trained
    tokenizer = Tokenizer.from_file(checkpoint.path / TOKENIZER, description["tokenizer"]["document_token"])
    return TrainedModel(config, checkpoint, description, model, solver, trained, tokenizer)


@dataclass
class SolverSection:
    """The section of a run's configuration that may be another than in training."""

    solver: SolverConfig = chosen_by(SolverConfig, "name", solver_configs)
    """How the recurrence is evaluated."""


def solver_of(config: Config, settings: Mapping[str, Any], overrides: Sequence[str]) -> Solver:
    """Return a run's solver with the settings of a checkpoint, unless ``overrides`` say otherwise; see ``load``.

    Args:
        config: the run.
        settings: values of settings that may change over a run.
        overrides: ``solver.key=value``; another solver begins with its defaults.
    """
    for each in overrides:
        if not each.startswith("solver.") or "=" not in each:
            raise ConfigError(f"{each!r} is no setting of the solver; here only solver.key=value can be set")
    training_only = SOLVERS[config.solver.name].training_only
    current = {name: value for name, value in settings.items() if name not in training_only}
    kept = {**asdict(config.solver.evaluated()), **current}
    names = [each.removeprefix("solver.name=") for each in overrides if each.startswith("solver.name=")]
    if names and names[-1] != config.solver.name:
        kept = {}
    given = [f"solver.{name}={config_files.dump(value, flow=True)}" for name, value in kept.items()]
    chosen = config_files.load(SolverSection, [], [*given, *overrides]).solver
    SOLVERS[chosen.name].check_fits(chosen, ARCHITECTURES[config.model.architecture])
    for name, value in asdict(chosen.evaluated()).items():
        if getattr(chosen, name) != value:
            raise ConfigError(f"solver.{name} belongs to training; it has no use here")
    return solvers.build(chosen)


def find(path: Path, step: int | None) -> Checkpoint:
    """Return the checkpoint that ``path`` and ``step`` mean, its hashes checked; see ``load``."""
    if not path.is_dir():
        raise RunError(f"{path} is not a folder; give a run folder or one of its checkpoints")
    if (path / DESCRIPTION).is_file():
        found = int(Checkpoint(path, 0).verify()["step"])
        if step is not None and step != found:
            raise RunError(f"{path} is the checkpoint of step {found}, not {step}; give the run folder instead")
        return Checkpoint(path, found)
    folder = RunFolder(path)
    if not folder.exists():
        raise RunError(f"{path} is neither a run folder (config.yaml) nor a checkpoint ({DESCRIPTION})")
    if step is not None:
        chosen = folder.checkpoints.at(step)
        chosen.verify()
        return chosen
    newest = folder.checkpoints.newest_whole()
    if newest is None:
        raise RunError(f"{path} has no checkpoint yet; train it first")
    return newest
