"""Slow references for the architectures, written from the papers' equations and not from the code.

All is plain: one document at a time, one position after the other, one head after the other, every softmax over an
explicit list of the positions it may see. No masks, no memories, no batches: where the equations say k_1 .. k_t, here
is a list. Weights are read by name from a state dict; this file therefore also pins their layout:

    query_key_value   rows: query heads, then key heads, then value heads, each head_dim rows
    gate_up           rows: gate, then up
    memory.key_value  rows: key heads, then value heads
    merge.state       rows: the state's half of the gate W_g, then W_s;  W_g = [entry_gate, that half]

Everything is differentiable, so that ordinary autograd of these functions is the reference for gradients as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NORM_EPS = 1e-6  # of every RMSNorm

Weights = Mapping[str, Tensor]


# ---------------------------------------------------------------- one position, one head


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Return x / rms(x) * weight for one vector."""
    return x / torch.sqrt((x * x).sum() / len(x) + NORM_EPS) * weight


def rotate(x: Tensor, position: int, base: float) -> Tensor:
    """Rotate each pair (x_j, x_{j + half}) of one head by position * base^(-j / half)."""
    half = len(x) // 2
    angles = [position * base ** (-j / half) for j in range(half)]
    cos = torch.tensor([math.cos(angle) for angle in angles], dtype=x.dtype)
    sin = torch.tensor([math.sin(angle) for angle in angles], dtype=x.dtype)
    first, second = x[:half], x[half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos])


def softmax_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attend with one query head to the keys and values listed."""
    scores = torch.stack([(query * key).sum() / math.sqrt(len(query)) for key in keys])
    weights = torch.exp(scores - scores.max())
    weights = weights / weights.sum()
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def swiglu(x: Tensor, weights: Weights, name: str) -> Tensor:
    """Return down(silu(gate x) * up x)."""
    gate_up = weights[f"{name}.gate_up.weight"] @ x
    hidden = len(gate_up) // 2
    gate, up = gate_up[:hidden], gate_up[hidden:]
    return weights[f"{name}.down.weight"] @ (gate / (1 + torch.exp(-gate)) * up)


def split_heads(x: Tensor, head_dim: int) -> list[Tensor]:
    return [x[start : start + head_dim] for start in range(0, len(x), head_dim)]


# ---------------------------------------------------------------- layers over the positions of a document


@dataclass
class Shape:
    """What of a configuration the equations need, derived here anew."""

    heads: int
    kv_heads: int
    head_dim: int
    base: float
    qk_norm: bool

    @classmethod
    def of(cls, config) -> Shape:
        return cls(
            heads=config.heads,
            kv_heads=config.heads if config.kv_heads is None else config.kv_heads,
            head_dim=config.width // config.heads if config.head_dim is None else config.head_dim,
            base=config.rope_base,
            qk_norm=config.qk_norm,
        )

    def turned(self, x: Tensor, norm: Tensor | None, position: int) -> list[Tensor]:
        """Split into heads, QK-norm each where there is a norm, rotate each."""
        heads = split_heads(x, self.head_dim)
        if norm is not None:
            heads = [rms(head, norm) for head in heads]
        return [rotate(head, position, self.base) for head in heads]


class SelfAttention:
    """One layer of self-attention; positions are taken in order and every position's keys and values are kept."""

    def __init__(self, weights: Weights, shape: Shape, projections: str, norms: str) -> None:
        self.packed = weights[f"{projections}.query_key_value.weight"]
        self.output = weights[f"{projections}.output.weight"]
        self.query_norm = weights[f"{norms}.query.weight"] if shape.qk_norm else None
        self.key_norm = weights[f"{norms}.key.weight"] if shape.qk_norm else None
        self.shape = shape
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []

    def __call__(self, x: Tensor, position: int, visible: Sequence[int]) -> Tensor:
        """Attend from ``position``, whose normed input is x, to the positions ``visible``."""
        shape = self.shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        assert len(self.packed) == queries + 2 * keys
        query = shape.turned(self.packed[:queries] @ x, self.query_norm, position)
        assert len(self.keys) == position
        self.keys.append(shape.turned(self.packed[queries : queries + keys] @ x, self.key_norm, position))
        self.values.append(split_heads(self.packed[queries + keys :] @ x, shape.head_dim))
        return self.output @ attend_all(shape, query, self.keys, self.values, visible)


