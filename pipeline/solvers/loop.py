"""The loop over time at the speed of one pass.

The same steps as ``chunks.run_chunks``, and to rounding the same gradients, but backward is taken by hand, one step
after the other from the last: autograd differentiates a step at a time, what lies between steps is kept in buffers
(``LoopMemory``), and what weights' gradients are made of is put aside for one product a weight (``Collector``). To
autograd the whole loop is one node, which gives each parameter one gradient, once; so nothing that waits for a
parameter's gradient (DDP, ZeRO) sees more than one.

With segments, forward keeps the register at their borders and the keys and values that later steps attend to; backward
computes a segment's steps again before it goes through them, and what of their inputs feedback alone needs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from pipeline.models import Architecture, Feedback
from pipeline.models.base import Memory
from pipeline.models.collector import Collector, collecting
from pipeline.models.inputs import Inputs
from pipeline.models.kernels import Kernels
from pipeline.models.loop_memory import SEGMENT_TILE, TILE, LoopMemory, LoopShared
from pipeline.models.memory import Shared
from pipeline.models.recomputed import current_autocast
from pipeline.solvers.chunks import Chunk, run_chunk

COLLECTED_ROWS = 2048
"""Rows that a weight puts aside before a product is taken."""
SEGMENT_ROWS = 256
"""Likewise with segments, where memory counts. Of no more rows in all, gradients are the same to the last bit, segments
or not."""
ROTATIONS = ("cos", "sin")
"""Inputs that are tables of rotary positions: no gradient flows to them."""
Result = TypeVar("Result")


def run_loop(
    model: Architecture,
    inputs: Inputs,
    chunks: Sequence[Chunk],
    register: Feedback,
    *,
    segment: int,
    window: int,
    late: bool = False,
    kernels: Kernels | None = None,
) -> Tensor:
    """Advance chunk by chunk from an empty memory; return the states of all slots, [rows, slots, s].

    Args:
        model: architecture.
        inputs: all positions.
        chunks: steps of the loop.
        register: what the first is fed.
        segment: steps that are computed again at once in backward; all of them: none is.
        window: steps of a window of truncated backpropagation.
        late: the inputs lack what ``prepare_feedback`` adds to them. It is kept for a segment alone, whose steps lie
            at the same places in all rows; see ``fits_late``.
        kernels: operations of layers; None: torch's own.
    """
    loop = Loop(model, inputs, chunks, register, segment=segment, window=window, late=late, kernels=kernels)
    result: Tensor = _Loop.apply(loop, *loop.tensors)
    return result


def fits_late(inputs: Inputs, rows: int) -> bool:
    """Return whether ``prepare_feedback`` can be left to the loop, and whether that is worth it.

    Gradients must flow to all that it may read.

    Args:
        inputs: all positions.
        rows: rows of them.
    """
    return rows * inputs.length > SEGMENT_ROWS and all(
        each.requires_grad or not each.is_floating_point() or name in ROTATIONS for name, each in inputs.values.items()
    )


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loop: Loop, *tensors: Tensor) -> Tensor:
        ctx.loop = loop
        with uncollected_garbage():
            return loop.forward()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        if ctx.loop is None:
            raise RuntimeError("backward through a loop over time can be taken only once")
        loop, ctx.loop = ctx.loop, None
        with uncollected_garbage():
            return None, *loop.backward(outputs[0])


@contextmanager
def uncollected_garbage() -> Iterator[None]:
    """Let Python look for no garbage: the thousands of small records of a loop would make it look again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Record:
    """What backward through a step begins from.

    Attributes:
        register: what the step was fed, a leaf.
        values: its inputs by name, leaves.
        state: its states, in a graph of the step alone.
        after: the register after it, likewise.
    """

    register: Tensor
    values: dict[str, Tensor]
    state: Tensor
    after: Tensor


@dataclass(frozen=True)
class Stretch:
    """Inputs of some steps.

    Attributes:
        inputs: from which each step's are cut, outside autograd.
        begin: place of the first position among all.
        leaves: what ``made`` was made of, by name; empty unless ``prepare_feedback`` was left to the loop.
        made: in a graph of its own, the values by name to which gradients flow; likewise.
    """

    inputs: Inputs
    begin: int
    leaves: dict[str, Tensor]
    made: dict[str, Tensor]


