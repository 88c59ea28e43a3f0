"""Keys and values of earlier positions, for all layers of one stack.

``advance`` opens a memory for the positions at hand (``step``), joins each layer's new keys and values to the old ones,
and closes it. A memory that has been stepped stays as it was, so that a segment of time can be computed again; one with
a capacity lends its buffers to the next, so only the newest of those may go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """

    window: int | None = None
    capacity: int | None = None
    index: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    gaps: bool = False

    @property
    def length(self) -> int:
        """Slots in use."""
        return 0 if self.index is None else self.index.shape[1]

    def step(self, inputs: Inputs) -> Step:
        """Open the memory for new positions."""
        return Step(self, inputs)

    def detached(self) -> KeyValueMemory:
        """Return the same memory outside autograd's graph."""
        return KeyValueMemory(
            self.window,
            self.capacity,
            self.index,
            [key.detach() for key in self.keys],
            [value.detach() for value in self.values],
            self.gaps,
        )


class Step:
    """A memory with the positions of one call joined to it.

    Attributes:
        key_index: row index of every slot, old ones first, int64 [rows or 1, m + n].
    """

    def __init__(self, memory: KeyValueMemory, inputs: Inputs) -> None:
        self._memory = memory
        self._new = inputs.length
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.gaps = memory.gaps or inputs.valid is not None
        index = inputs.key_index
        if memory.index is not None:
            rows = max(index.shape[0], memory.index.shape[0])
            index = torch.cat([memory.index.expand(rows, -1), index.expand(rows, -1)], dim=1)
        self.key_index = index

    @property
    def same(self) -> bool:
        """The slots are those of the new positions alone."""
        return self._memory.index is None

    def join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next layer's keys and values [rows, heads, n, head_dim]; return them behind the old ones."""
        layer, old = len(self._keys), self._memory.length
        if self._memory.capacity is not None and self._memory.window is None:
            return self._write(layer, old, key, value)
        keys, values = key, value
        if old:
            keys = torch.cat([self._memory.keys[layer], key], dim=2)
            values = torch.cat([self._memory.values[layer], value], dim=2)
        self._keys.append(keys)
        self._values.append(values)
        return keys, values

    def _write(self, layer: int, old: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write into the layer's buffers; return the parts in use."""
        capacity, stop = self._memory.capacity or 0, old + self._new
        if stop > capacity:
            raise ValueError(f"memory of {capacity} positions cannot take {stop}")
        if old:
            keys, values = self._memory.keys[layer], self._memory.values[layer]
        else:
            shape = (*key.shape[:2], capacity, key.shape[3])
            keys, values = key.new_empty(shape), value.new_empty(shape)
        keys[:, :, old:stop] = key
        values[:, :, old:stop] = value
        self._keys.append(keys)
        self._values.append(values)
        return keys[:, :, :stop], values[:, :, :stop]

    def close(self) -> KeyValueMemory:
        """Return the memory for the next call: all slots, or the newest that its window still reaches."""
        memory = self._memory
        keep = None if memory.window is None else memory.window - 1
        index, keys, values = self.key_index, self._keys, self._values
        if keep is not None and index.shape[1] > keep:
            if keep == 0:
                return KeyValueMemory(memory.window, memory.capacity)
            if self.gaps:
                index, keys, values = newest(index, keys, values, keep)
            else:
                index = index[:, -keep:]
                keys, values = ([each[:, :, -keep:] for each in tensors] for tensors in (keys, values))
        return KeyValueMemory(memory.window, memory.capacity, index, keys, values, self.gaps)


def newest(
    index: Tensor, keys: list[Tensor], values: list[Tensor], count: int
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the ``count`` slots of highest row index in each row, in ascending order; empty slots go first."""
    where = index.expand(keys[0].shape[0] if keys else index.shape[0], -1).argsort(dim=1, stable=True)[:, -count:]

    def take(tensor: Tensor) -> Tensor:
        return pick(tensor.transpose(1, 2), where).transpose(1, 2)

    return pick(index, where), [take(key) for key in keys], [take(value) for value in values]
