"""Room for keys and values that inference writes in place: nothing is allocated or copied for a token.

The slots in use lie behind each other, and new ones are written behind them. Where old slots are let go (a window), the
buffers are longer than what is ever in use; when their end is reached, the slots in use are moved to the front. So one
slot is moved for every one written, at most, and attention always reads one piece of memory, in the order of positions.
"""

from __future__ import annotations

from operator import is_

from torch import Tensor

SPARE = 64
"""Slots beyond a window at least, so that short windows are not moved all the time."""


def window_size(window: int, capacity: int) -> int:
    """Return the slots to set aside for a window of W positions in a row of at most ``capacity``."""
    return min(capacity, window - 1 + max(window - 1, SPARE))


class Buffers:
    """Keys and values of all layers of one stack.

    Attributes:
        size: slots that there is room for.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._begin = 0
        self._index: Tensor | None = None
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._given: tuple[list[Tensor], list[Tensor]] = [], []

    def admit(self, index: Tensor, used: int) -> Tensor:
        """File new slots under their row indices, int64 [rows or 1, n], behind the ``used`` ones; return all in use.

        Where the end is reached, what is in use is moved to the front, or to longer buffers if it must.
        """
        rows, new = index.shape
        if self._begin + used + new > self.size:
            self._move(used, used + new)
        if self._index is None:
            self._index = index.new_empty(rows, self.size)
        elif self._index.shape[0] < rows:
            self._index = self._index.repeat(rows, 1)
        self._index.narrow(1, self._begin + used, new).copy_(index)
        return self._index.narrow(1, self._begin, used + new)

    def write(self, layer: int, used: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [rows, heads, n, head_dim] behind the ``used`` slots; return those of all in use."""
        keys, values = self._keys.get(layer), self._values.get(layer)
        if keys is None or values is None:
            rows, heads, _, head_dim = key.shape
            keys = self._keys[layer] = key.new_empty(rows, heads, self.size, head_dim)
            values = self._values[layer] = value.new_empty(rows, heads, self.size, value.shape[3])
        begin, new = self._begin, key.shape[2]
        keys.narrow(2, begin + used, new).copy_(key)
        values.narrow(2, begin + used, new).copy_(value)
        return keys.narrow(2, begin, used + new), values.narrow(2, begin, used + new)

    def keep(self, used: int, most: int) -> int:
        """Let go of all but the newest ``most`` of the ``used`` slots; return how many are left."""
        left = min(used, most)
        self._begin += used - left
        return left

    def index(self, used: int) -> Tensor:
        """Return the row indices of the slots in use, int64 [rows or 1, used]."""
        assert self._index is not None
        return self._index.narrow(1, self._begin, used)

    def held(self, used: int | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and values of each layer, [rows, heads, used, head_dim]; None: the buffers themselves."""
        layers = sorted(self._keys)
        keys, values = [self._keys[layer] for layer in layers], [self._values[layer] for layer in layers]
        if used is not None:
            keys, values = ([each.narrow(2, self._begin, used) for each in tensors] for tensors in (keys, values))
        self._given = keys, values
        return keys, values

    def holds(self, keys: list[Tensor], values: list[Tensor]) -> bool:
        """Return whether keys and values of all layers are those that ``held`` returned last."""
        return all(
            len(one) == len(other) and all(map(is_, one, other))
            for one, other in zip(self._given, (keys, values), strict=True)
        )

    def fill(self, index: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
        """Take in slots from elsewhere: row indices [rows or 1, m], keys and values [rows, heads, m or more, head_dim].

        Nothing is in use before.
        """
        used = self.admit(index, 0).shape[1]
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            self.write(layer, 0, key[:, :, :used], value[:, :, :used])

    def _move(self, used: int, wanted: int) -> None:
        """Move what is in use to the front, of buffers that are twice as long as ``wanted`` if these are too short."""
        begin, self._begin = self._begin, 0
        if wanted > self.size:
            self.size = 2 * wanted
        if self._index is not None:
            self._index = moved(self._index, 1, begin, used, self.size)
        for tensors in (self._keys, self._values):
            for layer, tensor in tensors.items():
                tensors[layer] = moved(tensor, 2, begin, used, self.size)


def moved(tensor: Tensor, dim: int, begin: int, count: int, size: int) -> Tensor:
    """Return a tensor of ``size`` slots along ``dim`` that begins with the ``count`` slots from ``begin`` on.

    It is the given one, written in place, if that has as many.
    """
    part = tensor.narrow(dim, begin, count)
    if size == tensor.shape[dim]:
        part = part.clone() if begin < count else part  # what overlaps cannot be copied
    else:
        tensor = tensor.new_empty(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    tensor.narrow(dim, 0, count).copy_(part)
    return tensor
