"""Layers that the architectures share: norms, rotary positions, attention, feed-forward, readout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.models import links, products
from pipeline.models.attending import Attended
from pipeline.models.collector import Collector, current
from pipeline.models.functions import rms_norm, rotate, swiglu
from pipeline.models.inputs import Visibility

NormKind = Literal["rms", "rms_unlearned", "layer"]
Activation = Literal["gelu", "relu2"]
FFNKind = Literal["swiglu"] | Activation
Rope = Literal["geometric", "integer"]


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019), with a learned weight or without, in the dtype of its input."""

    def __init__(self, width: int, eps: float, *, learned: bool = True) -> None:
        super().__init__(width, eps=eps, elementwise_affine=learned)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape and dtype."""
        found = links.collected(self)
        if found is not None:
            return links.run(x, found)
        return rms_norm(x, self.weight, self.eps or 0.0)

    def links(self, collector: Collector) -> list[links.Link] | None:
        """Return the layer for a loop; see ``links.collected``."""
        weight = collector.find(self.weight)
        if self.weight is not None and weight is None:
            return None
        return [links.RMSNormLink(weight, self.normalized_shape[0], self.eps or 0.0, collector.kernels)]


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) with learned weight and bias, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape and dtype."""
        found = links.collected(self)
        if found is not None:
            return links.run(x, found)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)

    def links(self, collector: Collector) -> list[links.Link] | None:
        """Return the layer for a loop; see ``links.collected``."""
        weight, bias = collector.find(self.weight), collector.find(self.bias)
        return None if weight is None or bias is None else [links.LayerNormLink(weight, bias, self.eps)]


def make_norm(kind: NormKind, width: int, eps: float) -> RMSNorm | LayerNorm:
    """Return a norm over the last dimension."""
    if kind == "layer":
        return LayerNorm(width, eps=eps)
    return RMSNorm(width, eps, learned=kind == "rms")


