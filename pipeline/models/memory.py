"""Keys and values of earlier positions, for all layers of one stack.

``advance`` opens a memory for the positions at hand (``step``), joins each layer's new keys and values to the old ones,
and closes it. A memory that has been stepped stays as it was, so that a segment of time can be computed again; one with
a capacity lends its buffers to the next, so only the newest of those may go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from pipeline.models.buffers import Buffers, window_size
from pipeline.models.inference import Attention
from pipeline.models.inputs import Inputs, Visibility, pick
from pipeline.models.layers import attend

Attends = Callable[[Tensor, Tensor, Tensor, Visibility, float], Tensor]
"""Attention of queries to their own keys and values, and to what else is remembered."""
Recalls = Callable[[Tensor, Visibility, float], Tensor]
"""Attention of queries to what is remembered alone."""


@dataclass
class KeyValueMemory:
    """Keys and values of the positions so far: differentiable, growing by concatenation, cut to a window.

    Attributes:
        window: W: only the newest W - 1 positions are kept for the next step; None keeps all.
        capacity: positions for which buffers are set aside once and written in place, only outside autograd. With a
            window they are hardly longer than it, and take positions without end. None concatenates.
        index: row index of each slot, int64 [rows or 1, m]; None while empty.
        keys: for each layer [rows, heads, m, head_dim]; with a capacity and no window, that many positions long.
        values: likewise.
        gaps: some slots are empty (index -1).
        stop: row index after the last position taken in.
        rewrites: positions that it holds already get new keys and values in the place of the old, and no window is cut,
            since queries anywhere in the row must find theirs.
        buffers: where keys and values lie, with a capacity; None while empty.
    """

    window: int | None = None
    capacity: int | None = None
    index: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    gaps: bool = False
    stop: int = 0
    rewrites: bool = False
    buffers: Buffers | None = None

    @property
    def length(self) -> int:
        """Slots in use."""
        return 0 if self.index is None else self.index.shape[1]

    def step(self, inputs: Inputs) -> Step:
        """Open the memory for new positions, or for some that it holds if it is rewritable."""
        if self.rewrites and self.index is not None and inputs.stop <= self.stop:
            return Rewriting(self, inputs)
        if self.capacity is not None and self.window != 1:
            return BufferedStep(self, inputs)
        return Step(self, inputs)

    def rewritable(self) -> KeyValueMemory:
        """Return the same as a memory whose positions may be computed again."""
        return replace(self, rewrites=True)

    def settled(self) -> KeyValueMemory:
        """Return the same as a memory that only grows, cut to its window."""
        return cut(replace(self, rewrites=False))

    def detached(self) -> KeyValueMemory:
        """Return the same memory outside autograd's graph."""
        keys, values = ([tensor.detach() for tensor in tensors] for tensors in (self.keys, self.values))
        return replace(self, keys=keys, values=values)


@dataclass(frozen=True)
class Shared:
    """Keys and values that all positions of a row share, where key j belongs to row index j.

    Attributes:
        key: [rows, heads, m, head_dim].
        value: likewise.
    """

    key: Tensor
    value: Tensor

    @property
    def length(self) -> int:
        """Number of keys."""
        return self.key.shape[2]

    def attend(self, reach: int, query: Tensor, visible: Visibility, dropout: float = 0.0) -> Tensor:
        """Attend to the first ``reach`` keys; see ``layers.attend``."""
        return attend(query, self.key[:, :, :reach], self.value[:, :, :reach], visible, dropout)

    def attention(self, reach: int) -> Recalls:
        """Return ``attend`` to the first ``reach`` keys."""
        return Attention(partial(self.attend, reach))


