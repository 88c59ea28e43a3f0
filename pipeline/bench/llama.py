"""A transformer of ours that is a Llama, and its weights under the names of other code.

Without QK-norm, with a head of its own, ours is what others call a Llama: RMSNorm, rotary positions, SwiGLU, no biases.
So another implementation of the same size can be given the same weights, and must compute the same.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models import Architecture
from pipeline.models.stack import StackArchitecture
from pipeline.models.transformer import TransformerConfig

ROPE_BASE, NORM_EPS = 10_000.0, 1e-6


@dataclass(frozen=True)
class Size:
    """Size of a Llama.

    Attributes:
        layers: blocks.
        width: width of the residual stream.
        heads: attention heads.
        hidden: hidden width of SwiGLU.
        vocab_size: rows of the embedding and of the head.
        rows: rows of a training step.
        length: inputs of a row.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocab_size: int
    rows: int
    length: int


SIZES = {
    "17m": Size(layers=6, width=384, heads=6, hidden=1024, vocab_size=8192, rows=4, length=256),
    "1m": Size(layers=4, width=128, heads=4, hidden=384, vocab_size=1024, rows=16, length=64),
    "tiny": Size(layers=2, width=16, heads=2, hidden=48, vocab_size=32, rows=2, length=8),
}


def config(size: Size) -> TransformerConfig:
    """Return our settings."""
    return TransformerConfig(
        "transformer",
        vocab_size=size.vocab_size,
        width=size.width,
        heads=size.heads,
        layers=size.layers,
        ffn_width=size.hidden,
        qk_norm=False,
        tied_head=False,
        norm_eps=NORM_EPS,
        rope_base=ROPE_BASE,
    )


@dataclass(frozen=True)
class Block:
    """Weights of one block; matrices are [out, in]."""

    attention_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """Weights of a Llama.

    Attributes:
        embedding: [V, width].
        blocks: from the first to the last.
        norm: of the output.
        head: [V, width].
    """

    embedding: Tensor
    blocks: tuple[Block, ...]
    norm: Tensor
    head: Tensor


def weights(model: Architecture) -> Weights:
    """Return the weights of a transformer that ``config`` describes."""
    assert isinstance(model, StackArchitecture)
    state = {name: each.detach() for name, each in model.state_dict().items()}
    blocks = []
    for layer in range(model.settings.layers):
        own = {name.removeprefix(f"blocks.{layer}."): each for name, each in state.items()}
        query, key, value = own["attention.query_key_value.weight"].chunk(3)
        gate, up = own["ffn.gate_up.weight"].chunk(2)
        blocks.append(
            Block(
                attention_norm=own["attention_norm.weight"],
                query=query,
                key=key,
                value=value,
                output=own["attention.output.weight"],
                ffn_norm=own["ffn_norm.weight"],
                gate=gate,
                up=up,
                down=own["ffn.down.weight"],
            )
        )
    return Weights(
        state["embedding.weight"], tuple(blocks), state["readout_layer.norm.weight"], state["readout_layer.head.weight"]
    )


def hugging_face(model: Architecture) -> Any:
    """Return the Llama of Hugging Face's transformers with the weights of a model of ours.

    Raises:
        ImportError: transformers is not installed.
    """
    transformers = importlib.import_module("transformers")
    ours = model.config
    assert isinstance(ours, TransformerConfig)
    made = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=ours.vocab_size,
            hidden_size=ours.width,
            intermediate_size=ours.hidden_width,
            num_hidden_layers=ours.layers,
            num_attention_heads=ours.heads,
            num_key_value_heads=ours.heads,
            max_position_embeddings=4096,
            rms_norm_eps=NORM_EPS,
            rope_theta=ROPE_BASE,
            tie_word_embeddings=False,
            attention_bias=False,
            mlp_bias=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            attn_implementation="sdpa",
        )
    )
    found = weights(model)
    state = {
        "model.embed_tokens.weight": found.embedding,
        "model.norm.weight": found.norm,
        "lm_head.weight": found.head,
    }
    for layer, block in enumerate(found.blocks):
        names = {
            "input_layernorm": block.attention_norm,
            "self_attn.q_proj": block.query,
            "self_attn.k_proj": block.key,
            "self_attn.v_proj": block.value,
            "self_attn.o_proj": block.output,
            "post_attention_layernorm": block.ffn_norm,
            "mlp.gate_proj": block.gate,
            "mlp.up_proj": block.up,
            "mlp.down_proj": block.down,
        }
        state.update({f"model.layers.{layer}.{name}.weight": each for name, each in names.items()})
    load(made, state)
    return made


def load(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy weights into a module that must want exactly these: no fewer, no more."""
    with torch.no_grad():
        module.load_state_dict(state, strict=True)