class Linear(nn.Linear):
    """``nn.Linear`` by the fastest kernel at hand (``products``)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        found = links.collected(self)
        if found is not None:
            return links.run(x, found)
        return products.multiply(x, self.weight, self.bias)

    def links(self, collector: Collector) -> list[links.Link] | None:
        """Return the layer for a loop; see ``links.collected``."""
        weight, bias = collector.find(self.weight), collector.find(self.bias)
        if weight is None or (self.bias is not None and bias is None):
            return None
        return [links.LinearLink(collector.product(weight), bias)]


class PackedLinear(Linear):
    """Several matrices that read the same input, as one product.

    Attributes:
        parts: rows of each matrix, in order. An optimiser that treats matrices as such takes them apart.
    """

    def __init__(self, in_features: int, parts: tuple[int, ...], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = parts


LEAST_TABLE = 256
"""Positions that rotation tables are made for at least."""


class Rotations:
    """The rotation tables of the positions from 0 on, made once for each device and dtype, longer when they must be.

    Args:
        head_dim: width of a head, even.
        base: see ``rotation``.
        kind: see ``rotation``.
    """

    def __init__(self, head_dim: int, base: float, kind: Rope) -> None:
        self._head_dim, self._base, self._kind = head_dim, base, kind
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def between(self, begin: int, stop: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return views of the tables of positions ``begin`` to ``stop``, [1, n, 1, head_dim] each; see ``rotation``."""
        cos, sin = self._made(stop, device, dtype)
        return cos[:, begin:stop], sin[:, begin:stop]

    def at(self, positions: Tensor, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the tables of positions below ``stop``, int64 [rows, n], as [rows, n, 1, head_dim] each."""
        cos, sin = (table.view(-1, self._head_dim) for table in self._made(stop, positions.device, dtype))
        return F.embedding(positions, cos).unsqueeze(2), F.embedding(positions, sin).unsqueeze(2)

    def _made(self, stop: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = self._tables.get((device, dtype))
        if found is None or found[0].shape[1] < stop:
            # Tables made under inference mode could not be used in training afterwards.
            with torch.inference_mode(False), torch.no_grad():
                count = max(LEAST_TABLE, 1 << (stop - 1).bit_length())
                positions = torch.arange(count, device=device)[None]
                found = rotation(positions, self._head_dim, self._base, dtype, self._kind)
            if not (torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level()):
                self._tables[device, dtype] = found  # what a tracer made is no table
        return found


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


def attend_same(query: Tensor, key: Tensor, value: Tensor, visible: Visibility, dropout: float = 0.0) -> Tensor:
    """Softmax attention of positions to themselves: all of ``attend``'s tensors are [rows, n, heads, head_dim]."""
    return attend(query, key.transpose(1, 2), value.transpose(1, 2), visible, dropout)


class HeadNorms(nn.Module):
    """QK-norm: RMSNorm over each head of queries and keys, before the rotation (Dehghani et al. 2023)."""

    def __init__(
        self, head_dim: int, eps: float, *, learned: bool = True, key: bool = True, query: bool = True
    ) -> None:
        super().__init__()
        self.query = RMSNorm(head_dim, eps, learned=learned) if query else None
        self.key = RMSNorm(head_dim, eps, learned=learned) if key else None

    def both_link(self, collector: Collector, heads: tuple[int, int]) -> links.RMSNormLink | None:
        """Return both norms as one, for that many heads of queries and of keys behind each other, for a loop."""
        assert self.query is not None
        assert self.key is not None
        query, key = collector.find(self.query.weight), collector.find(self.key.weight)
        if self.query.weight is not None and (query is None or key is None):
            return None
        if not links.replaceable(self.query) or not links.replaceable(self.key):
            return None
        both = None if query is None or key is None else collector.heads(query, key, heads)
        return links.RMSNormLink(both, self.query.normalized_shape[0], self.query.eps or 0.0, collector.kernels)


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

    def enter(
        self,
        x: Tensor,
        norm: RMSNorm | LayerNorm,
        head_norms: HeadNorms | None,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what attention takes of the residual stream x: ``project`` of its norm, QK-normed and rotated."""
        query, key, value = self.project(norm(x))
        return turned(query, head_norms, "query", cos, sin), turned(key, head_norms, "key", cos, sin), value

    def links(self, collector: Collector, norm: RMSNorm | LayerNorm, head_norms: HeadNorms | None) -> Attended | None:
        """Return ``enter``, attention and the output for a loop; see ``links.collected``."""
        entry, out = links.collected(norm, self.query_key_value), links.collected(self.output)
        if not links.replaceable(self, "enter", "project") or entry is None or out is None:
            return None
        heads, norms = (self.heads, self.kv_heads), []
        if head_norms is not None:
            found = links.once(head_norms.both_link, heads)
            if found is None:
                return None
            norms = [found]
        return Attended(entry, partial(links.HeadsLink, heads, self.head_dim, norms), out, collector.kernels)


class CrossAttention(nn.Module):
    """Query and output projections of attention over keys and values that somebody else made."""

    def __init__(self, width: int, heads: int, head_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.query = Linear(width, heads * head_dim, bias=bias)
        self.output = Linear(heads * head_dim, width, bias=bias)

    def enter(
        self, x: Tensor, norm: RMSNorm | LayerNorm, head_norms: HeadNorms | None, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Return the rotated queries [rows, n, heads, head_dim] of the residual stream x."""
        query = links.chain(x, norm, self.query).unflatten(-1, (-1, self.head_dim))
        return turned(query, head_norms, "query", cos, sin)

    def links(self, collector: Collector, norm: RMSNorm | LayerNorm, head_norms: HeadNorms | None) -> Attended | None:
        """Return ``enter``, attention and the output for a loop; see ``links.collected``."""
        entry, out = links.collected(norm, self.query), links.collected(self.output)
        norms = links.collected(getattr(head_norms, "query", None))
        if not links.replaceable(self, "enter") or entry is None or norms is None or out is None:
            return None
        return Attended(entry, partial(links.QueriesLink, self.head_dim, norms), out, collector.kernels)


def normed(x: Tensor, norms: HeadNorms | None, which: str) -> Tensor:
    """Apply the QK-norm of ``which`` ("query" or "key") where there is one."""
    if norms is None:
        return x
    return getattr(norms, which)(x)


def turned(x: Tensor, norms: HeadNorms | None, which: str, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys [rows, n, heads, head_dim], ``which`` they are, QK-normed and rotated."""
    found = links.collected(getattr(norms, which, None))
    if found is not None:
        return links.run(x, [*found, links.RotationLink(cos, sin)])
    return rotate(normed(x, norms, which), cos, sin)


def add_branch(x: Tensor, inner: Tensor, *modules: nn.Module, dropout: float = 0.0, scale: float = 1.0) -> Tensor:
    """Return the residual stream x plus what modules that follow each other make of ``inner``.

    Args:
        x: [..., width].
        inner: what the first module reads.
        modules: layers.
        dropout: share of the branch set to zero.
        scale: factor of the branch.
    """
    if not dropout and scale == 1.0:
        return links.chain(inner, *modules, onto=x)
    branch = links.chain(inner, *modules)
    if dropout:
        branch = F.dropout(branch, dropout)
    return x + branch if scale == 1.0 else torch.add(x, branch, alpha=scale)


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020): down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = PackedLinear(width, (hidden, hidden), bias=bias)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., width]."""
        return self.down(swiglu(self.gate_up(x)))

    def links(self, collector: Collector) -> list[links.Link] | None:
        """Return the layer for a loop; see ``links.collected``."""
        into, out = links.links_of(self.gate_up, collector), links.links_of(self.down, collector)
        return None if into is None or out is None else [*into, links.SwiGLULink(collector.kernels), *out]


class MLP(nn.Module):
    """Feed-forward layer of two matrices: down(f(up x))."""

    def __init__(self, width: int, hidden: int, activation: Activation, *, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., width]."""
        return self.down(ACTIVATIONS[self.activation](self.up(x)))

    def links(self, collector: Collector) -> list[links.Link] | None:
        """Return the layer for a loop; see ``links.collected``."""
        into, out = links.links_of(self.up, collector), links.links_of(self.down, collector)
        activation = links.GELULink() if self.activation == "gelu" else links.SquaredReLULink()
        return None if into is None or out is None else [*into, activation, *out]


def relu2(x: Tensor) -> Tensor:
    """Return the square of the positive part (So et al. 2021)."""
    return F.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu2": relu2}


def make_ffn(kind: FFNKind, width: int, hidden: int, *, bias: bool = False) -> SwiGLU | MLP:
    """Return a feed-forward layer."""
    if kind == "swiglu":
        return SwiGLU(width, hidden, bias=bias)
    return MLP(width, hidden, kind, bias=bias)


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
        logits = tied_logits(x, embedding) if self.head is None else self.head(x)
        if self.softcap:
            logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def tied_logits(x: Tensor, embedding: nn.Embedding) -> Tensor:
    """Return the products of x [..., width] with all embeddings, [..., vocab_size]."""
    collector = current()
    weight = None if collector is None else collector.find(embedding.weight)
    if collector is None or weight is None:
        return products.multiply(x, embedding.weight)
    link = collector.links.get(embedding)
    if not isinstance(link, links.LinearLink):
        link = collector.links[embedding] = links.LinearLink(collector.product(weight), None)
    return links.run(x, [link])


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