class Loop:
    """One run of the loop, forward and backward; see ``run_loop`` for the arguments.

    Attributes:
        parameters: trained parameters by name.
        tensors: all that gradients flow to: the first register, the inputs, what they share, the trained parameters.
    """

    def __init__(
        self,
        model: Architecture,
        inputs: Inputs,
        chunks: Sequence[Chunk],
        register: Feedback,
        *,
        segment: int,
        window: int,
        late: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self._model, self._chunks, self._segment, self._window = model, chunks, segment, window
        self._late = late
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._values = {name: each for name, each in inputs.values.items() if each.requires_grad}
        shared = [each for each in inputs.shared if isinstance(each, Shared)]
        both = [tensor for each in shared for tensor in (each.key, each.value)]
        self.tensors = [register.states, *self._values.values(), *both, *self.parameters.values()]
        self._register = register.detached()
        self._rows = register.states.shape[0]
        self._sparing = self._segmented and self._rows * chunks[-1].slots.stop > SEGMENT_ROWS
        self._tile = SEGMENT_TILE if self._sparing else TILE
        self._shared = tuple(LoopShared(each.key.detach(), each.value.detach(), self._tile) for each in shared)
        self._inputs = replace(
            inputs,
            values={name: each.detach() for name, each in inputs.values.items()},
            shared=self._shared,
        )
        self._memory = self._new_memory()
        longest = max(self._slots(first) for first in range(0, len(chunks), segment)) * self._rows
        rows = SEGMENT_ROWS if self._segmented else COLLECTED_ROWS
        self._collector = Collector(self.parameters, rows, max(longest, rows) if self._segmented else longest)
        self._collector.kernels = kernels
        self._kept: tuple[list[Record], dict[str, Tensor], Stretch] | None = None
        self._borders: list[tuple[Feedback, RandomState | None]] = []
        self._device = inputs.index.device
        self._autocast = current_autocast(self._device.type)

    @property
    def _segmented(self) -> bool:
        return self._segment < len(self._chunks)

    def forward(self) -> Tensor:
        """Return the states of all slots; keep what backward needs."""
        if not self._segmented:
            records, leaves, stretch = self._recorded(0, len(self._chunks), self._register)
            self._kept = records, leaves, stretch
            found = torch.cat([record.state.detach() for record in records], dim=1)
        else:
            found = self._forward_in_segments()
        self._collector.close()
        return found

    def _forward_in_segments(self) -> Tensor:
        """Return the states of all slots; keep the borders of segments."""
        inputs, register, states = self._inputs, self._register, None
        if self._late:
            with torch.no_grad():
                inputs = self._model.prepare_feedback(inputs)
        for first in self._firsts:
            self._borders.append((register, RandomState.now(self._device) if self._draws else None))
            for memory in self._local:
                memory.go_on(self._oldest(memory, first), self._chunks[first].slots.start)
            found, register = self._unrecorded(first, self._stop(first), Stretch(inputs, 0, {}, {}), register)
            self._keep(first)
            joined = torch.cat(found, dim=1)
            if states is None:
                states = joined.new_empty(self._rows, self._chunks[-1].slots.stop, *joined.shape[2:])
            states[:, self._chunks[first].slots.start : self._chunks[self._stop(first) - 1].slots.stop] = joined
        assert states is not None
        return states

    def _keep(self, first: int) -> None:
        """Keep the keys and values of a segment to which later ones attend."""
        stop = self._stop(first)
        if stop == len(self._chunks):
            return
        behind = self._chunks[stop].slots.start
        for memory in self._local:
            begin = max(self._chunks[first].slots.start, self._oldest(memory, stop))
            if begin < behind:
                memory.keep(begin, behind)

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of ``tensors``, given that of the states."""
        self._collector.check_unchanged()
        of_values: dict[str, Tensor] = {}
        of_register: Tensor | None = None
        for first in reversed(self._firsts):
            records, leaves, stretch = self._kept or self._again(first)
            self._kept = None
            of_made: dict[str, Tensor] = {} if self._late else of_values
            for number in reversed(range(first, first + len(records))):
                of_register = self._through(number, records.pop(), leaves, stretch, gradient, of_register, of_made)
                if number % self._window == 0 and number:
                    of_register = None
            if self._late:
                self._through_made(stretch, leaves, of_made, of_values)
            del leaves, stretch, of_made
        found = self._collector.gradients()
        self._collector.close()
        return [
            None if of_register is None else of_register.sum_to_size(self.tensors[0].shape),
            *(
                of_values[name].sum_to_size(each.shape) if name in of_values else None
                for name, each in self._values.items()
            ),
            *(tensor for each in self._shared for tensor in each.gradients()),
            *(found.get(name) for name in self.parameters),
        ]

    def _through(
        self,
        number: int,
        record: Record,
        leaves: dict[str, Tensor],
        stretch: Stretch,
        gradient: Tensor,
        of_register: Tensor | None,
        of_values: dict[str, Tensor],
    ) -> Tensor | None:
        """Go backward through a step; return the gradient of what it was fed."""
        chunk = self._chunks[number]
        self._place(number)
        outputs, gradients = [record.state], [gradient[:, chunk.slots]]
        if of_register is not None and record.after.requires_grad:
            outputs.append(record.after)
            gradients.append(of_register)
        inputs = [record.register, *record.values.values(), *leaves.values()]
        found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        of_leaves = found[1 + len(record.values) :]
        for name, part in zip(record.values, found[1:], strict=False):
            if part is not None:
                if name not in of_values:
                    value = stretch.inputs.values[name]
                    of_values[name] = value.new_zeros(len(gradient), *value.shape[1:])
                chunk.put(part, of_values[name], stretch.begin)
        self._add_to_leaves(leaves, of_leaves)
        return found[0]

    def _through_made(
        self,
        stretch: Stretch,
        leaves: dict[str, Tensor],
        of_made: dict[str, Tensor],
        of_values: dict[str, Tensor],
    ) -> None:
        """Go backward through ``prepare_feedback`` of a stretch."""
        outputs = [stretch.made[name] for name in of_made]
        inputs = [*stretch.leaves.values(), *leaves.values()]
        found = torch.autograd.grad(outputs, inputs, [*of_made.values()], allow_unused=True) if outputs else ()
        for (name, leaf), part in zip(stretch.leaves.items(), found, strict=False):
            if part is not None:
                if name not in of_values:
                    of_values[name] = part.new_zeros(len(part), *self._values[name].shape[1:])
                of_values[name][:, stretch.begin : stretch.begin + leaf.shape[1]] += part
        self._add_to_leaves(leaves, found[len(stretch.leaves) :])

    def _add_to_leaves(self, leaves: dict[str, Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add gradients that autograd gave of parameters' stand-ins."""
        for name, part in zip(leaves, gradients, strict=False):
            if part is not None:
                self._collector.weight(name).add(part.clone())

    def _again(self, first: int) -> tuple[list[Record], dict[str, Tensor], Stretch]:
        """Compute a segment again, as it was; return its records, the leaves that they read, and its inputs."""
        register, random = self._borders.pop()
        stop = self._stop(first)
        for memory in self._local:
            later = None if stop == len(self._chunks) else self._oldest(memory, stop)
            slots = self._chunks[first].slots.start, self._chunks[stop - 1].slots.stop
            memory.go_back(self._oldest(memory, first), *slots, later)
        with self._autocast(), nullcontext() if random is None else random.restored():
            return self._recorded(first, stop, register)

    def _recorded(self, first: int, stop: int, register: Feedback) -> tuple[list[Record], dict[str, Tensor], Stretch]:
        """Run steps, each in a graph of its own."""
        slots = self._chunks[first].slots
        self._collector.record(
            self._slots(first) * self._rows, first=(slots.stop - slots.start) * self._rows, steps=stop - first
        )

        def run() -> tuple[list[Record], Stretch]:
            fed, records, stretch = register, [], self._stretch(first, stop)
            for number in range(first, stop):
                inputs = self._cut(number, stretch)
                names = stretch.made if self._late else self._values
                values = {name: inputs.values[name].detach().requires_grad_() for name in names}
                leaf = fed.states.detach().requires_grad_()
                inputs = replace(inputs, values={**inputs.values, **values})
                state, after = self._run(number, inputs, replace(fed, states=leaf))
                records.append(Record(leaf, values, state, after.states))
                fed = after.detached()
            return records, stretch

        with torch.enable_grad():
            records, stretch = self._within(run)
        return records, self._collector.let_go(), stretch

    def _stretch(self, first: int, stop: int) -> Stretch:
        """Return the inputs of steps that are recorded."""
        if not self._late:
            return Stretch(self._inputs, 0, {}, {})
        places = [chunk.where for chunk in (self._chunks[first], self._chunks[stop - 1])]
        assert isinstance(places[0], slice)
        assert isinstance(places[1], slice)
        part = self._inputs.cut(places[0].start, places[1].stop, self._chunks[stop - 1].row_stop)
        leaves = {name: part.values[name].contiguous().detach().requires_grad_() for name in self._values}
        inputs = self._model.prepare_feedback(replace(part, values={**part.values, **leaves}))
        made = {name: each for name, each in inputs.values.items() if each.requires_grad}
        inputs = replace(inputs, values={name: each.detach() for name, each in inputs.values.items()})
        return Stretch(inputs, places[0].start, leaves, made)

    def _unrecorded(self, first: int, stop: int, stretch: Stretch, register: Feedback) -> tuple[list[Tensor], Feedback]:
        """Run steps outside autograd; return their states and the register."""

        def run() -> tuple[list[Tensor], Feedback]:
            fed, states = register, []
            for number in range(first, stop):
                state, fed = self._run(number, self._cut(number, stretch), fed)
                states.append(state)
            return states, fed

        with torch.no_grad():
            return self._within(run)

    def _slots(self, first: int) -> int:
        """Return the slots of the segment that begins with a step."""
        return self._chunks[self._stop(first) - 1].slots.stop - self._chunks[first].slots.start

    @property
    def _firsts(self) -> range:
        """The first steps of all segments."""
        return range(0, len(self._chunks), self._segment)

    def _stop(self, first: int) -> int:
        """Return the step behind the segment that begins with a step."""
        return min(first + self._segment, len(self._chunks))

    def _within(self, run: Callable[[], Result]) -> Result:
        """Run with the collector's stand-ins in the place of the parameters."""
        self._collector.open()
        with collecting(self._collector), self._collector.standing_in(self._model):
            return run()

    def _run(self, number: int, inputs: Inputs, register: Feedback) -> tuple[Tensor, Feedback]:
        """Advance by one step."""
        self._place(number)
        memory = cast(Memory, self._memory)  # they stand in for it in ``advance``
        state, _, register = run_chunk(self._model, inputs, self._chunks[number], memory, register)
        return state, register

    def _cut(self, number: int, stretch: Stretch) -> Inputs:
        """Return a step's inputs; what is no table of rotations lies in one piece, as products like it."""
        inputs = self._chunks[number].cut(stretch.inputs, stretch.begin)
        values = inputs.values.items()
        return replace(inputs, values={name: each if name in ROTATIONS else each.contiguous() for name, each in values})

    def _place(self, number: int) -> None:
        """Say to the memories where a step lies."""
        begin = self._chunks[number].slots.start
        live = self._chunks[number // self._window * self._window].slots.start
        for memory in self._memory.values():
            memory.place(begin, self._oldest(memory, number), live)

    def _oldest(self, memory: LoopMemory, number: int) -> int:
        """Return the slot before which nothing is within the window of a step."""
        if memory.window is None:
            return 0
        if memory.gaps:  # every chunk holds at least one of a row's positions, until the row has no more
            return self._chunks[max(0, number - (memory.window - 1))].slots.start
        return max(0, self._chunks[number].slots.start - (memory.window - 1))

    def _new_memory(self) -> dict[str, LoopMemory]:
        """Return memories for all slots of the loop."""
        gaps = any(chunk.valid is not None for chunk in self._chunks)
        index = torch.cat([chunk.cut(self._places()).key_index for chunk in self._chunks], dim=1)
        found = {}
        for name, memory in self._model.new_memory().items():
            found[name] = LoopMemory(index, memory.window, gaps=gaps, tile=self._tile)
            if memory.window is not None and self._sparing:
                begins = ((self._oldest(found[name], first), self._stop(first) - 1) for first in self._firsts)
                size = max(self._chunks[last].slots.stop - begin for begin, last in begins)
                found[name] = LoopMemory(index, memory.window, gaps=gaps, tile=self._tile, size=size)
        return found

    @property
    def _local(self) -> list[LoopMemory]:
        """The memories whose buffers hold what one segment attends to."""
        return [each for each in self._memory.values() if each.window is not None and self._sparing]

    def _places(self) -> Inputs:
        return replace(self._inputs, values={}, shared=())

    @property
    def _draws(self) -> bool:
        return self._model.training and self._model.draws


@dataclass(frozen=True)
class RandomState:
    """State of the random generators of the host and of a device."""

    device: torch.device
    host: Tensor
    devices: Any

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the present state."""
        found = get_device_states(torch.empty(0, device=device)) if device.type != "cpu" else None
        return cls(device, torch.get_rng_state(), found)

    def set(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.host)
        if self.devices is not None:
            set_device_states(*self.devices, device_type=self.device.type)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Go back to it for a while."""
        before = RandomState.now(self.device)
        self.set()
        try:
            yield
        finally:
            before.set()
