"""Layers that the architectures share: norms, rotary positions, attention, feed-forward, readout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.models.inputs import Visibility
from pipeline.models.products import Linear, linear

NormKind = Literal["rms", "rms_unlearned", "layer"]
FFNKind = Literal["swiglu", "gelu", "relu2"]
Rope = Literal["geometric", "integer"]


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019), with a learned weight or without, in the dtype of its input.

    Under autocast the heads come in bfloat16 and the weight is float32; torch's fused kernel wants them alike (it
    accumulates in float32 all the same).
    """

    def __init__(self, width: int, eps: float, *, learned: bool = True) -> None:
        super().__init__(width, eps=eps, elementwise_affine=learned)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape and dtype."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) with learned weight and bias, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape and dtype."""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def make_norm(kind: NormKind, width: int, eps: float) -> RMSNorm | LayerNorm:
    """Return a norm over the last dimension."""
    if kind == "layer":
        return LayerNorm(width, eps=eps)
    return RMSNorm(width, eps, learned=kind == "rms")


class PackedLinear(Linear):
    """Several matrices that read the same input, as one product.

    Attributes:
        parts: rows of each matrix, in order. An optimiser that treats matrices as such takes them apart.
    """

    def __init__(self, in_features: int, parts: tuple[int, ...], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = parts


def rotation(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype, kind: Rope) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine tables of rotary positions (Su et al. 2021).

    They stay at least float32 whatever the model's dtype and autocast say: in bfloat16 most positions beyond 256 would
    fall together.

    Args:
        positions: position of each token within its document, int64 [rows or 1, n].
        head_dim: width of a head, even.
        base: base of the geometric series of wavelengths.
        dtype: dtype of the model's weights.
        kind: ``geometric`` wavelengths, or angles that are the position times ``integer`` channel numbers (as in the
            CRT author's runs).

    Returns:
        Two float32 (float64 for a float64 model) tensors [rows or 1, n, 1, head_dim], whose halves are alike.
    """
    # Autocast leaves float64 alone.
    channel = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
    frequency = channel / 2 if kind == "integer" else base ** -(channel / head_dim)
    angle = positions[..., None].double() * frequency
    angle = torch.cat([angle, angle], dim=-1)[:, :, None]
    dtype = torch.promote_types(torch.float32, dtype)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [rows, n, heads, head_dim] by the tables of ``rotation``; computed in their dtype, returned in x's."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.addcmul(x * cos, turned, sin).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Visibility, dropout: float = 0.0) -> Tensor:
    """Softmax attention.

    Args:
        query: [rows, n, heads, head_dim].
        key: [rows, kv_heads, m, head_dim].
        value: [rows, kv_heads, m, head_dim].
        visible: which keys each query sees.
        dropout: share of the attention weights set to zero.

    Returns:
        [rows, n, heads, head_dim].
    """
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.to(query.dtype),
        value.to(query.dtype),
        attn_mask=visible.mask,
        dropout_p=dropout,
        is_causal=visible.causal,
        enable_gqa=query.shape[2] != key.shape[1],
    )
    return out.transpose(1, 2)


class HeadNorms(nn.Module):
    """QK-norm: RMSNorm over each head of queries and keys, before the rotation (Dehghani et al. 2023)."""

    def __init__(
        self, head_dim: int, eps: float, *, learned: bool = True, key: bool = True, query: bool = True
    ) -> None:
        super().__init__()
        self.query = RMSNorm(head_dim, eps, learned=learned) if query else None
        self.key = RMSNorm(head_dim, eps, learned=learned) if key else None


class SelfAttention(nn.Module):
    """Projections of self-attention, with grouped queries where ``kv_heads`` < ``heads`` (Ainslie et al. 2023).

    The QK-norms are passed in by the caller, since tied stacks share projections and keep their norms.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.query_key_value = PackedLinear(width, parts, bias=bias)
        self.output = Linear(heads * head_dim, width, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [rows, n, heads, head_dim], keys and values [rows, n, kv_heads, head_dim] of x."""
        packed = self.query_key_value(x).unflatten(-1, (-1, self.head_dim))
        query, key, value = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        return query, key, value


class CrossAttention(nn.Module):
    """Query and output projections of attention over keys and values that somebody else made."""

    def __init__(self, width: int, heads: int, head_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.query = Linear(width, heads * head_dim, bias=bias)
        self.output = Linear(heads * head_dim, width, bias=bias)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> Tensor:
        """Return rotated queries [rows, n, heads, head_dim]."""
        query = self.query(x).unflatten(-1, (-1, self.head_dim))
        return rotate(normed(query, norms, "query"), cos, sin)


def normed(x: Tensor, norms: HeadNorms | None, which: str) -> Tensor:
    """Apply the QK-norm of ``which`` ("query" or "key") where there is one."""
    if norms is None:
        return x
    return getattr(norms, which)(x)


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020): down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = PackedLinear(width, (hidden, hidden), bias=bias)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., width]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class MLP(nn.Module):
    """Feed-forward layer of two matrices: down(f(up x))."""

    def __init__(self, width: int, hidden: int, activation: Callable[[Tensor], Tensor], *, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., width]."""
        return self.down(self.activation(self.up(x)))


def relu2(x: Tensor) -> Tensor:
    """Return the square of the positive part (So et al. 2021)."""
    return F.relu(x).square()


def make_ffn(kind: FFNKind, width: int, hidden: int, *, bias: bool = False) -> SwiGLU | MLP:
    """Return a feed-forward layer."""
    if kind == "swiglu":
        return SwiGLU(width, hidden, bias=bias)
    return MLP(width, hidden, F.gelu if kind == "gelu" else relu2, bias=bias)


class Readout(nn.Module):
    """Output norm and the map from states to logits: a matrix of its own, or the token embedding (tied)."""

    def __init__(
        self,
        norm: RMSNorm | LayerNorm,
        width: int,
        vocab_size: int,
        *,
        tied: bool,
        bias: bool = False,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.head = None if tied else Linear(width, vocab_size, bias=bias)
        self.softcap = softcap

    def forward(self, states: Tensor, embedding: nn.Embedding) -> Tensor:
        """Map states [..., width] to logits [..., vocab_size]."""
        return self.logits(self.norm(states), embedding)

    def logits(self, x: Tensor, embedding: nn.Embedding) -> Tensor:
        """Map states that have been normed [..., width] to logits [..., vocab_size]."""
        logits = linear(x, embedding.weight) if self.head is None else self.head(x)
        if self.softcap:
            logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def init_linear(
    module: nn.Linear,
    factor: float,
    fan_in: int,
    generator: torch.Generator | None,
    kind: Literal["normal", "uniform"] = "normal",
) -> None:
    """Draw a weight of mean 0 and standard deviation factor / sqrt(fan_in); zero the bias."""
    init_matrix(module.weight, factor / math.sqrt(fan_in), generator, kind)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def init_matrix(
    weight: Tensor, std: float, generator: torch.Generator | None, kind: Literal["normal", "uniform"] = "normal"
) -> None:
    """Draw a matrix of mean 0 and standard deviation ``std``."""
    if kind == "uniform":
        nn.init.uniform_(weight, -math.sqrt(3) * std, math.sqrt(3) * std, generator=generator)
    else:
        nn.init.normal_(weight, std=std, generator=generator)


def matmul_flops(*modules: nn.Module | None) -> int:
    """Return the FLOPs (a multiply and an add count two) of one position through every linear layer of ``modules``."""
    layers = (layer for module in modules if module is not None for layer in module.modules())
    return sum(2 * layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear))
