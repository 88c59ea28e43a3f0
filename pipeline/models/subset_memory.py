"""Keys and values of rows whose positions are computed anew in subsets, one after the other (``subsets``).

The subsets' keys and values lie apart, so that one that is computed again takes its place and nothing is copied into
the middle of a row. Over long rows attention, too, goes subset by subset: a query of subset i sees the keys of subset j
up to its own place in its subset, or, where j comes after i, up to the place before. So it is causal, and needs no
mask. The parts are put together by their log-sum-exp, as attention over blocks is (Dao et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.models.inputs import Inputs, Visibility
from pipeline.models.layers import attend_same
from pipeline.models.memory import Attends
from pipeline.models.subsets import Parts, Subsets

LONG = 768
"""Queries of a subset from which on attention goes subset by subset: with fewer, a mask costs less."""

_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_FLASH_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


@dataclass(frozen=True)
class SubsetMemory:
    """Keys and values of all positions of a row; it stands in for a ``KeyValueMemory`` in ``advance``.

    The first step takes in all positions, each one after it a subset, in order.

    Attributes:
        subsets: how the positions are divided.
        turn: the subset that the next step computes; None: all of them.
        index: row index of each subset's positions, int64 [rows or 1, n]; empty before the first step.
        key_parts: for each layer the keys of each subset, or in one tensor all, [rows, n, kv_heads, head_dim].
        value_parts: likewise.
    """

    subsets: Subsets
    turn: int | None = None
    index: Parts = ()
    key_parts: Mapping[int, Parts] = field(default_factory=dict)
    value_parts: Mapping[int, Parts] = field(default_factory=dict)

    def step(self, inputs: Inputs) -> SubsetStep:
        """Open the memory for all positions, or for the subset whose turn it is."""
        return SubsetStep(self, inputs)

    @property
    def keys(self) -> list[Tensor]:
        """Keys of each layer in row order, [rows, kv_heads, n, head_dim]."""
        return self._joined(self.key_parts)

    @property
    def values(self) -> list[Tensor]:
        """Values, likewise."""
        return self._joined(self.value_parts)

    def _joined(self, held: Mapping[int, Parts]) -> list[Tensor]:
        join = (lambda parts: parts[0]) if self.turn == 0 else self.subsets.collect
        return [join(parts).transpose(1, 2) for _, parts in sorted(held.items())]


class SubsetStep:
    """A memory with the positions of one call in it; see ``memory.Step``.

    Attributes:
        key_index: row index of every key, subset after subset, int64 [rows or 1, m].
        same: a query sees the keys that do not lie after it; what else there is to say needs a mask.
        exact: no slot is empty.
        recomputes: nothing is written in place, so that a layer may be computed again in backward.
    """

    same = exact = recomputes = True

    def __init__(self, memory: SubsetMemory, inputs: Inputs) -> None:
        self._memory, self._turn = memory, memory.turn
        self._query_index = inputs.index
        self._index = memory.subsets.index(inputs) if memory.turn is None else memory.index
        self._keys: dict[int, Parts] = {}
        self._values: dict[int, Parts] = {}
        self._mask: Tensor | None = None
        self.key_index = inputs.index if memory.turn is None else torch.cat(self._index, dim=1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, visible: Visibility, dropout: float = 0.0
    ) -> Tensor:
        """Put a layer's keys and values [rows, n, heads, head_dim] in place, and attend; see ``layers.attend``."""
        if self._turn is None:
            self._keys[layer], self._values[layer] = (key,), (value,)
            return attend_same(query, key, value, visible, dropout)
        keys, values = self._keys[layer], self._values[layer] = (
            self._replaced(self._memory.key_parts[layer], key),
            self._replaced(self._memory.value_parts[layer], value),
        )
        if visible.mask is None and len(keys) > 1:
            if takes_parts(query, dropout):
                return attend_parts(query, keys, values, self._turn)
            visible = Visibility(self._causal_mask())
        return attend_same(query, torch.cat(keys, dim=1), torch.cat(values, dim=1), visible, dropout)

    def _replaced(self, held: Parts, new: Tensor) -> Parts:
        if self._turn == 0:  # nobody reads what the plain pass left for the first subset
            return (new, *self._memory.subsets.deal(held[0], 1))
        assert self._turn is not None
        return (*held[: self._turn], new, *held[self._turn + 1 :])

    def attention(self, layer: int) -> Attends:
        """Return ``attend`` of a layer."""
        return partial(self.attend, layer)

    def _causal_mask(self) -> Tensor:
        if self._mask is None:
            self._mask = (self.key_index[:, None] <= self._query_index[:, :, None])[:, None]
        return self._mask

    def close(self) -> SubsetMemory:
        """Return the memory for the next call."""
        turn = 0 if self._turn is None else self._turn + 1
        return replace(self._memory, turn=turn, index=self._index, key_parts=self._keys, value_parts=self._values)


