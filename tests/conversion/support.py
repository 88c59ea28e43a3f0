"""Sources to convert from: a checkpoint made on the spot, and folders that transformers itself has written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline import config_files, models
from pipeline.conversion import folder
from pipeline.conversion.convert import convert
from pipeline.conversion.settings import read_model
from pipeline.data.tokenizer import Tokenizer
from pipeline.models import ARCHITECTURES, Architecture, ArchitectureConfig
from pipeline.runs.checkpoints import CheckpointStore
from tests.models.cases import make_model
from tests.support import WORDS, run_config

TARGETS = ("crt", "fbt", "lrt")


def write_checkpoint(path: Path, config: ArchitectureConfig, *, seed: int = 0) -> tuple[Path, Architecture]:
    """Write the checkpoint of a model with lively float32 weights; return its folder, and the model."""
    model = make_model(ARCHITECTURES[config.architecture], config, seed, torch.float32)
    tokenizer = Tokenizer.bytes_tokenizer()
    run = replace(run_config(path / "runs", path / "data", architecture="transformer"), model=config)
    store = CheckpointStore(path / "checkpoints")
    description = {"sha256": tokenizer.sha256, "document_token": tokenizer.document_token}
    with store.writing(3, solver={}, tokenizer=description, data="f" * 64) as aside:
        config_files.save(run, aside / "config.yaml")
        (aside / "tokenizer.json").write_bytes(tokenizer.content)
        save_file(
            {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, aside / "model.safetensors"
        )
    return store.at(3).path, model


def converted(source: Path, output: Path, to: str, *overrides: str) -> Architecture:
    """Convert, and return the model as a run would load it."""
    convert(source, output, to, overrides)
    return load(output)


def load(path: Path) -> Architecture:
    """Return the model of a converted folder."""
    model = models.build(read_model(folder.read_description(path)["model"]))
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.eval()


def trained_tokenizer() -> Tokenizer:
    """Return a small byte-level BPE."""
    return Tokenizer.train([" ".join(WORDS)] * 4, 300)


def hugging_face_model(family: str, *, seed: int = 0, **settings: Any) -> Any:
    """Return a small model of a class of transformers, its weights lively."""
    import transformers

    sizes = {
        "vocab_size": 307,
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * drawn)
            elif name.endswith(("embed_tokens.weight", "bias")):
                parameter.copy_(drawn)
            else:
                parameter.copy_(drawn / parameter.shape[1] ** 0.5)
    return model


def save_hugging_face(model: Any, path: Path, **options: Any) -> Path:
    """Write a folder as transformers does, with a tokenizer."""
    model.save_pretrained(path, **options)
    (path / "tokenizer.json").write_bytes(trained_tokenizer().content)
    return path


def hugging_face_logits(path: Path, tokens: Tensor) -> Tensor:
    """Return what transformers makes of a folder in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return model(input_ids=tokens).logits


def plain_logits(model: Architecture, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
    """Return the logits of the pass without feedback."""
    from pipeline.solvers import build
    from tests.models.cases import solver_config

    with torch.no_grad():
        return model.readout(build(solver_config("parallel")).run(model, tokens, starts).states)
