"""Layers that the architectures share: rotary positions, attention, feed-forward, readout."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.models.inputs import Visibility

NORM_EPS = 1e-6


class RMSNorm(nn.RMSNorm):
    """RMSNorm with a learned weight (Zhang and Sennrich 2019), in the dtype of its input.

    Under autocast the heads come in bfloat16 and the weight is float32; torch's fused kernel wants them alike (it
    accumulates in float32 all the same).
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape and dtype."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotation(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine tables of rotary positions (Su et al. 2021).

    They stay at least float32 whatever the model's dtype and autocast say: in bfloat16 most positions beyond 256 would
    fall together.

    Args:
        positions: position of each token within its document, int64 [rows or 1, n].
        head_dim: width of a head, even.
        base: base of the geometric series of wavelengths.
        dtype: dtype of the model's weights.

    Returns:
        Two float32 (float64 for a float64 model) tensors [rows or 1, n, 1, head_dim], whose halves are alike.
    """
    with torch.autocast(positions.device.type, enabled=False):
        exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
        angle = positions[..., None].double() * base**-exponent
        angle = torch.cat([angle, angle], dim=-1)[:, :, None]
        dtype = torch.promote_types(torch.float32, dtype)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [rows, n, heads, head_dim] by the tables of ``rotation``; computed in their dtype, returned in x's."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.addcmul(x * cos, turned, sin).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Visibility) -> Tensor:
    """Softmax attention.

    Args:
        query: [rows, n, heads, head_dim].
        key: [rows, kv_heads, m, head_dim].
        value: [rows, kv_heads, m, head_dim].
        visible: which keys each query sees.

    Returns:
        [rows, n, heads * head_dim].
    """
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.to(query.dtype),
        value.to(query.dtype),
        attn_mask=visible.mask,
        is_causal=visible.causal,
        enable_gqa=query.shape[2] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(2)


class HeadNorms(nn.Module):
    """QK-norm: RMSNorm over each head of queries and keys, before the rotation (Dehghani et al. 2023)."""

    def __init__(self, head_dim: int, *, key: bool = True, query: bool = True) -> None:
        super().__init__()
        self.query = RMSNorm(head_dim) if query else None
        self.key = RMSNorm(head_dim) if key else None


class SelfAttention(nn.Module):
    """Projections of self-attention, with grouped queries where ``kv_heads`` < ``heads`` (Ainslie et al. 2023).

    The QK-norms are passed in by the caller, since tied stacks share projections and keep their norms.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.query_key_value = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.output = nn.Linear(heads * head_dim, width, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [rows, n, heads, head_dim], rotated keys and values [rows, kv_heads, n, head_dim]."""
        packed = self.query_key_value(x).unflatten(-1, (-1, self.head_dim))
        query, key, value = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        query, key = rotate(normed(query, norms, "query"), cos, sin), rotate(normed(key, norms, "key"), cos, sin)
        return query, key.transpose(1, 2), value.transpose(1, 2)


class CrossAttention(nn.Module):
    """Query and output projections of attention over keys and values that somebody else made."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.output = nn.Linear(heads * head_dim, width, bias=False)

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

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., width]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Readout(nn.Module):
    """Output norm and the map from states to logits: a matrix of its own, or the token embedding (tied)."""

    def __init__(self, width: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.head = None if tied else nn.Linear(width, vocab_size, bias=False)

    def forward(self, states: Tensor, embedding: nn.Embedding) -> Tensor:
        """Map states [..., width] to logits [..., vocab_size]."""
        x = self.norm(states)
        return F.linear(x, embedding.weight) if self.head is None else self.head(x)


def init_linear(module: nn.Linear, factor: float, fan_in: int, generator: torch.Generator | None) -> None:
    """Draw a weight from N(0, (factor / sqrt(fan_in))^2) and zero the bias."""
    nn.init.normal_(module.weight, std=factor / math.sqrt(fan_in), generator=generator)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def matmul_flops(*modules: nn.Module | None) -> int:
    """Return the FLOPs (a multiply and an add count two) of one position through every linear layer of ``modules``."""
    layers = (layer for module in modules if module is not None for layer in module.modules())
    return sum(2 * layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear))
