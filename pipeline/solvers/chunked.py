"""``chunked``: B positions at a time, each chunk fed the state at the end of the one before.

B = 1 is the exact recurrence, with full backpropagation through time (RLT-1). Larger B is RLT-2 (RLT report, 2.7 and
appendix I): all positions of a chunk are fed the same register, and only a complete chunk sets it. Attention and
positions ignore the borders.

Borders are counted from each document's start. Where rows pack documents whose starts are no multiples of B, the chunks
of different rows lie at different places; then step k takes the k-th chunk of every row, wherever it lies, so that a
document is computed exactly as if it stood alone. Such a batch takes as many steps as its row of most chunks has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ConfigError
from pipeline.models import Architecture, Feedback
from pipeline.models.base import Memory
from pipeline.models.inputs import Inputs, pick
from pipeline.solvers.base import (
    SOLVERS,
    Carry,
    Solution,
    Solver,
    SolverConfig,
    check_count,
    check_feeds_back,
    place,
    register_of,
)


@dataclass
class ChunkedConfig(SolverConfig):
    """B positions at a time."""

    interval: int = 1
    """Feedback interval B, in positions: 1 is the exact recurrence."""
    segment_length: int = 0
    """With activation checkpointing: positions of a segment of time that is computed again in backward. 0 takes the
    number that balances what is kept at the borders against what is computed again at once, sqrt(B x row length)."""
    truncation: int = 0
    """Truncated backpropagation through time: every so many positions of a row, what is fed back and the keys and
    values of the recurrent part are taken for constants. 0 lets gradients through the whole row."""

    def evaluated(self) -> ChunkedConfig:
        """Return the settings without those of training."""
        return replace(self, activation_checkpointing=False, segment_length=0, truncation=0)

    def check(self) -> None:
        """Raise ConfigError on values out of range or that contradict each other."""
        Chunked.check_value("interval", self.interval)
        for name in ("segment_length", "truncation"):
            if getattr(self, name) < 0:
                raise ConfigError(f"solver.{name} is {getattr(self, name)}; it must be at least 0")
        if 0 < self.truncation < self.interval:
            raise ConfigError(
                f"solver.truncation is {self.truncation}; it must be 0, or at least solver.interval={self.interval}"
            )
        if self.segment_length and not self.activation_checkpointing:
            raise ConfigError(
                "solver.segment_length is set, but solver.activation_checkpointing is false: it has no use"
            )


@dataclass(frozen=True)
class Chunk:
    """One step of the loop.

    Attributes:
        cut: picks the step's inputs.
        fresh: rows whose document begins here, bool [rows]; None where none does.
        commit: the chunk is complete and sets the register: one truth for all rows, or bool [rows].
        last: place of each row's last position within the step, int64 [rows]; None: the last slot.
    """

    cut: Callable[[Inputs], Inputs]
    fresh: Tensor | None
    commit: bool | Tensor
    last: Tensor | None = None


@SOLVERS.register("chunked")
class Chunked(Solver):
    """The recurrence, one chunk after the other.

    Attributes:
        interval: feedback interval B; may be changed between calls.
    """

    Config = ChunkedConfig
    feeds_back = True
    schedulable = ("interval",)
    interval: int

    def __init__(self, config: ChunkedConfig) -> None:
        super().__init__(config)
        self.segment_length = config.segment_length
        self.truncation = config.truncation

    @classmethod
    def check_fits(cls, config: SolverConfig, architecture: type[Architecture]) -> None:
        """Refuse architectures that feed nothing back."""
        check_feeds_back(config, architecture)

    @classmethod
    def check_value(cls, setting: str, value: Any, name: str | None = None) -> None:
        """Raise ConfigError unless the interval is a whole number from 1 on."""
        check_count(name or f"solver.{setting}", value, "a feedback interval is a whole number of positions")

    @classmethod
    def closest(cls, setting: str, values: Sequence[Any]) -> Any:
        """Return the smallest interval."""
        return min(values)

    def run(
        self, model: Architecture, tokens: Tensor, starts: Tensor | None = None, carry: Carry | None = None
    ) -> Solution:
        """Compute the states chunk by chunk; see ``Solver.run``."""
        index, starts = place(tokens, starts, carry)
        inputs, memory = model.prepare(tokens, index, starts, None if carry is None else carry.memory)
        inputs = model.prepare_feedback(inputs)
        register = register_of(carry, model, tokens.shape[0])
        if carry is None:
            memory = model.new_memory()
        offset = 0 if carry is None else carry.length
        if starts is None or self.interval == 1 or not bool((starts % self.interval).any()):
            chunks, places = even_chunks(inputs, offset, self.interval), None
        else:
            chunks, places = uneven_chunks(inputs, offset, self.interval)
        states, memory, register = self._loop(model, inputs, chunks, memory, register)
        if places is not None:
            states = pick(states, places)
        if carry is None:
            return Solution(states)
        return Solution(states, replace(carry, memory=memory, length=inputs.stop, register=register))

    def flops_per_token(self, model: Architecture, length: int) -> float:
        """Return the forward FLOPs of one token; all positions of a chunk share one state."""
        flops, share = model.flops(length), math.ceil(length / self.interval) / length
        always = flops.prepare + flops.prepare_feedback + flops.advance + flops.fed_position + flops.readout
        return always + share * flops.fed_state

    def _loop(
        self, model: Architecture, inputs: Inputs, chunks: Sequence[Chunk], memory: Memory, register: Feedback
    ) -> tuple[Tensor, Memory, Feedback]:
        """Run all chunks, with gradients cut between windows if so configured."""
        window = len(chunks)
        if self.truncation and torch.is_grad_enabled():
            window = max(1, self.truncation // self.interval)
        states: list[Tensor] = []
        for first in range(0, len(chunks), window):
            if first:
                memory = {name: each.detached() for name, each in memory.items()}
                register = register.detached()
            part = chunks[first : first + window]
            found, memory, register = self._segments(model, inputs, part, memory, register)
            states.append(found)
        return torch.cat(states, dim=1), memory, register

    def _segments(
        self, model: Architecture, inputs: Inputs, chunks: Sequence[Chunk], memory: Memory, register: Feedback
    ) -> tuple[Tensor, Memory, Feedback]:
        """Run chunks, in segments that are computed again in backward if so configured."""
        segment = len(chunks)
        if self.config.activation_checkpointing and torch.is_grad_enabled():
            length = self.segment_length or math.isqrt(self.interval * inputs.length)
            segment = max(1, length // self.interval)
        states: list[Tensor] = []
        for first in range(0, len(chunks), segment):
            part = chunks[first : first + segment]
            if segment < len(chunks):
                # The check that the second computation matches the first costs as much as a layer; tests make it.
                found, memory, register = checkpoint(
                    run_chunks, model, inputs, part, memory, register, use_reentrant=False, determinism_check="none"
                )
            else:
                found, memory, register = run_chunks(model, inputs, part, memory, register)
            states.append(found)
        return torch.cat(states, dim=1), memory, register


def run_chunks(
    model: Architecture, inputs: Inputs, chunks: Sequence[Chunk], memory: Memory, register: Feedback
) -> tuple[Tensor, Memory, Feedback]:
    """Advance chunk by chunk; return the states of all slots [rows, slots, d], the memory and the register."""
    states = []
    for chunk in chunks:
        feedback = register
        if chunk.fresh is not None:
            feedback = model.initial_feedback(len(chunk.fresh)).where(chunk.fresh[:, None], register)
        state, memory = model.advance(chunk.cut(inputs), feedback, memory)
        states.append(state)
        if chunk.commit is False:
            register = feedback
            continue
        last = state[:, -1:].contiguous() if chunk.last is None else pick(state, chunk.last[:, None])
        register = Feedback(model.fed_back(last))
        if chunk.commit is not True:
            register = register.where(chunk.commit[:, None], feedback)
    return torch.cat(states, dim=1), memory, register


def even_chunks(inputs: Inputs, offset: int, interval: int) -> list[Chunk]:
    """Return chunks whose borders are the multiples of ``interval`` in row index, for every row.

    Args:
        inputs: all positions at hand.
        offset: row index of the first.
        interval: B.
    """
    chunks, begin, end = [], offset, offset + inputs.length
    while begin < end:
        stop = min((begin // interval + 1) * interval, end)
        fresh = None
        if inputs.starts is not None:
            fresh = inputs.starts[:, begin - offset] == begin
        chunks.append(Chunk(_slice(begin - offset, stop - offset, stop), fresh, stop % interval == 0))
        begin = stop
    return chunks


def _slice(start: int, stop: int, row_stop: int) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs.cut(start, stop, row_stop)


def uneven_chunks(inputs: Inputs, offset: int, interval: int) -> tuple[list[Chunk], Tensor]:
    """Return steps that take each row's next chunk, with borders counted from its documents' starts.

    Args:
        inputs: all positions at hand, with ``starts``.
        offset: row index of the first.
        interval: B.

    Returns:
        The steps, and for every position its slot in the joined states, int64 [rows, n].
    """
    assert inputs.starts is not None
    rows, length = inputs.starts.shape
    within = inputs.index - inputs.starts  # position in the document
    border = within % interval == 0
    border[:, 0] = True  # a chunk that began in an earlier call goes on here
    ordinal = border.long().cumsum(dim=1) - 1
    here = torch.arange(length, device=within.device).expand(rows, -1)
    opening = torch.where(border, here, torch.zeros_like(here)).cummax(dim=1).values
    filled = torch.zeros(rows, length, dtype=torch.int64, device=within.device)
    filled = filled.scatter_add(1, ordinal, torch.ones_like(here))  # positions of each row's k-th chunk
    most, least = ([each for each in counts.tolist() if each] for counts in (filled.amax(dim=0), filled.amin(dim=0)))
    borders = [0, *accumulate(most)]
    slots = torch.tensor(borders, device=within.device)[ordinal] + here - opening
    table = torch.full((rows, borders[-1]), -1, device=within.device)
    table.scatter_(1, slots, here)
    chunks = []
    for step, (begin, end) in enumerate(pairwise(borders)):
        where = table[:, begin:end]
        valid = where >= 0
        where = where.clamp(min=0)
        last = valid.sum(dim=1) - 1
        some, last = last >= 0, last.clamp(min=0)
        first_within = within.gather(1, where[:, :1])[:, 0]
        last_within = within.gather(1, where.gather(1, last[:, None]))[:, 0]
        row_stop = offset + min((step + 1) * interval, length)
        chunks.append(
            Chunk(
                _gather(where, None if step < len(least) and least[step] == most[step] else valid, row_stop),
                some & (first_within == 0),
                some & ((last_within + 1) % interval == 0),
                last,
            )
        )
    return chunks, slots


def _gather(where: Tensor, valid: Tensor | None, row_stop: int) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs.gather(where, valid, row_stop)
