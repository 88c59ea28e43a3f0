"""Keys, values and their gradients while a loop runs forward through time, and backward again.

Every layer has one buffer for its keys and one for its values; a step writes its own and attends to a slice, so that
nothing is joined or copied. Backward goes from the last step to the first. The gradient of a step's keys and values is
complete once all later steps have been through; these add to it in place. What a step adds to keys that lie further
back than its own tile of time is put aside, and taken for all steps of the tile at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.models.inputs import Inputs, Visibility

TILE = 64
"""Slots of time whose part in the gradients of older keys and values is taken at once."""
SEGMENT_TILE = 16
"""Likewise with segments, where memory counts."""
KEPT_KEYS = 128
"""Attention weights of so many keys or less are kept for backward; of more, they are computed again."""


class LoopMemory:
    """The keys and values of one stack of layers for all slots of a loop.

    It stands in for a ``KeyValueMemory`` in ``advance``.

    With segments and a window, the buffers hold the slots that one segment attends to. Forward keeps of each segment
    what later ones attend to (``keep``), and backward brings it back (``go_back``).

    Args:
        index: see the attributes.
        window: likewise.
        gaps: likewise.
        size: slots that the buffers hold; None for all.
        tile: slots of time whose part in the gradients of older keys and values is taken at once.

    Attributes:
        index: row index of each slot, int64 [rows or 1, slots]; -1 for an empty slot.
        window: only so many slots, the newest, are attended to; None for all.
        gaps: some slots are empty.
        base: slot at which the buffers begin.
        begin: slot at which the next step begins.
        oldest: slot before which nothing is within the window of the next step.
        live: slot before which keys and values are constants to the next step (truncated backpropagation).
    """

    def __init__(
        self, index: Tensor, window: int | None, *, gaps: bool, size: int | None = None, tile: int = TILE
    ) -> None:
        self.index, self.window, self.gaps = index, window, gaps
        self.base = self.begin = self.oldest = self.live = 0
        self._size, self._tile = index.shape[1] if size is None else size, tile
        self._layers: dict[int, LoopLayer] = {}
        self._kept: list[Kept] = []

    def place(self, begin: int, oldest: int, live: int) -> None:
        """Say where the next step lies; see the attributes."""
        self.begin, self.oldest, self.live = begin, oldest, live

    def step(self, inputs: Inputs) -> LoopStep:
        """Open the memory for the positions of a step."""
        return LoopStep(self, inputs.length)

    def layer(self, number: int, key: Tensor) -> LoopLayer:
        """Return the buffers of a layer, made at its first key [rows, n, heads, head_dim]."""
        found = self._layers.get(number)
        if found is None:
            rows, _, heads, head_dim = key.shape
            shape = (rows * heads, self._size, head_dim)
            found = self._layers[number] = LoopLayer(key.new_empty(shape), key.new_empty(shape), self._tile)
        return found

    def go_on(self, base: int, begin: int) -> None:
        """Let the buffers begin at slot ``base``, for a segment that begins at ``begin``, in forward."""
        if base != self.base:
            for layer in self._layers.values():
                layer.move(base - self.base, begin - base)
            self.base = base

    def keep(self, begin: int, stop: int) -> None:
        """Keep slots that are to be brought back."""
        slots = slice(begin - self.base, stop - self.base)
        parts = {
            number: (layer.keys[:, slots].clone(), layer.values[:, slots].clone())
            for number, layer in self._layers.items()
        }
        self._kept.append(Kept(begin, stop, parts))

    def go_back(self, base: int, begin: int, stop: int, later: int | None) -> None:
        """Let the buffers hold slots from ``base`` on, for a segment from ``begin`` to ``stop``, in backward.

        Args:
            base: slot at which the buffers are to begin.
            begin: slot at which the segment begins.
            stop: slot behind it.
            later: slot at which the buffers began in the segment after this; None: this is the last.
        """
        self._kept = [each for each in self._kept if each.begin < begin]
        self.base = base
        for number, layer in self._layers.items():
            if later is not None:
                layer.return_to(later - base, stop - later)
            for each in reversed(self._kept):
                first = max(base, each.begin)
                if first >= each.stop:
                    break
                keys, values = each.parts[number]
                slots, some = slice(first - base, each.stop - base), slice(first - each.begin, None)
                layer.keys[:, slots], layer.values[:, slots] = keys[:, some], values[:, some]


@dataclass(frozen=True)
class Kept:
    """Keys and values of slots that a later segment attends to, by layer."""

    begin: int
    stop: int
    parts: dict[int, tuple[Tensor, Tensor]]


class LoopStep:
    """A loop's memory with the slots of one step joined to it; see ``memory.Step``."""

    recomputes = False

    def __init__(self, memory: LoopMemory, length: int) -> None:
        self._memory = memory
        first, begin, base = memory.oldest, memory.begin, memory.base
        self._span = Span(first - base, max(first, memory.live) - base, begin - base, begin + length - base)
        self.key_index = memory.index[:, first : begin + length]

    @property
    def same(self) -> bool:
        """The slots are those of the new positions alone."""
        return self._span.first == self._span.begin

    @property
    def exact(self) -> bool:
        """No slot is empty, and none lies after the new positions."""
        return not self._memory.gaps

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, visible: Visibility, dropout: float = 0.0
    ) -> Tensor:
        """Add a layer's keys and values [rows, n, heads, head_dim], and attend to all; see ``layers.attend``."""
        result: Tensor = _SelfAttention.apply(query, key, value, self.link(layer, visible, dropout))
        return result

    def attention(self, layer: int) -> LoopAttention:
        """Return ``attend`` of a layer."""
        return LoopAttention(partial(self.attend, layer), partial(self.link, layer))

    def link(self, layer: int, visible: Visibility, dropout: float = 0.0) -> SelfAttentionLink:
        """Return ``attend`` of a layer as a link."""
        return SelfAttentionLink(self._memory, layer, self._span, visible, dropout)

    def close(self) -> LoopMemory:
        """Return the memory for the next step."""
        return self._memory


