"""Keys and values of earlier positions, for all layers of one stack.

``advance`` opens a memory for the positions at hand (``step``), joins each layer's new keys and values to the old ones,
and closes it. A memory that has been stepped stays as it was, so that a segment of time can be computed again; one with
a capacity lends its buffers to the next, so only the newest of those may go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipeline.models.inputs import Inputs, pick


@dataclass
class KeyValueMemory:
    """Keys and values of the positions so far: differentiable, growing by concatenation, cut to a window.

    Attributes:
        window: W: only the newest W - 1 positions are kept for the next step; None keeps all.
        capacity: positions for which buffers are set aside once and written in place; only without a window, only
            outside autograd. None concatenates.
        index: row index of each slot, int64 [rows or 1, m]; None while empty.
        keys: for each layer [rows, heads, m, head_dim]; with a capacity, that many positions long.
        values: likewise.
        gaps: some slots are empty (index -1).
        stop: row index after the last position taken in.
        rewrites: positions that it holds already get new keys and values in the place of the old, and no window is cut,
            since queries anywhere in the row must find theirs.
    """

    window: int | None = None
    capacity: int | None = None
    index: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    gaps: bool = False
    stop: int = 0
    rewrites: bool = False

    @property
    def length(self) -> int:
        """Slots in use."""
        return 0 if self.index is None else self.index.shape[1]

    def step(self, inputs: Inputs) -> Step:
        """Open the memory for new positions, or for some that it holds if it is rewritable."""
        if self.rewrites and self.index is not None and inputs.stop <= self.stop:
            return Rewriting(self, inputs)
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


class Step:
    """A memory with the positions of one call joined to it.

    Attributes:
        key_index: row index of every slot, old ones first, int64 [rows or 1, m + n].
    """

    def __init__(self, memory: KeyValueMemory, inputs: Inputs) -> None:
        self._memory = memory
        self._new, self._stop = inputs.length, inputs.stop
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._gaps = memory.gaps or inputs.valid is not None
        index = inputs.key_index
        if memory.index is not None:
            rows = max(index.shape[0], memory.index.shape[0])
            index = torch.cat([memory.index.expand(rows, -1), index.expand(rows, -1)], dim=1)
        self.key_index = index

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

    def join(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values [rows, heads, n, head_dim]; return them behind the old ones."""
        old = self._memory.length
        if self._memory.capacity is not None and self._memory.window is None:
            return self._write(layer, old, key, value)
        keys, values = key, value
        if old:
            keys = torch.cat([self._memory.keys[layer], key], dim=2)
            values = torch.cat([self._memory.values[layer], value], dim=2)
        self._keys[layer], self._values[layer] = keys, values
        return keys, values

    def _write(self, layer: int, old: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write into the layer's buffers; return the parts in use."""
        capacity, stop = self._memory.capacity or 0, old + self._new
        if stop > capacity and not self._gaps:
            raise ValueError(f"memory of {capacity} positions cannot take {stop}")
        if old and stop <= self._memory.keys[layer].shape[2]:
            keys, values = self._memory.keys[layer], self._memory.values[layer]
        else:  # the first positions, or so many empty slots among them that the buffers are too short
            shape = (*key.shape[:2], capacity if stop <= capacity else 2 * stop, key.shape[3])
            keys, values = key.new_empty(shape), value.new_empty(shape)
            if old:
                keys[:, :, :old] = self._memory.keys[layer][:, :, :old]
                values[:, :, :old] = self._memory.values[layer][:, :, :old]
        keys[:, :, old:stop] = key
        values[:, :, old:stop] = value
        self._keys[layer], self._values[layer] = keys, values
        return keys[:, :, :stop], values[:, :, :stop]

    def close(self) -> KeyValueMemory:
        """Return the memory for the next call: all slots, or the newest that its window still reaches."""
        layers = sorted(self._keys)
        keys, values = [self._keys[layer] for layer in layers], [self._values[layer] for layer in layers]
        index, stop = self.key_index, max(self._stop, self._memory.stop)
        return cut(replace(self._memory, index=index, keys=keys, values=values, gaps=self._gaps, stop=stop))


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
