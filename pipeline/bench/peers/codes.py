"""The plain transformers of other codebases, with the weights of one of ours; see ``llama``."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.bench import llama
from pipeline.models import Architecture
from pipeline.models.transformer import TransformerConfig


@dataclass(frozen=True)
class Code:
    """A codebase.

    Attributes:
        distribution: its name on the package index.
        make: returns its module for a model of ours, with the same weights.
        logits: maps its module and tokens [rows, n] to logits [rows, n, V].
    """

    distribution: str
    make: Callable[[Architecture], nn.Module]
    logits: Callable[[Any, Tensor], Tensor]


def litgpt(model: Architecture) -> nn.Module:
    """Return litgpt's GPT."""
    ours, found = model.config, llama.weights(model)
    assert isinstance(ours, TransformerConfig)
    package = importlib.import_module("litgpt")
    made: nn.Module = package.GPT(
        package.Config(
            name="llama",
            block_size=4096,
            n_layer=ours.layers,
            n_embd=ours.width,
            n_head=ours.heads,
            vocab_size=ours.vocab_size,
            padded_vocab_size=ours.vocab_size,
            intermediate_size=ours.hidden_width,
            norm_class_name="RMSNorm",
            norm_eps=llama.NORM_EPS,
            mlp_class_name="LLaMAMLP",
            rotary_percentage=1.0,
            rope_base=int(llama.ROPE_BASE),
            parallel_residual=False,
            bias=False,
        )
    )
    state = {"transformer.wte": found.embedding, "transformer.ln_f": found.norm, "lm_head": found.head}
    for layer, block in enumerate(found.blocks):
        names = {
            "norm_1": block.attention_norm,
            "attn.qkv": torch.cat([block.query, block.key, block.value]),
            "attn.proj": block.output,
            "norm_2": block.ffn_norm,
            "mlp.fc_1": block.gate,
            "mlp.fc_2": block.up,
            "mlp.proj": block.down,
        }
        state.update({f"transformer.h.{layer}.{name}": each for name, each in names.items()})
    llama.load(made, {f"{name}.weight": each for name, each in state.items()})
    return made


def olmo_core(model: Architecture) -> nn.Module:
    """Return OLMo-core's Transformer."""
    ours, found = model.config, llama.weights(model)
    assert isinstance(ours, TransformerConfig)
    with contextlib.redirect_stderr(io.StringIO()):  # it tells of kernels for GPUs that it does not find
        package = importlib.import_module("olmo_core.nn.transformer")
        feed_forward = importlib.import_module("olmo_core.nn.feed_forward")
    config = package.TransformerConfig.llama_like(
        d_model=ours.width,
        vocab_size=ours.vocab_size,
        n_layers=ours.layers,
        n_heads=ours.heads,
        layer_norm_eps=llama.NORM_EPS,
        rope_theta=int(llama.ROPE_BASE),
        feed_forward=feed_forward.FeedForwardConfig(hidden_size=ours.hidden_width, bias=False),
    )
    made: nn.Module = config.build(init_device="cpu")
    state = {"embeddings": found.embedding, "lm_head.norm": found.norm, "lm_head.w_out": found.head}
    for layer, block in enumerate(found.blocks):
        names = {
            "attention_norm": block.attention_norm,
            "attention.w_q": block.query,
            "attention.w_k": block.key,
            "attention.w_v": block.value,
            "attention.w_out": block.output,
            "feed_forward_norm": block.ffn_norm,
            "feed_forward.w1": block.gate,
            "feed_forward.w3": block.up,
            "feed_forward.w2": block.down,
        }
        state.update({f"blocks.{layer}.{name}": each for name, each in names.items()})
    llama.load(made, {f"{name}.weight": each for name, each in state.items()})
    return made


CODES = (
    Code("litgpt", litgpt, lambda module, tokens: module(tokens)),
    Code("ai2-olmo-core", olmo_core, lambda module, tokens: module(tokens)),
    Code("transformers", llama.hugging_face, lambda module, tokens: module(tokens, use_cache=False).logits),
)
