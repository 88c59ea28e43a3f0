"""The folder that a conversion makes: whole or invisible.

model.safetensors  the weights, float32
tokenizer.json     the tokenizer, to prepare data with
model.yaml         a layer of a run's configuration: the model, and that training starts from these weights
conversion.json    where they came from, versions, and the hashes of the weights and the tokenizer
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from pipeline import config_files
from pipeline.config_files.reader import plain
from pipeline.conversion.settings import Layer, RunLayer
from pipeline.errors import RunError
from pipeline.files import fsync_file, fsync_folder, refuse_existing, sha256_file, write_atomically
from pipeline.models import ArchitectureConfig
from pipeline.runs.checkpoints import SEAL, TOKENIZER, WEIGHTS, seal
from pipeline.runs.weights import save_weights

DESCRIPTION = "conversion.json"
LAYER = "model.yaml"
FORMAT = 1

_HEADER = """\
# Made by `backfeed convert`; conversion.json beside it says from what. Train from these weights with
#   backfeed train {path} RECIPE.yaml data.path=...
# where RECIPE.yaml holds all but the model. Paths are relative to the folder that you stand in.
"""


def write(
    path: Path, weights: Mapping[str, Tensor], config: ArchitectureConfig, tokenizer: bytes, **record: Any
) -> None:
    """Write a converted folder aside, then make it visible by one rename; what fails leaves nothing behind.

    Args:
        path: the folder to make, and its parents.
        weights: state dict of the model.
        config: settings of the model.
        tokenizer: content of ``tokenizer.json``.
        **record: plain values for ``conversion.json``.
    """
    refuse_existing(path)
    made = [each for each in path.parents if not each.exists()]
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        write_weights(weights, aside / WEIGHTS)
        (aside / TOKENIZER).write_bytes(tokenizer)
        layer = config_files.to_yaml(Layer(RunLayer(str(path)), config))
        (aside / LAYER).write_text(_HEADER.format(path=json.dumps(str(path / LAYER))[1:-1]) + layer)
        files = {}
        for file in sorted(aside.iterdir()):
            fsync_file(file)
            if file.name != LAYER:  # which is the user's to edit
                files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
        content = {"format": FORMAT, **record, "model": plain(config), "files": files}
        write_atomically(aside / DESCRIPTION, json.dumps({**content, SEAL: seal(content)}, indent=1) + "\n")
        fsync_folder(aside)
        refuse_existing(path)  # rename would replace an empty folder
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        for each in made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                each.rmdir()
        raise
    fsync_folder(path.parent)


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write the weights; raise RunError where the system does not let it."""
    try:
        save_weights(weights, path)
    except SafetensorError as error:  # it wraps the system's error and keeps its text alone
        raise RunError(f"{path.name} could not be written: {' '.join(str(error).split())}") from None


def read_description(path: Path) -> dict[str, Any]:
    """Return what was recorded of a conversion, after the size and hash of every file has been compared.

    Raises:
        RunError: it is damaged.
    """
    try:
        found = json.loads((path / DESCRIPTION).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {DESCRIPTION} cannot be read ({error}); convert again") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RunError(f"{path}: {DESCRIPTION} is not of format {FORMAT}; use the version that wrote it")
    if found.pop(SEAL, None) != seal(found):
        raise RunError(f"{path}: {DESCRIPTION} was changed after it was written; convert again")
    for name, expected in found["files"].items():
        file = path / name
        if not file.is_file():
            raise RunError(f"{path}: {name} is missing; convert again")
        if file.stat().st_size != expected["bytes"] or sha256_file(file) != expected["sha256"]:
            raise RunError(f"{file} does not match its hash; it is damaged: convert again")
    return found
