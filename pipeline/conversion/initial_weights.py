"""Weights that a run starts from, instead of drawing them (``run.initial_weights``)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pipeline import config_files
from pipeline.config import Config
from pipeline.conversion import folder
from pipeline.conversion.settings import WITHOUT_EFFECT, changed, misfit, read_model
from pipeline.conversion.vocabulary import vocabulary
from pipeline.data.manifest import TOKENIZER_FILE, Manifest
from pipeline.errors import ConfigError, RunError
from pipeline.models import ArchitectureConfig
from pipeline.runs.checkpoints import CONFIG, DESCRIPTION, TOKENIZER, Checkpoint

KEY = "run.initial_weights"


@dataclass(frozen=True)
class InitialWeights:
    """A folder with weights: made by a conversion, or a checkpoint.

    Attributes:
        path: the folder, whose hashes hold.
        config: settings of the model that they are of.
    """

    path: Path
    config: ArchitectureConfig


def check(config: Config, manifest: Manifest) -> tuple[Path, list[str]]:
    """Check the weights that ``run.initial_weights`` names against the run.

    Args:
        config: the run.
        manifest: its data.

    Returns:
        Their folder, and what a user should know: settings and a tokenizer that fit, but are not those the weights were
        trained with.

    Raises:
        UserError: there are no such weights, or they do not fit the run.
    """
    assert config.run.initial_weights is not None
    found = find(Path(config.run.initial_weights))
    return found.path, [*check_tokenizer(found, manifest), *check_settings(found, config.model)]


def find(path: Path) -> InitialWeights:
    """Return the weights at ``path``, their hashes checked."""
    if not path.is_dir():
        raise RunError(f"{KEY} is {path}, and there is no such folder; if it was moved, say where to")
    if (path / folder.DESCRIPTION).is_file():
        return InitialWeights(path, read_model(folder.read_description(path)["model"]))
    if (path / DESCRIPTION).is_file():
        Checkpoint(path, 0).verify()
        return InitialWeights(path, config_files.load(Config, [path / CONFIG], []).model)
    raise RunError(
        f"{KEY} is {path}, which is neither a folder that backfeed convert made ({folder.DESCRIPTION}) nor a "
        f"checkpoint ({DESCRIPTION})"
    )


def check_settings(found: InitialWeights, model: ArchitectureConfig) -> list[str]:
    """Return the settings under which the weights compute something else than before, in one line.

    Raises:
        ConfigError: the run's model is another one, or of another size.
    """
    if model.architecture != found.config.architecture:
        raise ConfigError(
            f"model.architecture is {model.architecture}, but the weights in {found.path} ({KEY}) are those of "
            f"architecture {found.config.architecture}"
        )
    differing = changed(found.config, model)
    wrong = misfit(found.config, model)
    if wrong is not None:
        old, new = differing[wrong]
        raise ConfigError(f"model.{wrong} is {new}, but in the weights in {found.path} ({KEY}) it is {old}")
    others = [
        f"model.{key} is {new} and was {old}" for key, (old, new) in differing.items() if key not in WITHOUT_EFFECT
    ]
    return [f"the weights in {found.path} were not trained as this run is: {', '.join(others)}"] if others else []


def check_tokenizer(found: InitialWeights, manifest: Manifest) -> list[str]:
    """Return one line where the data's tokenizer is another file with the same tokens.

    Raises:
        ConfigError: its tokens are others.
    """
    own, data = found.path / TOKENIZER, manifest.folder / TOKENIZER_FILE
    content = own.read_bytes()
    if hashlib.sha256(content).hexdigest() == manifest.tokenizer.sha256:
        return []
    if vocabulary(content, str(own)) != vocabulary(data.read_bytes(), str(data)):
        raise ConfigError(
            f"data.path is {manifest.folder}, whose tokenizer is not that of the weights in {found.path} ({KEY}); "
            f"prepare the data with tokenizer.kind=file tokenizer.path={own}"
        )
    return [f"{data} and {own} are not the same file; their tokens are, but texts may be split in other ways"]