class Step:
    """A memory with the positions of one call joined to it.

    Attributes:
        key_index: row index of every slot, old ones first, int64 [rows or 1, m + n].
        slices: ``attend`` leaves out keys that are too far back for all queries (``Visibility.newest``).
    """

    slices = False

    def __init__(self, memory: KeyValueMemory, inputs: Inputs) -> None:
        self._memory = memory
        self._new, self._stop = inputs.length, inputs.stop
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._gaps = memory.gaps or inputs.valid is not None
        self.key_index = self._joined(inputs.key_index)

    def _joined(self, index: Tensor) -> Tensor:
        """Return the row indices of new slots, int64 [rows or 1, n], behind those of the old ones."""
        old = self._memory.index
        if old is None:
            return index
        rows = max(index.shape[0], old.shape[0])
        return torch.cat([old.expand(rows, -1), index.expand(rows, -1)], dim=1)

    @property
    def same(self) -> bool:
        """The slots are those of the new positions alone."""
        return self._memory.index is None

    @property
    def exact(self) -> bool:
        """No slot is empty, and none lies after the new positions."""
        return not self._gaps

    @property
    def recomputes(self) -> bool:
        """A layer may be computed again in backward: its keys and values are written to no buffer in place."""
        return self._memory.rewrites and self._memory.capacity is None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, visible: Visibility, dropout: float = 0.0
    ) -> Tensor:
        """Add a layer's keys and values [rows, n, heads, head_dim], and attend to all; see ``layers.attend``."""
        return attend(query, *self.join(layer, key.transpose(1, 2), value.transpose(1, 2)), visible, dropout)

    def attention(self, layer: int) -> Attends:
        """Return ``attend`` of a layer."""
        return Attention(partial(self.attend, layer))

    def join(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values [rows, heads, n, head_dim]; return them behind the old ones."""
        keys, values = key, value
        if self._memory.length:
            keys = torch.cat([self._memory.keys[layer], key], dim=2)
            values = torch.cat([self._memory.values[layer], value], dim=2)
        self._keys[layer], self._values[layer] = keys, values
        return keys, values

    def close(self) -> KeyValueMemory:
        """Return the memory for the next call: all slots, or the newest that its window still reaches."""
        layers = sorted(self._keys)
        keys, values = [self._keys[layer] for layer in layers], [self._values[layer] for layer in layers]
        index, stop = self.key_index, max(self._stop, self._memory.stop)
        return cut(replace(self._memory, index=index, keys=keys, values=values, gaps=self._gaps, stop=stop))


class BufferedStep(Step):
    """A memory with a capacity, to whose buffers the positions of one call are written.

    A call of more positions than a window's buffers take is joined as without them; what the window still reaches is
    written to them at the next.
    """

    slices = True

    def __init__(self, memory: KeyValueMemory, inputs: Inputs) -> None:
        capacity, used, wanted = memory.capacity or 0, memory.length, memory.length + inputs.length
        gaps = memory.gaps or inputs.valid is not None
        if memory.window is None and wanted > capacity and not gaps:
            raise ValueError(f"memory of {capacity} positions cannot take {wanted}")
        size = capacity if memory.window is None else window_size(memory.window, capacity)
        buffers = memory.buffers or Buffers(size)
        if used and not buffers.holds(memory.keys, memory.values):  # they were made anew elsewhere
            assert memory.index is not None
            buffers = Buffers(max(size, used))
            buffers.fill(memory.index, memory.keys, memory.values)
        self._buffers, self._used = buffers, used
        self._fits = memory.window is None or memory.rewrites or wanted <= buffers.size
        super().__init__(memory, inputs)

    def _joined(self, index: Tensor) -> Tensor:
        return self._buffers.admit(index, self._used) if self._fits else super()._joined(index)

    def join(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values [rows, heads, n, head_dim]; return them behind the old ones."""
        if self._fits:
            return self._buffers.write(layer, self._used, key, value)
        return super().join(layer, key, value)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, visible: Visibility, dropout: float = 0.0
    ) -> Tensor:
        """Add a layer's keys and values, and attend to those in reach; see ``Step.attend``."""
        keys, values = self.join(layer, key.transpose(1, 2), value.transpose(1, 2))
        if visible.newest is not None:
            keys, values = keys[:, :, -visible.newest :], values[:, :, -visible.newest :]
        return attend(query, keys, values, visible, dropout)

    def close(self) -> KeyValueMemory:
        """Return the memory for the next call; see ``Step.close``."""
        if not self._fits:
            return super().close()
        old, buffers, used = self._memory, self._buffers, self._used + self._new
        if old.window is not None and not old.rewrites and not self._gaps:
            used = buffers.keep(used, old.window - 1)
        keys, values = buffers.held(None if old.window is None else used)
        index, stop = buffers.index(used), max(self._stop, old.stop)
        return cut(replace(old, index=index, keys=keys, values=values, gaps=self._gaps, stop=stop, buffers=buffers))


class Rewriting(Step):
    """A rewritable memory some of whose positions get new keys and values."""

    def __init__(self, memory: KeyValueMemory, inputs: Inputs) -> None:
        super().__init__(KeyValueMemory(), inputs)
        assert memory.index is not None
        self._memory = memory
        self._gaps = memory.gaps
        self.key_index = memory.index
        slots = inputs.index - (memory.stop - memory.length)
        self._slots = slots[0] if slots.shape[0] == 1 and inputs.valid is None else slots
        self._valid = inputs.valid

    @property
    def exact(self) -> bool:
        """False: slots lie after the new positions."""
        return False

    def join(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Replace a layer's keys and values at the positions [rows, heads, n, head_dim]; return those of all slots."""
        keys, values = (
            self._replaced(old, new)
            for old, new in ((self._memory.keys[layer], key), (self._memory.values[layer], value))
        )
        self._keys[layer], self._values[layer] = keys, values
        length = self._memory.length
        return keys[:, :, :length], values[:, :, :length]

    def _replaced(self, old: Tensor, new: Tensor) -> Tensor:
        new = new.to(old.dtype)
        if self._slots.dim() == 1:
            if self._memory.capacity is not None:
                return old.index_copy_(2, self._slots, new)
            return old.index_copy(2, self._slots, new)
        where = self._slots
        if self._valid is not None:  # slots without a position are written to a place that is cut off again
            old = torch.cat([old, torch.zeros_like(old[:, :, :1])], dim=2)
            where = where.masked_fill(~self._valid, old.shape[2] - 1)
        where = where[:, None, :, None].expand_as(new)
        replaced = old.scatter(2, where, new)
        return replaced if self._valid is None else replaced[:, :, :-1]


def cut(memory: KeyValueMemory) -> KeyValueMemory:
    """Return the memory without the slots that its window no longer reaches; a rewritable one whole."""
    if memory.window is None or memory.index is None or memory.rewrites:
        return memory
    keep = memory.window - 1
    if memory.length <= keep:
        return memory
    if keep == 0:
        return KeyValueMemory(memory.window, memory.capacity, stop=memory.stop)
    index, keys, values = memory.index, memory.keys, memory.values
    if memory.gaps:
        index, keys, values = newest(index, keys, values, keep)
    else:
        index = index[:, -keep:]
        keys, values = ([each[:, :, -keep:] for each in tensors] for tensors in (keys, values))
    return replace(memory, index=index, keys=keys, values=values)


def newest(
    index: Tensor, keys: list[Tensor], values: list[Tensor], count: int
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the ``count`` slots of highest row index in each row, in ascending order; empty slots go first."""
    where = index.expand(keys[0].shape[0] if keys else index.shape[0], -1).argsort(dim=1, stable=True)[:, -count:]

    def take(tensor: Tensor) -> Tensor:
        return pick(tensor.transpose(1, 2), where).transpose(1, 2)

    return pick(index, where), [take(key) for key in keys], [take(value) for value in values]