def attend_all(
    shape: Shape,
    query: Sequence[Tensor],
    keys: Sequence[Sequence[Tensor]],
    values: Sequence[Sequence[Tensor]],
    visible: Sequence[int],
) -> Tensor:
    """Attend with every head; query head h reads head h / (heads / kv_heads) of the keys and values."""
    found = []
    for head in range(shape.heads):
        source = head // (shape.heads // shape.kv_heads)
        found.append(
            softmax_attention(query[head], [keys[p][source] for p in visible], [values[p][source] for p in visible])
        )
    return torch.cat(found)


def up_to(position: int) -> list[int]:
    return list(range(position + 1))


def newest(position: int, window: int) -> list[int]:
    return [p for p in range(position + 1) if position - p < window]


def stack(weights: Weights, shape: Shape, name: str, layers: int, x: list[Tensor]) -> list[Tensor]:
    """Run a pre-norm stack with full causal attention, layer after layer."""
    for layer in range(layers):
        block = f"{name}.{layer}"
        attention = SelfAttention(weights, shape, f"{block}.attention", f"{block}.head_norms")
        after = []
        for position, before in enumerate(x):
            normed = rms(before, weights[f"{block}.attention_norm.weight"])
            middle = before + attention(normed, position, up_to(position))
            after.append(middle + swiglu(rms(middle, weights[f"{block}.ffn_norm.weight"]), weights, f"{block}.ffn"))
        x = after
    return x


# ---------------------------------------------------------------- the architectures, one document


def transformer(weights: Weights, config, tokens: Sequence[int], interval: int | None) -> list[Tensor]:
    """Return the states of one document."""
    assert interval is None
    x = [weights["embedding.weight"][token] for token in tokens]
    return stack(weights, Shape.of(config), "blocks", config.layers, x)


def rlt(weights: Weights, config, tokens: Sequence[int], interval: int | None) -> list[Tensor]:
    """Return the states of one document: fed back every ``interval`` positions, or never (RLT-0)."""
    shape = Shape.of(config)
    x = [weights["embedding.weight"][token] for token in tokens]
    entries = stack(weights, shape, "encoder", config.encoder_layers, x)
    groups = config.memory_groups if config.decoder_layers else 0
    memories = [_rlt_memory(weights, shape, group, entries) for group in range(groups)]
    attentions = []
    for layer in range(config.decoder_layers):
        owner = "encoder" if config.tied_stacks else "decoder"
        attentions.append(
            SelfAttention(weights, shape, f"{owner}.{layer}.attention", f"decoder.{layer}.head_norms"),
        )
    states: list[Tensor] = []
    for position, entry in enumerate(entries):
        z = entry
        if interval is not None:
            complete = position // interval  # chunks whose positions have all been seen before this one's
            register = states[complete * interval - 1] if complete else weights["initial"]
            z = _rlt_merge(weights, config, entry, register)
        for layer in range(config.decoder_layers):
            block = f"decoder.{layer}"
            normed = rms(z, weights[f"{block}.attention_norm.weight"])
            z = z + attentions[layer](normed, position, newest(position, config.window))
            query_norm = weights[f"{block}.cross_head_norms.query.weight"] if shape.qk_norm else None
            normed = weights[f"{block}.cross.query.weight"] @ rms(z, weights[f"{block}.cross_norm.weight"])
            query = shape.turned(normed, query_norm, position)
            keys, values = memories[math.floor(layer * config.memory_groups / config.decoder_layers)]
            read = attend_all(shape, query, keys, values, up_to(position))
            z = z + weights[f"{block}.cross.output.weight"] @ read
            owner = f"encoder.{layer}" if config.tied_stacks else block
            z = z + swiglu(rms(z, weights[f"{block}.ffn_norm.weight"]), weights, f"{owner}.ffn")
        states.append(z)
    return states