@dataclass(frozen=True)
class LoopAttention:
    """Attention as a function in autograd, and as what makes a link.

    Attributes:
        attend: of queries, and keys and values if they are the step's own, what they see, and dropout.
        link: of what queries see, and dropout.
    """

    attend: Callable[..., Tensor]
    link: Callable[[Visibility, float], AttentionLink]

    def __call__(self, *args: Any) -> Tensor:
        """Attend."""
        return self.attend(*args)


class LoopShared:
    """Keys and values that all positions of a row share; see ``memory.Shared``.

    Args:
        key: [rows, heads, m, head_dim].
        value: likewise.
        tile: see ``LoopMemory``.
    """

    def __init__(self, key: Tensor, value: Tensor, tile: int = TILE) -> None:
        self._shape = key.shape
        self._layer = LoopLayer(key.flatten(0, 1).contiguous(), value.flatten(0, 1).contiguous(), tile)

    @property
    def length(self) -> int:
        """Number of keys."""
        return self._shape[2]

    def attend(self, reach: int, query: Tensor, visible: Visibility, dropout: float = 0.0) -> Tensor:
        """Attend to the first ``reach`` keys; see ``layers.attend``."""
        result: Tensor = _CrossAttention.apply(query, self.link(reach, visible, dropout))
        return result

    def attention(self, reach: int) -> LoopAttention:
        """Return ``attend`` to the first ``reach`` keys."""
        return LoopAttention(partial(self.attend, reach), partial(self.link, reach))

    def link(self, reach: int, visible: Visibility, dropout: float = 0.0) -> AttentionLink:
        """Return ``attend`` as a link."""
        return AttentionLink(self._layer, Span(0, 0, reach, reach), visible, dropout)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the keys and of the values, [rows, heads, m, head_dim]."""
        self._layer.take()
        keys, values = self._layer.key_gradients, self._layer.value_gradients
        return keys.view(self._shape), values.view(self._shape)


@dataclass(frozen=True)
class Span:
    """Slots that a step attends to, counted from where the buffers begin.

    Attributes:
        first: the oldest.
        live: the oldest whose keys and values are no constants.
        begin: the oldest of the step's own.
        stop: behind the newest.
    """

    first: int
    live: int
    begin: int
    stop: int


@dataclass(frozen=True)
class Part:
    """What a step adds to the gradients of keys and values, as factors.

    Attributes:
        span: first and last slot.
        query: scaled, [rows * heads, queries, head_dim].
        scores: gradient of the scores, [rows * heads, queries, slots].
        weights: attention weights, likewise.
        out: gradient of what attention gave, [rows * heads, queries, head_dim].
    """

    first: int
    stop: int
    query: Tensor
    scores: Tensor
    weights: Tensor
    out: Tensor


class LoopLayer:
    """Buffers of one layer's keys and values, [rows * heads, slots, head_dim]; see ``LoopMemory`` for the tile."""

    def __init__(self, keys: Tensor, values: Tensor, tile: int) -> None:
        self.keys, self.values, self._width = keys, values, tile
        self._parts: list[Part] = []
        self._queries = 0
        self._tile: int | None = None
        self._key_gradients: Tensor | None = None
        self._value_gradients: Tensor | None = None

    @property
    def key_gradients(self) -> Tensor:
        """Gradient of ``keys``, in float32 at least."""
        if self._key_gradients is None:
            self._key_gradients = self._zeros()
        return self._key_gradients

    @property
    def value_gradients(self) -> Tensor:
        """Gradient of ``values``, likewise."""
        if self._value_gradients is None:
            self._value_gradients = self._zeros()
        return self._value_gradients

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.keys, dtype=torch.promote_types(torch.float32, self.keys.dtype))

    def move(self, far: int, count: int) -> None:
        """Let the buffers begin so many slots later; ``count`` slots stay, the rest is to be written anew."""
        for buffer in (self.keys, self.values):
            buffer[:, :count] = buffer[:, far : far + count].clone()

    def return_to(self, far: int, count: int) -> None:
        """Let the gradients begin so many slots earlier; ``count`` slots, the first, stay, and the rest are zero."""
        self.take()
        for buffer in (self._key_gradients, self._value_gradients):
            if buffer is not None:
                stays = buffer[:, :count].clone()
                buffer.zero_()
                buffer[:, far : far + count] = stays

    def add(self, span: Span, query: Tensor, scores: Tensor, weights: Tensor, out: Tensor) -> None:
        """Add a step's part; see ``Part`` for the factors, whose slots are those of the span."""
        near = self.reach(span)
        if near < span.stop:
            self._add_now(
                Part(near, span.stop, query, scores[..., near - span.first :], weights[..., near - span.first :], out)
            )
        if span.live < near:
            self.put_aside_far(span, near, query, scores, weights, out)

    def reach(self, span: Span) -> int:
        """Return the slot from which on a step's part is due at once; take what was put aside if another tile begins.

        Before it lie the tiles before the step's own.
        """
        tile = span.begin // self._width
        if self._tile is not None and tile != self._tile:
            self.take()
        self._tile = tile
        return max(span.live, min(span.begin, tile * self._width))

    def put_aside_far(self, span: Span, near: int, query: Tensor, scores: Tensor, weights: Tensor, out: Tensor) -> None:
        """Remember a step's part before slot ``near``; see ``add``."""
        far = slice(span.live - span.first, near - span.first)
        self._put_aside(Part(span.live, near, query, scores[..., far], weights[..., far], out))

    def add_shared(self, span: Span, query: Tensor, scores: Tensor, weights: Tensor, out: Tensor) -> None:
        """Add a step's part to keys and values whose gradients no step waits for."""
        self._put_aside(Part(span.first, span.stop, query, scores, weights, out))
        if self._queries >= self._width:
            self.take()

    def _put_aside(self, part: Part) -> None:
        self._parts.append(part)
        self._queries += part.query.shape[1]

    def _add_now(self, part: Part) -> None:
        slots = slice(part.first, part.stop)
        keys, values = self.key_gradients[:, slots], self.value_gradients[:, slots]
        scores, weights = part.scores.transpose(1, 2), part.weights.transpose(1, 2)
        if part.query.shape[1] == 1:  # a product of vectors: batched products are slow at it
            keys.addcmul_(scores, part.query)
            values.addcmul_(weights, part.out)
        else:
            keys.add_(torch.bmm(scores, part.query))
            values.add_(torch.bmm(weights, part.out))

    def take(self) -> None:
        """Add what was put aside."""
        if not self._parts:
            return
        first, stop = min(part.first for part in self._parts), max(part.stop for part in self._parts)
        for gradients, factors in (
            (self.key_gradients, [(part, part.scores, part.query) for part in self._parts]),
            (self.value_gradients, [(part, part.weights, part.out) for part in self._parts]),
        ):
            rows = torch.cat([each for _, _, each in factors], dim=1)
            shares = rows.new_zeros(rows.shape[0], rows.shape[1], stop - first)
            row = 0
            for part, each, _ in factors:
                shares[:, row : row + each.shape[1], part.first - first : part.stop - first] = each
                row += each.shape[1]
            gradients[:, first:stop].baddbmm_(shares.transpose(1, 2), rows)
        self._parts, self._queries, self._tile = [], 0, None


