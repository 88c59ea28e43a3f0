"""Positions of a row, and all that is known of them before any state is fed back.

A row is a sequence of tokens. Documents lie in it one after another, so one number a position is enough to say which
earlier positions it may see: the row index at which its document begins (``starts``). Padding on the left is a document
of its own that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor


class SharedKeysValues(Protocol):
    """Keys and values that all positions of a row share; see ``memory.Shared``."""

    @property
    def length(self) -> int:
        """Number of keys."""

    def attend(self, reach: int, query: Tensor, visible: Visibility, dropout: float = 0.0) -> Tensor:
        """Attend to the first ``reach`` keys; see ``layers.attend``."""

    def attention(self, reach: int) -> Callable[[Tensor, Visibility, float], Tensor]:
        """Return ``attend`` to the first ``reach`` keys."""


@dataclass(frozen=True)
class Inputs:
    """What an architecture computed from tokens alone for some positions, plus where these positions lie.

    Attributes:
        index: row index of each position, int64 [rows or 1, n].
        starts: row index at which each position's document begins, int64 [rows, n]; None where it is 0 for all.
        stop: no index reaches this; a host number, so that memories can be cut without asking the device.
        values: tensors [rows or 1, n, ...], one slice a position (embeddings, gates, rotation tables).
        shared: keys and values that all positions of the row share. They are cut by ``stop`` and masked, never sliced
            with the positions.
        valid: bool [rows, n], False where a slot holds no position (rows of unequal chunks); None where all do.
    """

    index: Tensor
    starts: Tensor | None
    stop: int
    values: Mapping[str, Tensor]
    shared: tuple[SharedKeysValues, ...] = ()
    valid: Tensor | None = field(default=None)

    @property
    def length(self) -> int:
        """Number of positions (slots) a row."""
        return self.index.shape[1]

    @property
    def key_index(self) -> Tensor:
        """Row index under which keys of these positions are filed: -1, visible to nobody, for slots without one."""
        if self.valid is None:
            return self.index
        return self.index.masked_fill(~self.valid, -1)

    def with_values(self, **values: Tensor) -> Inputs:
        """Return the same positions with more tensors [rows or 1, n, ...] to them."""
        return replace(self, values={**self.values, **values})

    def without(self, name: str) -> Inputs:
        """Return the same positions without the tensors called ``name``."""
        return replace(self, values={key: value for key, value in self.values.items() if key != name})

    def cut(self, start: int, stop: int, row_stop: int) -> Inputs:
        """Return positions ``start`` to ``stop``, counted within these inputs; no row index reaches ``row_stop``."""
        return self._sliced(slice(start, stop), row_stop)

    def strided(self, start: int, step: int, row_stop: int) -> Inputs:
        """Return every ``step``-th position from ``start`` on; no row index reaches ``row_stop``."""
        return self._sliced(slice(start, None, step), row_stop)

    def _sliced(self, where: slice, row_stop: int) -> Inputs:
        return Inputs(
            index=self.index[:, where],
            starts=None if self.starts is None else self.starts[:, where],
            stop=row_stop,
            values={name: value[:, where] for name, value in self.values.items()},
            shared=self.shared,
        )

    def gather(self, where: Tensor, valid: Tensor | None, row_stop: int) -> Inputs:
        """Return positions picked row by row.

        Args:
            where: int64 [rows, n], place of each position within these inputs; anything in range where not ``valid``.
            valid: bool [rows, n]; None where all are.
            row_stop: no picked row index reaches this.
        """
        return Inputs(
            index=pick(self.index, where),
            starts=None if self.starts is None else pick(self.starts, where),
            stop=row_stop,
            values={name: pick(value, where) for name, value in self.values.items()},
            shared=self.shared,
            valid=valid,
        )


def pick(values: Tensor, where: Tensor) -> Tensor:
    """Return ``values[row, where[row, j]]`` as [rows, n, ...] for values [rows or 1, m, ...] and where [rows, n]."""
    values = values.expand(where.shape[0], *values.shape[1:])
    where = where.reshape(*where.shape, *([1] * (values.dim() - 2))).expand(*where.shape, *values.shape[2:])
    return values.gather(1, where)


@dataclass(frozen=True)
class Visibility:
    """Which keys each query may see.

    Attributes:
        mask: bool [rows or 1, 1, queries, keys], True where visible; None where ``causal`` alone says it, or all are.
        causal: queries and keys are the same positions and each sees itself and those before.
        newest: only so many keys, the last, are seen, and the mask is of these; None for all.
    """

    mask: Tensor | None
    causal: bool = False
    newest: int | None = None


def visibility(inputs: Inputs, key_index: Tensor, window: int | None, *, same: bool, exact: bool) -> Visibility:
    """Return which of the keys filed under ``key_index`` the positions of ``inputs`` may see.

    A key is visible if it does not lie after the query, lies in the same document, and, with a window W, is among the
    W newest (the query's own included).

    Args:
        inputs: the queries.
        key_index: int64 [rows or 1, keys]; -1 marks a slot without a key.
        window: W, or None for no limit.
        same: the keys are those of the queries and no others.
        exact: no key is farther back than the window allows to the first query and no slot is empty.
    """
    if inputs.starts is None and inputs.valid is None:
        if same and (window is None or key_index.shape[1] <= window):
            return Visibility(None, causal=inputs.length > 1)
        if exact and inputs.length == 1:
            return Visibility(None)
    query, key = inputs.index[:, :, None], key_index[:, None, :]
    mask = key <= query
    first = torch.zeros_like(query) if inputs.starts is None else inputs.starts[:, :, None]
    if window is not None:
        first = torch.maximum(first, query - (window - 1))
    mask = mask & (key >= first)
    if inputs.valid is not None:  # a slot without a position must still see something, or its softmax is not a number
        mask = mask | ~inputs.valid[:, :, None]
    return Visibility(mask[:, None])