def takes_parts(query: Tensor, dropout: float) -> bool:
    """Return whether attention goes subset by subset: where that pays, and a kernel tells its log-sum-exp."""
    return (
        query.shape[1] >= LONG
        and _FLASH is not None
        and query.device.type == "cpu"
        and not dropout
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.maybe_current_level()
    )


def attend_parts(query: Tensor, keys: Parts, values: Parts, turn: int) -> Tensor:
    """Attend from a subset to all of them.

    Args:
        query: of subset ``turn``, [rows, n, heads, head_dim].
        keys: of each subset, [rows, m, kv_heads, head_dim].
        values: likewise.
        turn: number of the queries' subset.

    Returns:
        [rows, n, heads, head_dim].
    """
    group = query.shape[2] // keys[0].shape[2]
    parts: list[Tensor] = []
    delays: list[int] = []
    for number in (turn, *range(turn), *range(turn + 1, len(keys))):  # the first query sees a key in its own alone
        delay = int(number > turn)
        reach = query.shape[1] - delay
        if reach:
            delays.append(delay)
            for each in (keys[number][:, :reach], values[number][:, :reach]):
                each = each.to(query.dtype).transpose(1, 2)
                parts.append(each.repeat_interleave(group, dim=1) if group > 1 else each)
    result: Tensor = _Parts.apply(query, tuple(delays), *parts)
    return result


class _Parts(torch.autograd.Function):
    """Attention to several parts of the keys, each causal, put together.

    A part's gradients are those of attention to it alone, given output and log-sum-exp of the whole.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, delays: tuple[int, ...], *parts: Tensor) -> Tensor:
        assert _FLASH is not None
        queries = query.transpose(1, 2)
        found = [
            _FLASH(queries[:, :, delay:], key, value, 0.0, True)
            for delay, key, value in zip(delays, parts[::2], parts[1::2], strict=True)
        ]
        total = found[0][1].clone()
        for delay, (_, each) in zip(delays[1:], found[1:], strict=True):
            total[..., delay:] = torch.logaddexp(total[..., delay:], each)
        out = found[0][0].to(total.dtype) * (found[0][1] - total).exp_()[..., None]
        for delay, (part, each) in zip(delays[1:], found[1:], strict=True):
            out[:, :, delay:].addcmul_(part.to(total.dtype), (each - total[..., delay:]).exp_()[..., None])
        out = out.to(query.dtype)
        ctx.delays = delays
        ctx.save_for_backward(query, out, total, *parts)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        assert _FLASH_BACKWARD is not None
        query, out, total, *parts = ctx.saved_tensors
        queries, gradient = query.transpose(1, 2), outputs[0].transpose(1, 2)
        of_query: Tensor | None = None
        of_parts: list[Tensor] = []
        for delay, key, value in zip(ctx.delays, parts[::2], parts[1::2], strict=True):
            query_part, of_key, of_value = _FLASH_BACKWARD(
                gradient[:, :, delay:],
                queries[:, :, delay:],
                key,
                value,
                out[:, :, delay:],
                total[..., delay:],
                0.0,
                True,
            )
            of_parts += [of_key, of_value]
            if of_query is None:
                of_query = query_part
            else:
                of_query[:, :, delay:] += query_part
        assert of_query is not None
        return of_query.transpose(1, 2), None, *of_parts
