"""Positions of rows divided into subsets, which are computed in turn (solver ``interleaved``).

Subset i holds the positions t with t mod S = i, counted from their document's start. So a position is fed by one of the
subset before its own, and one of the first subset by one of the last, or it begins a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.models.inputs import Inputs, pick

Parts = tuple[Tensor, ...]


class Subsets(Protocol):
    """How rows are divided. Values below are [rows or 1, n, ...], those of a subset [rows or 1, m, ...].

    Attributes:
        count: subsets that hold a position.
    """

    @property
    def count(self) -> int:
        """See the attributes."""

    def inputs(self, inputs: Inputs, number: int) -> Inputs:
        """Return the inputs of a subset."""

    def index(self, inputs: Inputs) -> Parts:
        """Return the row index of each subset's positions, -1 where a slot holds none."""

    def deal(self, values: Tensor, first: int = 0) -> Parts:
        """Return the values of each subset from number ``first`` on."""

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the values that the subsets' are, in row order."""

    def before_first(self, states: Tensor) -> Tensor:
        """Return the states before those of the first subset; anything where there is none in the document."""

    def before(self, number: int, states: Tensor) -> Tensor:
        """Return the states before those of another subset, given those of the one before it."""


@dataclass(frozen=True)
class Alike:
    """Rows in which every subset lies alike: documents begin at multiples of S alone.

    Attributes:
        subsets: S.
        length: n.
    """

    subsets: int
    length: int

    @property
    def count(self) -> int:
        """Subsets that hold a position."""
        return min(self.subsets, self.length)

    def size(self, number: int) -> int:
        """Return the number of positions of a subset."""
        return len(range(number, self.length, self.subsets))

    def inputs(self, inputs: Inputs, number: int) -> Inputs:
        """Return the inputs of a subset."""
        after = inputs.stop - (self.length - 1 - number) % self.subsets
        return inputs.strided(number, self.subsets, after)

    def index(self, inputs: Inputs) -> Parts:
        """Return the row index of each subset's positions."""
        return self.deal(inputs.index)

    def deal(self, values: Tensor, first: int = 0) -> Parts:
        """Return the values of each subset from number ``first`` on."""
        found: Parts = _Deal.apply(values, self.subsets)
        return found[first:]

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the values that the subsets' are, in row order."""
        result: Tensor = parts[0] if len(parts) == 1 else _Collect.apply(*parts)
        return result

    def before_first(self, states: Tensor) -> Tensor:
        """Return the states before those of the first subset; zeros at the row's beginning."""
        nothing = torch.zeros_like(states[:, :1])
        count = self.size(0) - 1
        return torch.cat([nothing, self.deal(states)[-1][:, :count]], dim=1) if count else nothing

    def before(self, number: int, states: Tensor) -> Tensor:
        """Return the states before those of another subset, given those of the one before it."""
        return states[:, : self.size(number)].contiguous()


@dataclass(frozen=True)
class Packed:
    """Rows that pack documents at any place. Within a row a subset's positions ascend; empty slots come last.

    Attributes:
        where: for each subset the places of its positions, int64 [rows, m]; anything in range where there is none.
        valid: for each subset bool [rows, m], False where a slot holds no position.
        slots: for each position its slot among those of all subsets, one behind the other, int64 [rows, n].
        previous: for each subset but the first, the slot before each position's in the subset before, int64 [rows, m].
    """

    where: Parts
    valid: Parts
    slots: Tensor
    previous: Parts

    @property
    def count(self) -> int:
        """Subsets that hold a position."""
        return len(self.where)

    def inputs(self, inputs: Inputs, number: int) -> Inputs:
        """Return the inputs of a subset."""
        return inputs.gather(self.where[number], self.valid[number], inputs.stop)

    def index(self, inputs: Inputs) -> Parts:
        """Return the row index of each subset's positions, -1 where a slot holds none."""
        parts = zip(self.deal(inputs.index), self.valid, strict=True)
        return tuple(part.masked_fill(~valid, -1) for part, valid in parts)

    def deal(self, values: Tensor, first: int = 0) -> Parts:
        """Return the values of each subset from number ``first`` on."""
        return tuple(pick(values, where) for where in self.where[first:])

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the values that the subsets' are, in row order."""
        return pick(torch.cat(list(parts), dim=1), self.slots)

    def before_first(self, states: Tensor) -> Tensor:
        """Return the states before those of the first subset; anything where there is none in the document."""
        return pick(states, (self.where[0] - 1).clamp(min=0))

    def before(self, number: int, states: Tensor) -> Tensor:
        """Return the states before those of another subset, given those of the one before it."""
        return pick(states, self.previous[number - 1])


def packed(starts: Tensor, subsets: int) -> Packed:
    """Return the division of rows in which documents begin at ``starts``, int64 [rows, n], where the index is from 0.

    It looks at the numbers: where they lie on a device, it waits for that.
    """
    length = starts.shape[1]
    member = (torch.arange(length, device=starts.device) - starts) % subsets
    where: list[Tensor] = []
    valid: list[Tensor] = []
    previous: list[Tensor] = []
    slots = torch.zeros_like(member)
    begin, last_ranks = 0, slots
    for number in range(min(subsets, length)):
        here = member == number
        count = int(here.sum(dim=1).max())
        if not count:  # nor has any later one a position: each follows one of the subset before
            break
        places = (~here).long().argsort(dim=1, stable=True)[:, :count]
        ranks = here.long().cumsum(dim=1) - 1
        if number:
            previous.append(last_ranks.gather(1, (places - 1).clamp(min=0)).clamp(min=0))
        where.append(places)
        valid.append(here.gather(1, places))
        slots = torch.where(here, ranks + begin, slots)
        begin, last_ranks = begin + count, ranks
    return Packed(tuple(where), tuple(valid), slots, tuple(previous))


class _Deal(torch.autograd.Function):
    """Slices of one tensor whose gradients become one, rather than a tensor of its size each."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, subsets: int) -> Parts:
        ctx.shape, ctx.subsets = values.shape, subsets
        ctx.set_materialize_grads(False)
        return tuple(values[:, number::subsets] for number in range(min(subsets, values.shape[1])))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor | None) -> Any:
        known = next((each for each in outputs if each is not None), None)
        if known is None:
            return None, None
        gradient = known.new_empty(ctx.shape)
        for number, each in enumerate(outputs):
            part = gradient[:, number :: ctx.subsets]
            if each is None:
                part.zero_()
            else:
                part.copy_(each)
        return gradient, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.subsets = len(parts)
        first = parts[0]
        values = first.new_empty(first.shape[0], sum(part.shape[1] for part in parts), *first.shape[2:])
        for number, part in enumerate(parts):
            values[:, number :: ctx.subsets] = part
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return tuple(outputs[0][:, number :: ctx.subsets].contiguous() for number in range(ctx.subsets))
