"""``interleaved``: one plain pass, then S subsets of the positions in turn over shared keys and values (Gauss-Seidel).

Subset i holds the positions t with t mod S = i, counted from their document's start. Its positions are fed the latest
states, and see their own subset's new keys and values and the others' as last written. LRT's training (2 subsets), at
the price of two passes. The first S positions of a document are those of the exact recurrence (for S >= 2), and S = T
is the exact recurrence.

With a carry, one position is one exact step of the recurrence, and several are computed as above, given the past.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.models import Architecture, Feedback
from pipeline.models.base import Memory
from pipeline.models.inputs import Inputs, pick
from pipeline.models.subset_memory import SubsetMemory
from pipeline.models.subsets import Alike, Packed, Subsets, packed
from pipeline.solvers.base import (
    SOLVERS,
    Carry,
    Solution,
    Solver,
    SolverConfig,
    check_count,
    check_feeds_back,
    moved,
    place,
    register_of,
    residual,
    shifted,
    single_step,
)


@dataclass
class InterleavedConfig(SolverConfig):
    """A plain pass, then S subsets in turn."""

    subsets: int = 2
    """Subsets S."""
    refresh_keys_values: bool = False
    """After each subset, make the keys and values of all other positions anew from the latest states."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        Interleaved.check_value("subsets", self.subsets)


@dataclass(frozen=True)
class Subset:
    """Positions that are computed together.

    Attributes:
        inputs: their inputs.
        where: their places within the row: int64 [n], or [rows, n] where rows differ.
        valid: bool [rows, n], False where a slot holds none; None where all do.
    """

    inputs: Inputs
    where: Tensor
    valid: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        """Return what of values [rows or 1, m, ...] belongs to the positions."""
        if self.where.dim() == 1:
            return values[:, self.where]
        return pick(values, self.where)

    def into(self, values: Tensor, new: Tensor) -> Tensor:
        """Return values [rows, m, d] with those of the positions replaced by ``new``."""
        if self.where.dim() == 1:
            return values.index_copy(1, self.where, new.to(values.dtype))
        assert self.valid is not None
        where = self.where.masked_fill(~self.valid, values.shape[1])  # a place that is cut off again
        longer = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
        return longer.scatter(1, where[..., None].expand_as(new), new.to(values.dtype))[:, :-1]

    def mask(self, rows: int, length: int) -> Tensor:
        """Return which places of a row belong to it, bool [rows, length]."""
        nothing = torch.zeros(rows, length, 1, device=self.where.device)
        slots = self.where.shape[-1]
        return self.into(nothing, nothing.new_ones(rows, slots, 1))[..., 0] > 0


@SOLVERS.register("interleaved")
class Interleaved(Solver):
    """A plain pass, then S subsets in turn.

    Attributes:
        subsets: S; may be changed between calls.
    """

    Config = InterleavedConfig
    feeds_back = True
    iterates = True
    schedulable = ("subsets",)
    subsets: int
    config: InterleavedConfig

    @classmethod
    def check_fits(cls, config: SolverConfig, architecture: type[Architecture]) -> None:
        """Refuse architectures that feed nothing back, or whose keys cannot be made anew where that is asked for."""
        check_feeds_back(config, architecture)
        assert isinstance(config, InterleavedConfig)
        if config.refresh_keys_values and not architecture.refreshes:
            raise ConfigError(
                "solver.refresh_keys_values is set, but in this architecture the fed state is no separate part of keys "
                "and values, so they cannot be made anew without computing the position again; leave it out"
            )

    @classmethod
    def check_value(cls, setting: str, value: Any, name: str | None = None) -> None:
        """Raise ConfigError unless S is a whole number from 1 on."""
        check_count(name or f"solver.{setting}", value, "a number of subsets is a whole number")

    def run(
        self, model: Architecture, tokens: Tensor, starts: Tensor | None = None, carry: Carry | None = None
    ) -> Solution:
        """Compute the states in a plain pass and S subsets; see ``Solver.run``."""
        known = starts
        index, starts = place(tokens, starts, carry)
        inputs, memory = model.prepare(tokens, index, starts, None if carry is None else carry.memory)
        if carry is not None and inputs.length == 1:
            return single_step(model, inputs, memory, carry)
        register = register_of(carry, model, tokens.shape[0])
        known = starts if known is None else known
        if carry is None and not self.config.refresh_keys_values:
            subsets: Subsets = Alike(self.subsets, inputs.length)
            if not alike(known, self.subsets):
                assert known is not None
                subsets = on(packed(known, self.subsets), tokens.device)
            return self._solution(*run_apart(model, inputs, subsets))
        memory = self._rewritable(model, None if carry is None else memory)
        plain, memory = model.advance(inputs, None, memory)
        inputs = model.prepare_feedback(inputs)
        before = fed = model.fed_back(plain)
        states = plain
        for subset in split(inputs, self.subsets, 0 if carry is None else carry.length, known):
            feedback = shifted(model, fed, register, inputs)
            part = Feedback(subset.of(feedback.states), None if feedback.fed is None else subset.of(feedback.fed))
            new, memory = model.advance(subset.inputs, part, memory)
            states, fed = subset.into(states, new), subset.into(fed, model.fed_back(new))
            if self.config.refresh_keys_values:
                latest = shifted(model, fed, register, inputs)
                memory = model.refresh(inputs, latest, memory, ~subset.mask(*fed.shape[:2]))
        solution = self._solution(plain, states, before, fed)
        if carry is None:
            return solution
        kept = {name: memory[name].settled() for name in carry.memory}
        register = Feedback(fed[:, -1:])
        return replace(solution, carry=replace(carry, memory=kept, length=inputs.stop, register=register))

    def _solution(self, plain: Tensor, states: Tensor, before: Tensor, fed: Tensor) -> Solution:
        """Return what was found.

        Args:
            plain: states of the plain pass.
            states: those of the subsets.
            before: what of ``plain`` is fed back.
            fed: what of ``states`` is.
        """
        share = 1 / (self.subsets + 1)
        return Solution(states, terms=((plain, share), (states, 1 - share)), residuals=residual(fed, before)[None])

    def _rewritable(self, model: Architecture, memory: Memory | None) -> Memory:
        new = model.rewritable_memory(refreshes=self.config.refresh_keys_values)
        return {**new, **{name: each.rewritable() for name, each in (memory or {}).items()}}

    def flops_per_token(self, model: Architecture, length: int) -> float:
        """Return the forward FLOPs of one token: two passes, each with its logits."""
        flops = model.flops(length)
        fed = flops.fed_position + flops.fed_state
        if self.config.refresh_keys_values:
            fed += min(self.subsets, length) * flops.fed_state
        return flops.prepare + flops.prepare_feedback + 2 * (flops.advance + flops.readout) + fed


