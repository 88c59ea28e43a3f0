"""The steps of a loop over time: which positions each computes, and what is fed back after it.

Borders of chunks are counted from each document's start. Where rows pack documents whose starts are no multiples of B,
the chunks of different rows lie at different places; then step k takes the k-th chunk of every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pipeline.models import Architecture, Feedback
from pipeline.models.base import Memory
from pipeline.models.inputs import Inputs, pick
from pipeline.solvers.base import moved


@dataclass(frozen=True)
class Chunk:
    """One step of the loop.

    Attributes:
        where: places of its positions within the inputs: one slice for all rows, or int64 [rows, n], anything in range
            where there is none.
        valid: bool [rows, n], False in slots without a position; None where all have one.
        row_stop: no row index of its positions reaches this.
        slots: where its positions lie in the joined states of all steps.
        fresh: rows whose document begins here, bool [rows]; None where none does.
        commit: the chunk is complete and sets the register: one truth for all rows, or bool [rows].
        last: place of each row's last position within the step, int64 [rows]; None: the last slot.
    """

    where: slice | Tensor
    valid: Tensor | None
    row_stop: int
    slots: slice
    fresh: Tensor | None
    commit: bool | Tensor
    last: Tensor | None = None

    def cut(self, inputs: Inputs, begin: int = 0) -> Inputs:
        """Return the step's inputs; those given begin at place ``begin``, which is 0 where rows differ."""
        if isinstance(self.where, slice):
            return inputs.cut(self.where.start - begin, self.where.stop - begin, self.row_stop)
        return inputs.gather(self.where, self.valid, self.row_stop)

    def put(self, part: Tensor, whole: Tensor, begin: int = 0) -> None:
        """Add ``part`` [rows, n, ...] to the positions of the step in ``whole`` [rows, m, ...]; see ``cut``."""
        if isinstance(self.where, slice):
            whole[:, self.where.start - begin : self.where.stop - begin] += part
            return
        if self.valid is not None:
            part = part * self.valid.view(*self.valid.shape, *([1] * (part.dim() - 2)))
        where = self.where.view(*self.where.shape, *([1] * (part.dim() - 2))).expand_as(part)
        whole.scatter_add_(1, where, part)


def run_chunks(
    model: Architecture, inputs: Inputs, chunks: Sequence[Chunk], memory: Memory, register: Feedback
) -> tuple[Tensor, Memory, Feedback]:
    """Advance chunk by chunk; return the states of all slots [rows, slots, d], the memory and the register."""
    states = []
    for chunk in chunks:
        state, memory, register = run_chunk(model, chunk.cut(inputs), chunk, memory, register)
        states.append(state)
    return torch.cat(states, dim=1), memory, register


def run_chunk(
    model: Architecture, inputs: Inputs, chunk: Chunk, memory: Memory, register: Feedback
) -> tuple[Tensor, Memory, Feedback]:
    """Advance by one chunk, whose inputs are given; return its states [rows, n, s], the memory and the register."""
    feedback = register
    if chunk.fresh is not None:
        feedback = model.initial_feedback(len(chunk.fresh)).where(chunk.fresh[:, None], register)
    state, memory = model.advance(inputs, feedback, memory)
    if chunk.commit is False:
        return state, memory, feedback
    last = state[:, -1:].contiguous() if chunk.last is None else pick(state, chunk.last[:, None])
    register = Feedback(model.fed_back(last))
    if chunk.commit is not True:
        register = register.where(chunk.commit[:, None], feedback)
    return state, memory, register


def even_chunks(inputs: Inputs, offset: int, interval: int, known: Tensor | None = None) -> list[Chunk]:
    """Return chunks whose borders are the multiples of ``interval`` in row index, for every row.

    Args:
        inputs: all positions at hand.
        offset: row index of the first.
        interval: B.
        known: the starts of the inputs on the host, where the caller has them there.
    """
    chunks, begin, end = [], offset, offset + inputs.length
    begins = None
    if known is not None and known.device.type == "cpu":
        begins = (known == torch.arange(offset, end, device=known.device)).any(dim=0).tolist()
    while begin < end:
        stop = min((begin // interval + 1) * interval, end)
        fresh = None
        if inputs.starts is not None and (begins is None or begins[begin - offset]):
            fresh = inputs.starts[:, begin - offset] == begin
        here = slice(begin - offset, stop - offset)
        chunks.append(Chunk(here, None, stop, here, fresh, stop % interval == 0))
        begin = stop
    return chunks


def uneven_chunks(
    inputs: Inputs, offset: int, interval: int, known: Tensor | None = None
) -> tuple[list[Chunk], Tensor]:
    """Return steps that take each row's next chunk, with borders counted from its documents' starts.

    Args:
        inputs: all positions at hand, with ``starts``.
        offset: row index of the first.
        interval: B.
        known: the starts of the inputs on the host, where the caller has them there.

    Returns:
        The steps, and for every position its slot in the joined states, int64 [rows, n].
    """
    assert inputs.starts is not None
    known = inputs.starts if known is None else known
    (rows, length), device = known.shape, inputs.starts.device
    index = torch.arange(offset, offset + length, device=known.device)
    border = (index - known) % interval == 0
    border[:, 0] = True  # a chunk that began in an earlier call goes on here
    ordinal = border.long().cumsum(dim=1) - 1
    here = torch.arange(length, device=known.device).expand(rows, -1)
    opening = torch.where(border, here, torch.zeros_like(here)).cummax(dim=1).values
    filled = torch.zeros(rows, length, dtype=torch.int64, device=known.device)
    filled = filled.scatter_add(1, ordinal, torch.ones_like(here))  # positions of each row's k-th chunk
    most, least = ([each for each in counts.tolist() if each] for counts in (filled.amax(dim=0), filled.amin(dim=0)))
    borders = [0, *accumulate(most)]
    slots = torch.tensor(borders, device=known.device)[ordinal] + here - opening
    table = torch.full((rows, borders[-1]), -1, device=known.device)
    table.scatter_(1, slots, here)
    slots, table = moved(slots, device), moved(table, device)
    within = inputs.index - inputs.starts  # position in the document
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
                where,
                None if step < len(least) and least[step] == most[step] else valid,
                row_stop,
                slice(begin, end),
                some & (first_within == 0),
                some & ((last_within + 1) % interval == 0),
                last,
            )
        )
    return chunks, slots