class AttentionLink:
    """Attention to a slice of a layer's buffers, outside autograd (``links.Link``).

    Args:
        layer: buffers.
        span: slots.
        visible: which of them each query sees.
        dropout: share of the attention weights set to zero.
    """

    def __init__(self, layer: LoopLayer, span: Span, visible: Visibility, dropout: float) -> None:
        self._layer, self.span, self.visible, self.dropout = layer, span, visible, dropout

    def buffers(self, like: Tensor) -> LoopLayer:
        """Return the layer's buffers; see ``LoopMemory.layer``."""
        return self._layer

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map queries [rows, n, heads, head_dim] to [rows, n, heads * head_dim]."""
        layer, span = self._layer, self.span
        rows, count, _, head_dim = x.shape
        scaled = folded(x * (1 / math.sqrt(head_dim)), layer.keys.shape[0] // rows)
        weights = attention_weights(scaled, layer.keys[:, span.first : span.stop], self.visible, rows, count)
        used, kept = weights, None
        if self.dropout:
            used, kept = torch.native_dropout(weights, self.dropout, True)
        few = kept is not None or span.stop - span.first <= KEPT_KEYS
        used = used if used.dtype is scaled.dtype else used.to(scaled.dtype)
        found = weighted(used, layer.values[:, span.first : span.stop], rows, count, out)
        return found, (scaled, weights if few else None, kept, rows, count)

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of the queries; add those of keys and values to the layer's."""
        of_query, factors = self._gradients(kept, gradient)
        self._layer.add_shared(self.span, *factors)
        return of_query

    def _gradients(self, kept: Any, gradient: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the gradient of the queries, and the factors of those of keys and values (``Part``)."""
        scaled, weights, mask, rows, count = kept
        layer, span = self._layer, self.span
        keys, values = layer.keys[:, span.first : span.stop], layer.values[:, span.first : span.stop]
        if weights is None:
            weights = attention_weights(scaled, keys, self.visible, rows, count)
        head_dim, dtype = keys.shape[2], weights.dtype
        out = folded(gradient.view(rows, count, -1, head_dim), keys.shape[0] // rows)
        of_weights, used = torch.bmm(out, values.transpose(1, 2)), weights
        if of_weights.dtype is not dtype:
            of_weights, scaled, wide = of_weights.to(dtype), scaled.to(dtype), out.to(dtype)
        else:
            wide = out
        if mask is not None:
            factor = 1 / (1 - self.dropout)
            of_weights, used = of_weights * mask * factor, weights * mask * factor
        scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, dtype)
        of_query = torch.bmm(scores if dtype is keys.dtype else scores.to(keys.dtype), keys)
        of_query = of_query.mul_(1 / math.sqrt(head_dim)).view(rows, -1, count, head_dim).transpose(1, 2)
        return of_query, (scaled, scores, used, wide)


class SelfAttentionLink(AttentionLink):
    """Attention to a layer's buffers, after the step's own keys and values are written to them."""

    def __init__(self, memory: LoopMemory, layer: int, span: Span, visible: Visibility, dropout: float) -> None:
        self._memory, self._number = memory, layer
        self.span, self.visible, self.dropout = span, visible, dropout

    def buffers(self, like: Tensor) -> LoopLayer:
        """Return the layer's buffers, made at its first key; see ``LoopMemory.layer``."""
        self._layer = self._memory.layer(self._number, like)
        return self._layer

    def forward(self, x: Any, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map queries [rows, n, heads, head_dim], keys and values [rows, n, kv_heads, head_dim] likewise."""
        query, key, value = x
        self.buffers(key)
        rows, _, heads, head_dim = key.shape
        own = slice(self.span.begin, self.span.stop)
        for buffer, new in ((self._layer.keys, key), (self._layer.values, value)):
            buffer.view(rows, heads, -1, head_dim)[:, :, own] = new.transpose(1, 2)
        return super().forward(query, out)

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Any:
        """Return the gradients of all three; that of the step's keys and values has what later steps added."""
        of_query, factors = self._gradients(kept, gradient)
        layer, span, rows = self._layer, self.span, kept[3]
        layer.add(span, *factors)
        of_key, of_value = (
            each.view(rows, -1, *each.shape[1:])[:, :, span.begin : span.stop].transpose(1, 2).to(layer.keys.dtype)
            for each in (layer.key_gradients, layer.value_gradients)
        )
        return of_query, of_key, of_value


class _SelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, link: SelfAttentionLink) -> Tensor:
        out, ctx.kept = link.forward((query, key, value))
        ctx.link = link
        return out.view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        of_query, of_key, of_value = ctx.link.backward(ctx.kept, outputs[0].flatten(2))
        # The buffers will be added to again before autograd is done with these.
        return of_query, of_key.clone(), of_value.clone(), None


class _CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, link: AttentionLink) -> Tensor:
        out, ctx.kept = link.forward(query)
        ctx.link = link
        return out.view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return ctx.link.backward(ctx.kept, outputs[0].flatten(2)), None


