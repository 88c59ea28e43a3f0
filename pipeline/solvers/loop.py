"""The loop over time at the speed of one pass.

The same steps as ``chunks.run_chunks``, and to rounding the same gradients, but backward is taken by hand, one step
after the other from the last: autograd differentiates a step at a time, what lies between steps is kept in buffers
(``LoopMemory``), and what weights' gradients are made of is put aside for one product a weight (``Collector``). To
autograd the whole loop is one node, which gives each parameter one gradient, once; so nothing that waits for a
parameter's gradient (DDP, ZeRO) sees more than one.

With segments, forward keeps the register at their borders and the keys and values alone; backward computes a segment's
steps again before it goes through them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from pipeline.models import Architecture, Feedback
from pipeline.models.base import Memory
from pipeline.models.collector import Collector, collecting
from pipeline.models.inputs import Inputs
from pipeline.models.loop_memory import LoopMemory, LoopShared
from pipeline.models.memory import Shared
from pipeline.solvers.chunks import Chunk, run_chunk

COLLECTED_ROWS = 2048
"""Rows that a weight puts aside before a product is taken."""
SEGMENT_ROWS = 512
"""Likewise with segments, where memory counts."""
Result = TypeVar("Result")


def run_loop(
    model: Architecture,
    inputs: Inputs,
    chunks: Sequence[Chunk],
    register: Feedback,
    *,
    segment: int,
    window: int,
) -> Tensor:
    """Advance chunk by chunk from an empty memory; return the states of all slots, [rows, slots, s].

    Args:
        model: architecture.
        inputs: all positions.
        chunks: steps of the loop.
        register: what the first is fed.
        segment: steps that are computed again at once in backward; all of them: none is.
        window: steps of a window of truncated backpropagation.
    """
    loop = Loop(model, inputs, chunks, register, segment=segment, window=window)
    result: Tensor = _Loop.apply(loop, *loop.tensors)
    return result


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
    ) -> None:
        self._model, self._chunks, self._segment, self._window = model, chunks, segment, window
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._values = {name: each for name, each in inputs.values.items() if each.requires_grad}
        shared = [each for each in inputs.shared if isinstance(each, Shared)]
        both = [tensor for each in shared for tensor in (each.key, each.value)]
        self.tensors = [register.states, *self._values.values(), *both, *self.parameters.values()]
        self._register = register.detached()
        self._shared = tuple(LoopShared(each.key.detach(), each.value.detach()) for each in shared)
        self._inputs = replace(
            inputs,
            values={name: each.detach() for name, each in inputs.values.items()},
            shared=self._shared,
        )
        self._memory = self._new_memory()
        self._rows = register.states.shape[0]
        longest = max(self._slots(first) for first in range(0, len(chunks), segment)) * self._rows
        rows = SEGMENT_ROWS if self._segmented else COLLECTED_ROWS
        self._collector = Collector(self.parameters, rows, max(longest, rows) if self._segmented else longest)
        self._kept: tuple[list[Record], dict[str, Tensor]] | None = None
        self._borders: list[tuple[Feedback, RandomState | None]] = []
        self._device = inputs.index.device
        self._autocast = current_autocast(self._device.type)

    @property
    def _segmented(self) -> bool:
        return self._segment < len(self._chunks)

    def forward(self) -> Tensor:
        """Return the states of all slots; keep what backward needs."""
        states: list[Tensor] = []
        if not self._segmented:
            records, leaves, _ = self._recorded(0, len(self._chunks), self._register)
            self._kept = records, leaves
            states = [record.state.detach() for record in records]
        else:
            register = self._register
            for first in range(0, len(self._chunks), self._segment):
                self._borders.append((register, RandomState.now(self._device) if self._draws else None))
                found, register = self._unrecorded(first, min(first + self._segment, len(self._chunks)), register)
                states += found
        self._collector.close()
        return torch.cat(states, dim=1)

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of ``tensors``, given that of the states."""
        self._collector.check_unchanged()
        of_values: dict[str, Tensor] = {}
        of_register: Tensor | None = None
        for first in reversed(range(0, len(self._chunks), self._segment)):
            records, leaves = self._kept or self._again(first)
            self._kept = None
            for number in reversed(range(first, first + len(records))):
                of_register = self._through(number, records.pop(), leaves, gradient, of_register, of_values)
                if number % self._window == 0 and number:
                    of_register = None
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
                    value = self._values[name]
                    of_values[name] = value.new_zeros(len(gradient), *value.shape[1:])
                chunk.put(part, of_values[name])
        for name, part in zip(leaves, of_leaves, strict=True):
            if part is not None:
                self._collector.weight(name).add(part.clone())
        return found[0]

    def _again(self, first: int) -> tuple[list[Record], dict[str, Tensor]]:
        """Compute a segment again, as it was; return its records and the leaves that they read."""
        register, random = self._borders.pop()
        stop = min(first + self._segment, len(self._chunks))
        with self._autocast(), nullcontext() if random is None else random.restored():
            records, leaves, _ = self._recorded(first, stop, register)
        return records, leaves

    def _recorded(self, first: int, stop: int, register: Feedback) -> tuple[list[Record], dict[str, Tensor], Feedback]:
        """Run steps, each in a graph of its own."""
        self._collector.record(self._slots(first) * self._rows)

        def run() -> tuple[list[Record], Feedback]:
            fed, records = register, []
            for number in range(first, stop):
                inputs = self._cut(number)
                values = {name: inputs.values[name].detach().requires_grad_() for name in self._values}
                leaf = fed.states.detach().requires_grad_()
                inputs = replace(inputs, values={**inputs.values, **values})
                state, after = self._run(number, inputs, replace(fed, states=leaf))
                records.append(Record(leaf, values, state, after.states))
                fed = after.detached()
            return records, fed

        with torch.enable_grad():
            records, fed = self._within(run)
        return records, self._collector.let_go(), fed

    def _unrecorded(self, first: int, stop: int, register: Feedback) -> tuple[list[Tensor], Feedback]:
        """Run steps outside autograd; return their states and the register."""

        def run() -> tuple[list[Tensor], Feedback]:
            fed, states = register, []
            for number in range(first, stop):
                state, fed = self._run(number, self._cut(number), fed)
                states.append(state)
            return states, fed

        with torch.no_grad():
            return self._within(run)

    def _slots(self, first: int) -> int:
        """Return the slots of the segment that begins with a step."""
        last = min(first + self._segment, len(self._chunks)) - 1
        return self._chunks[last].slots.stop - self._chunks[first].slots.start

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

    def _cut(self, number: int) -> Inputs:
        """Return a step's inputs; what gradients flow to lies in one piece, as products like it."""
        inputs = self._chunks[number].cut(self._inputs)
        return replace(
            inputs,
            values={name: each.contiguous() if name in self._values else each for name, each in inputs.values.items()},
        )

    def _place(self, number: int) -> None:
        """Say to the memories where a step lies."""
        begin = self._chunks[number].slots.start
        live = self._chunks[number // self._window * self._window].slots.start
        for memory in self._memory.values():
            oldest = 0
            if memory.window is not None:
                if memory.gaps:  # every chunk holds at least one of a row's positions, until the row has no more
                    oldest = self._chunks[max(0, number - (memory.window - 1))].slots.start
                else:
                    oldest = max(0, begin - (memory.window - 1))
            memory.place(begin, oldest, live)

    def _new_memory(self) -> dict[str, LoopMemory]:
        """Return memories for all slots of the loop."""
        gaps = any(chunk.valid is not None for chunk in self._chunks)
        index = torch.cat([chunk.cut(self._places()).key_index for chunk in self._chunks], dim=1)
        return {name: LoopMemory(index, memory.window, gaps=gaps) for name, memory in self._model.new_memory().items()}

    def _places(self) -> Inputs:
        return replace(self._inputs, values={}, shared=())

    @property
    def _draws(self) -> bool:
        return self._model.training and self._model.draws


def current_autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what brings the present settings of autocast back."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)


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