def _rlt_memory(
    weights: Weights, shape: Shape, group: int, entries: Sequence[Tensor]
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return keys and values of one memory group for all positions (2.2)."""
    packed = weights[f"memory.key_value.{group}.weight"]
    half = shape.kv_heads * shape.head_dim
    assert len(packed) == 2 * half
    norm = weights[f"memory.head_norms.{group}.key.weight"] if shape.qk_norm else None
    keys, values = [], []
    for position, entry in enumerate(entries):
        x = rms(entry, weights["memory.norm.weight"])
        keys.append(shape.turned(packed[:half] @ x, norm, position))
        values.append(split_heads(packed[half:] @ x, shape.head_dim))
    return keys, values


def _rlt_merge(weights: Weights, config, entry: Tensor, state: Tensor) -> Tensor:
    """Return u_t (2.9-2.11)."""
    width = config.width
    r = rms(state, weights["merge.norm.weight"])
    w_gate = torch.cat([weights["merge.entry_gate.weight"], weights["merge.state.weight"][:width]], dim=1)
    w_state = weights["merge.state.weight"][width:]
    assert w_gate.shape == (width, 2 * width)
    assert w_state.shape == (width, width)
    gate = 1 / (1 + torch.exp(-(w_gate @ torch.cat([entry, r]) + weights["merge.entry_gate.bias"])))
    return entry + config.alpha * gate * (w_state @ r)


ORACLES: dict[str, Callable[..., list[Tensor]]] = {"transformer": transformer, "rlt": rlt}


# ---------------------------------------------------------------- rows of documents, logits


def document_borders(starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return [begin, end) of every document of a row, from the start that each position names."""
    borders = []
    for position, start in enumerate(starts):
        if start == position:
            borders.append((position, position + 1))
        else:
            assert borders[-1][0] == start
            borders[-1] = (start, position + 1)
    return borders


def states(weights: Weights, config, tokens: Tensor, interval: int | None, starts: Tensor | None = None) -> Tensor:
    """Return the states [rows, n, d] of rows of documents, each document computed alone."""
    oracle = ORACLES[config.architecture]
    rows = []
    for row in range(tokens.shape[0]):
        begins = [0] * tokens.shape[1] if starts is None else starts[row].tolist()
        found: list[Tensor] = []
        for begin, end in document_borders(begins):
            found += oracle(weights, config, tokens[row, begin:end].tolist(), interval)
        rows.append(torch.stack(found))
    return torch.stack(rows)


def logits(weights: Weights, config, found: Tensor) -> Tensor:
    """Return logits [rows, n, V] of states."""
    head = weights["embedding.weight" if config.tied_head else "readout_layer.head.weight"]
    norm = weights["readout_layer.norm.weight"]
    return torch.stack([torch.stack([head @ rms(state, norm) for state in row]) for row in found])


# ---------------------------------------------------------------- FLOPs, from shapes


def attention_flops(config, length: int) -> int:
    """Return the FLOPs of attention in one document of ``length``: 4 head_dim for each head and visible key."""
    shape = Shape.of(config)
    full = sum(len(up_to(position)) for position in range(length))
    if config.architecture == "transformer":
        seen = config.layers * full
    elif config.architecture == "rlt":
        windowed = sum(len(newest(position, config.window)) for position in range(length))
        seen = config.encoder_layers * full + config.decoder_layers * (full + windowed)
    else:
        raise NotImplementedError(config.architecture)
    return 4 * shape.heads * shape.head_dim * seen


def linear_flops(weights: Weights, config, *, feedback: float) -> float:
    """Return the mean FLOPs of a position in all matrices: 2 for every weight and use, logits included.

    ``feedback`` states are fed back per position; what acts on a state alone is used that often.
    """
    total = 2 * config.vocab_size * config.width
    for name, weight in weights.items():
        if weight.dim() != 2 or name in ("embedding.weight", "readout_layer.head.weight"):
            continue
        if name.startswith("merge.") and not feedback:
            continue
        tied = getattr(config, "tied_stacks", False) and name.startswith("encoder.")
        uses = feedback if name == "merge.state.weight" else 2 if tied else 1
        total += 2 * weight.numel() * uses
    return total
