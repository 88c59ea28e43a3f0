"""Attention within a step of a loop by one compiled call each way, from the packed projection to the output's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.models.inputs import Visibility
from pipeline.models.kernels import MOST_HEAD, Attention, Kernels
from pipeline.models.links import HeadsLink, Link, QueriesLink, RMSNormLink, RotationLink
from pipeline.models.loop_memory import KEPT_KEYS, AttentionLink, LoopLayer, folded

MOST_QUERIES = 16
"""Queries of one head of keys up to which a call is faster than torch's batched products."""


@dataclass(frozen=True)
class Attended:
    """The links of attention with its projections, but for what differs from step to step.

    Attributes:
        entry: from the residual stream to the packed projection.
        heads: makes the link of its heads, given the rotation.
        output: the projection of what attention gives.
        kernels: compiled operations; None: torch's.
    """

    entry: Sequence[Link]
    heads: Callable[[RotationLink], HeadsLink | QueriesLink]
    output: Sequence[Link]
    kernels: Kernels | None

    def links(self, rotation: RotationLink, attends: Any, visible: Visibility) -> list[Link] | None:
        """Return the links of a step; None where ``attends`` is not a loop's (``loop_memory.LoopAttention``)."""
        make = getattr(attends, "link", None)
        if make is None:
            return None
        return [*self.entry, *attending(self.heads(rotation), make(visible, 0.0), self.kernels), *self.output]


def attending(heads: HeadsLink | QueriesLink, attention: AttentionLink, kernels: Kernels | None) -> list[Link]:
    """Return the heads of a projection, and attention of them, as links."""
    return [heads, attention] if kernels is None else [AttendingLink(heads, attention, kernels)]


class AttendingLink:
    """The heads of a projection and attention of them as one link.

    What the kernels do not take goes through the two links that it is made of.

    Args:
        heads: makes queries, and keys and values if they are the layer's own, of the projection.
        attention: what is attended to.
        kernels: compiled operations.
    """

    def __init__(self, heads: HeadsLink | QueriesLink, attention: AttentionLink, kernels: Kernels) -> None:
        self._heads, self._attention, self._kernels = heads, attention, kernels
        self._norm = next((norm for norm in heads.norm if isinstance(norm, RMSNormLink)), None)

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map [rows, n, packed] to [rows, n, heads * head_dim]."""
        found = self._described(x)
        if found is None:
            y, of_heads = self._heads.forward(x)
            y, of_attention = self._attention.forward(y, out)
            return y, (of_heads, of_attention)
        call, layer, count = found
        rows, n, groups, width = call.rows, call.n, layer.keys.shape[0], call.width
        out = x.new_empty(rows, n, count * width) if out is None else out
        queries = groups * call.group * n
        scaled = x.new_empty(groups, call.group * n, width)
        weights = x.new_empty(groups, call.group * n, call.stop - call.first)
        factors = x.new_empty(queries + (groups * n if call.own else 0))
        call.out, call.factors = out.data_ptr(), factors.data_ptr()
        call.scaled, call.weights = scaled.data_ptr(), weights.data_ptr()
        self._kernels.attend(x.dtype, call)
        few = call.stop - call.first <= KEPT_KEYS
        return out, (call, layer, x, scaled, weights if few else None, factors)

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x; add those of keys and values to the layer's."""
        if len(kept) == 2:
            of_heads, of_attention = kept
            return self._heads.backward(of_heads, self._attention.backward(of_attention, gradient), out)
        call, layer, x, scaled, weights, _ = kept
        norm, span, own = self._norm, self._attention.span, bool(call.own)
        gradient, out = gradient.contiguous(), x.new_empty(x.shape) if out is None else out
        scores = x.new_empty(*scaled.shape[:2], call.stop - call.first)
        if weights is None:
            weights, call.again = x.new_empty(scores.shape), True
            call.weights = weights.data_ptr()
        if norm is not None and norm.weight is not None:
            call.sums = norm.weight.running(x.dtype, self._kernels.threads, norm.root).data_ptr()
            call.w = norm.weight.scaled(x.dtype, norm.root).data_ptr()
        call.near = layer.reach(span) if own else span.stop
        call.of_keys, call.of_values = layer.key_gradients.data_ptr(), layer.value_gradients.data_ptr()
        call.gradient, call.scores, call.of_x = gradient.data_ptr(), scores.data_ptr(), out.data_ptr()
        self._kernels.attend_back(x.dtype, call)
        if own and span.live >= call.near:
            return out
        by_head = folded(gradient.view(call.rows, call.n, -1, call.width), call.kv_heads)
        if own:
            layer.put_aside_far(span, call.near, scaled, scores, weights, by_head)
        else:
            layer.add_shared(span, scaled, scores, weights, by_head)
        return out

    def _described(self, x: Tensor) -> tuple[Attention, LoopLayer, int] | None:
        """Return the call for a projection x, the buffers and the number of heads; None if the kernels take none."""
        heads, attention = self._heads, self._attention
        norm, width, (cos, sin) = self._norm, heads.head_dim, heads.rotation.tables()
        own = isinstance(heads, HeadsLink)
        visible, span, dropout = attention.visible, attention.span, attention.dropout
        if (
            dropout
            or visible.newest is not None
            or width > MOST_HEAD
            or not Kernels.take(x)
            or cos.dtype is not x.dtype
            or (norm is not None and norm.weight is None)
        ):
            return None
        rows, n, _ = x.shape
        by_head = x.view(rows, n, -1, width)
        layer = attention.buffers(by_head[:, :, -heads.heads[1] :] if isinstance(heads, HeadsLink) else by_head)
        kv_heads = layer.keys.shape[0] // rows
        count = x.shape[2] // width - (2 * kv_heads if own else 0)
        group = count // kv_heads
        if group * n > MOST_QUERIES or layer.keys.dtype is not x.dtype:
            return None
        weight = None if norm is None or norm.weight is None else norm.weight.scaled(x.dtype, norm.root)
        mask = visible.mask
        call = Attention(
            rows,
            n,
            kv_heads,
            group,
            width,
            own,
            layer.keys.shape[1],
            span.first,
            span.stop,
            span.begin,
            span.stop,
            visible.causal,
            False,
            self._kernels.threads,
            width if weight is not None and weight.dim() > 1 else 0,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
        )
        if mask is not None:
            mask = mask.contiguous()
            call.mask, call.mask_step = mask.data_ptr(), mask.stride(2)
            call.mask_row_step = mask.stride(0) if mask.shape[0] > 1 else 0
        if norm is not None and weight is not None:
            call.w, call.least = weight.data_ptr(), norm.least
        call.x, call.cos, call.sin = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
        call.keys, call.values = layer.keys.data_ptr(), layer.values.data_ptr()
        call.held = (mask, cos, sin)
        return call, layer, count
