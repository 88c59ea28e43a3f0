"""The order in which a run sees the sequences of its data: a new random permutation every epoch, in constant memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8

U64 = NDArray[np.uint64]


class GlobalOrder:
    """Maps the endless global sample number to a sequence number, by a seeded permutation of each epoch.

    Sample g belongs to epoch g // count and gets the sequence that the epoch's permutation puts at g % count. The
    permutation is a Feistel network over a grid a little larger than ``count``, walked until it falls inside (cycle
    walking), so any sample's sequence is computed directly: no state, no shuffle buffer, nothing to save. It uses
    64-bit integer arithmetic alone, so it is the same on every machine and numpy version; tests hold golden values.

    Args:
        seed: any integer of 64 bits.
        count: number of sequences.
    """

    def __init__(self, seed: int, count: int) -> None:
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1")
        if count > 1 << 62:
            raise ValueError(f"count is {count}; it must be at most 2**62")
        self.seed = seed
        self.count = count
        # The grid of left x right cells: left is about the root of count, and fewer than left cells lie outside.
        self._left = math.isqrt(count - 1) + 1
        self._right = -(-count // self._left)
        self._seed = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))

    def sequence(self, samples: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the sequence number of each global sample number (0, 1, 2, ... without end)."""
        shape = np.shape(samples)
        flat = np.asarray(samples, dtype=np.int64).ravel()
        if flat.size == 0:
            return np.empty(shape, dtype=np.int64)
        if flat.min() < 0:
            raise ValueError("a global sample number must not be negative")
        epochs, places = np.divmod(flat, np.int64(self.count))
        keys = self._keys(epochs)
        values = self._permute(places.astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self.count)
        while outside.size:
            some = [key if key.size == 1 else key[outside] for key in keys]
            values[outside] = self._permute(values[outside], some)
            outside = outside[values[outside] >= self.count]
        return values.astype(np.int64).reshape(shape)

    def _keys(self, epochs: NDArray[np.int64]) -> list[U64]:
        # Mostly all samples asked for lie in one epoch: one key a round then serves them all.
        if epochs[0] == epochs[-1] and (epochs == epochs[0]).all():
            epochs = epochs[:1]
        epoch_key = _mix(self._seed + _mix(epochs.astype(np.uint64) + np.uint64(1)))
        return [_mix(epoch_key + np.array([number + 1], dtype=np.uint64)) for number in range(ROUNDS)]

    def _permute(self, values: U64, keys: list[U64]) -> U64:
        left_size, right_size = np.uint64(self._left), np.uint64(self._right)
        left, right = np.divmod(values, right_size)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + _mix(right + key) % left_size) % left_size
            else:
                right = (right + _mix(left + key) % right_size) % right_size
        return left * right_size + right


def _mix(values: U64) -> U64:
    """Scramble 64-bit integers (the finalizer of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