def folded(x: Tensor, kv_heads: int) -> Tensor:
    """Return x [rows, n, heads, head_dim] as [rows * kv_heads, heads / kv_heads * n, head_dim]."""
    rows, count, _, head_dim = x.shape
    if count == 1:
        return x.reshape(rows * kv_heads, -1, head_dim)
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, -1, head_dim)


def weighted(weights: Tensor, values: Tensor, rows: int, count: int, out: Tensor | None = None) -> Tensor:
    """Return sums of values, [rows, n, heads * head_dim], written to ``out`` if that is given.

    Args:
        weights: [rows * kv_heads, heads / kv_heads * n, m], in the order of ``folded``.
        values: [rows * kv_heads, m, head_dim].
        rows: number of rows.
        count: n.
        out: of the values' dtype.
    """
    if count == 1:
        if out is None:
            return torch.bmm(weights, values).view(rows, 1, -1)
        torch.bmm(weights, values, out=out.view(*weights.shape[:2], -1))
        return out
    found = torch.bmm(weights, values).view(rows, -1, count, values.shape[2]).transpose(1, 2)
    if out is None:
        return found.flatten(2)
    out.view(found.shape).copy_(found)
    return out


def attention_weights(scaled: Tensor, keys: Tensor, visible: Visibility, rows: int, count: int) -> Tensor:
    """Return softmax(q k^T), in float32 at least.

    Args:
        scaled: queries times 1 / sqrt(head_dim), [rows * kv_heads, group * n, head_dim].
        keys: [rows * kv_heads, m, head_dim].
        visible: which keys each query sees.
        rows: number of rows.
        count: n.
    """
    scores = torch.bmm(scaled, keys.transpose(1, 2))
    mask = visible.mask
    if visible.causal:
        mask = torch.ones(count, keys.shape[1], dtype=torch.bool, device=keys.device).tril()[None, None]
    if mask is not None:
        by_head = scores.view(rows, -1, scaled.shape[1] // count, count, keys.shape[1])
        by_head.masked_fill_(~mask[:, :, None], -math.inf)
    return scores.softmax(dim=-1, dtype=torch.promote_types(torch.float32, scores.dtype))
