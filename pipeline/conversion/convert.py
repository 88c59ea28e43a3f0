"""``backfeed convert``: a pretrained plain transformer becomes an architecture that feeds back."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from pipeline import __version__, models
from pipeline.conversion import folder
from pipeline.conversion.checkpoint import read_checkpoint
from pipeline.conversion.huggingface import CONFIG, read_folder
from pipeline.conversion.settings import target_settings
from pipeline.conversion.source import Source
from pipeline.errors import ConfigError, RunError
from pipeline.files import refuse_existing
from pipeline.models import ARCHITECTURES, Architecture, ArchitectureConfig
from pipeline.models.base import count_parameters
from pipeline.runs.checkpoints import DESCRIPTION
from pipeline.runs.folder import RunFolder


@dataclass(frozen=True)
class Converted:
    """What a conversion made.

    Attributes:
        folder: where it lies.
        config: settings of the model.
        parameters: how many parameters it has.
        drawn: how many of them the source did not have.
        remarks: what a user should know.
    """

    folder: Path
    config: ArchitectureConfig
    parameters: int
    drawn: int
    remarks: tuple[str, ...]


def convert(
    path: Path, output: Path, to: str, overrides: Sequence[str] = (), *, step: int | None = None, seed: int = 0
) -> Converted:
    """Make a folder from which a run of architecture ``to`` starts with the weights of a plain transformer.

    Args:
        path: a run folder, one of its checkpoints, or a folder of Hugging Face's.
        output: the folder to make.
        to: name of the architecture.
        overrides: ``model.key=value``, see ``target_settings``.
        step: of a run folder, the checkpoint to take; None takes the newest whole one.
        seed: of the weights that the source does not have.

    Raises:
        UserError: there is no such conversion, in one line; nothing has been written then.
    """
    ARCHITECTURES[to]
    refuse_existing(output)
    source = find_source(path, step)
    if source.origin["kind"] == "checkpoint" and to == source.config.architecture:
        raise ConfigError(
            f"{path} holds a {to} already; to train it on in a run of its own, set run.initial_weights={source.path}"
        )
    config = target_settings(source.config, to, overrides)
    model = make_model(source, config, seed)
    folder.write(
        output,
        model.state_dict(),
        config,
        source.tokenizer,
        source=source.describe(),
        seed=seed,
        overrides=list(overrides),
        document_token=source.document_token,
        versions={
            "backfeed": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "safetensors")},
        },
    )
    parameters = count_parameters(model)
    drawn = parameters - sum(tensor.numel() for name, tensor in model.state_dict().items() if name in source.tensors)
    return Converted(output, config, parameters, drawn, source.remarks)


def find_source(path: Path, step: int | None) -> Source:
    """Return the plain transformer at ``path``; see ``convert``."""
    if not path.is_dir():
        raise RunError(f"{path} is not a folder; give a run, one of its checkpoints, or a Hugging Face folder")
    if (path / DESCRIPTION).is_file() or RunFolder(path).exists():
        return read_checkpoint(path, step)
    if (path / folder.DESCRIPTION).is_file():
        raise RunError(f"{path} was made by a conversion itself; convert what it was made from")
    if not (path / CONFIG).is_file():
        raise RunError(
            f"{path} is neither a run folder (config.yaml), a checkpoint ({DESCRIPTION}) nor a Hugging Face folder "
            f"({CONFIG})"
        )
    if step is not None:
        raise ConfigError(f"--step {step} is of no use: {path} is a Hugging Face folder, which holds no steps")
    return read_folder(path)


def make_model(source: Source, config: ArchitectureConfig, seed: int) -> Architecture:
    """Return a model of ``config`` with the weights of ``source``, whose feedback changes nothing yet.

    FBT alone feeds back through what it draws (see ``Architecture.mute_feedback``): its plain pass is the source.
    """
    model = models.build(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    state = model.state_dict()
    for name in source.tensors:
        state[name].copy_(source.read(name))
    if model.feeds_back:
        model.mute_feedback()
    return model
