"""A checkpoint of our own as a source."""

from __future__ import annotations

from pathlib import Path

from pipeline import config_files
from pipeline.config import Config
from pipeline.conversion.settings import shapes
from pipeline.conversion.source import Source, stored
from pipeline.errors import ConfigError, RunError
from pipeline.models.transformer import TransformerConfig
from pipeline.runs import loading
from pipeline.runs.checkpoints import CONFIG, MODEL, TOKENIZER
from pipeline.runs.tensors import tensor_files


def read_checkpoint(path: Path, step: int | None) -> Source:
    """Return the plain transformer in a checkpoint, its hashes checked.

    Args:
        path: a run folder, or the folder of one checkpoint.
        step: of a run folder, the checkpoint to take; None takes the newest whole one.

    Raises:
        UserError: there is no whole checkpoint, or it holds something else.
    """
    found = loading.find(path, step)
    description = found.describe()
    config = config_files.load(Config, [found.path / CONFIG], []).model
    if not isinstance(config, TransformerConfig):
        raise ConfigError(
            f"{path} holds a model of architecture {config.architecture}, which feeds back already; a conversion "
            "starts from a plain transformer"
        )
    files = tensor_files(found.path, MODEL)
    tensors = {name: tensor for file in files for name, tensor in stored(found.path / file).items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes(config):
        raise RunError(f"{found.path}: weights and configuration do not fit each other")
    return Source(
        path=found.path,
        origin={"kind": "checkpoint", "step": found.step},
        config=config,
        tokenizer=(found.path / TOKENIZER).read_bytes(),
        document_token=description["tokenizer"]["document_token"],
        tensors={name: (tensor,) for name, tensor in tensors.items()},
        files={name: found.path / name for name in (CONFIG, TOKENIZER, *files)},
    )