def run_apart(model: Architecture, inputs: Inputs, subsets: Subsets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run rows from their first position on, with the subsets' states, keys and values apart from each other.

    Each subset is fed what the one before it made, the first what the last had in the plain pass; so nothing is written
    into the middle of a row.

    Args:
        model: architecture.
        inputs: all positions.
        subsets: how they are divided.

    Returns:
        The states of the plain pass and of the subsets, [rows, n, s], and outside autograd what of both is fed back.
    """
    memory: Memory = {
        name: each if each.window is not None else cast(Any, SubsetMemory(subsets))
        for name, each in model.rewritable_memory().items()
    }
    plain, memory = model.advance(inputs, None, memory)
    inputs = model.prepare_feedback(inputs)
    states: list[Tensor] = []
    fed: list[Tensor] = []
    for number in range(subsets.count):
        part = subsets.inputs(inputs, number)
        if fed:
            feedback = Feedback(subsets.before(number, fed[-1]))
        else:
            first = part.index == (0 if part.starts is None else part.starts)
            feedback = Feedback(model.fed_back(subsets.before_first(plain)))
            feedback = model.initial_feedback(len(plain)).where(first, feedback)
        new, memory = model.advance(part, feedback, memory)
        states.append(new)
        fed.append(model.fed_back(new))
    with torch.no_grad():
        before, after = model.fed_back(plain), subsets.collect(fed)
    return plain, subsets.collect(states), before, after


def on(subsets: Packed, device: torch.device) -> Packed:
    """Return the same division on a device."""
    where, valid, previous = (
        tuple(moved(each, device) for each in tensors) for tensors in (subsets.where, subsets.valid, subsets.previous)
    )
    return Packed(where, valid, moved(subsets.slots, device), previous)


def alike(starts: Tensor | None, subsets: int) -> bool:
    """Return whether every subset lies alike in all rows: whether documents begin at multiples of S alone."""
    return starts is None or not bool((starts % subsets).any())


def split(inputs: Inputs, subsets: int, offset: int, known: Tensor | None = None) -> Iterator[Subset]:
    """Yield the subsets in turn, leaving out those without a position.

    Args:
        inputs: all positions at hand.
        subsets: S.
        offset: row index of the first.
        known: the starts of the inputs on the host, where the caller has them there.
    """
    length, device = inputs.length, inputs.index.device
    starts = inputs.starts if known is None else known
    if starts is None or alike(starts, subsets):
        for number in range(min(subsets, offset + length)):
            first = (number - offset) % subsets
            if first < length:
                where = torch.arange(first, length, subsets, device=device)
                stop = offset + first + (length - 1 - first) // subsets * subsets + 1
                yield Subset(inputs.strided(first, subsets, stop), where, None)
        return
    member = (torch.arange(offset, offset + length, device=starts.device) - starts) % subsets
    counts = torch.stack([(member == number).sum(dim=1) for number in range(min(subsets, offset + length))])
    for number, count in enumerate(counts.amax(dim=1).tolist()):
        if count:
            here = member == number
            where = (~here).long().argsort(dim=1, stable=True)[:, :count]
            valid = moved(here.gather(1, where), device)
            where = moved(where, device)
            yield Subset(inputs.gather(where, valid, inputs.stop), where, valid)
