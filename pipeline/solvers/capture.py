"""The loop over time as CUDA graphs: captured once for every shape of a batch, then replayed.

A step of the loop is some hundred small kernels, and a GPU waits for each to be launched. A graph launches them all at
once. What a loop reads is copied into tensors that stay where they are; forward is one graph and backward another, over
one pool of memory. Parameters are read where they lie, so optimisers must update them in place, as they do.

On a CPU, which has no graphs, replaying runs the loop again on the same tensors: all but the graph itself is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.models import Architecture, Feedback
from pipeline.models.inputs import Inputs
from pipeline.models.memory import Shared
from pipeline.solvers.chunks import Chunk
from pipeline.solvers.loop import Loop

WARM_UP = 2
"""Runs before the capture, in which libraries set themselves up."""
Results = list[Tensor | None]
Plan = Callable[[Inputs], Sequence[Chunk]]


class Replay(Protocol):
    """Does the same work again, on the same tensors."""

    def __call__(self) -> Results:
        """Return the results, which the next call overwrites."""


class CapturedLoops:
    """The loops of one model, one for every shape."""

    def __init__(self) -> None:
        self._loops: dict[Hashable, CapturedLoop] = {}

    def run(
        self,
        model: Architecture,
        inputs: Inputs,
        plan: Plan,
        register: Feedback,
        *,
        segment: int,
        window: int,
        late: bool = False,
    ) -> Tensor:
        """Return the states of all slots; see ``loop.run_loop``.

        Args:
            model: architecture.
            inputs: all positions.
            plan: returns the steps of the loop over some inputs.
            register: what the first step is fed.
            segment: steps that are computed again at once in backward.
            window: steps of a window of truncated backpropagation.
            late: the inputs lack what ``prepare_feedback`` adds to them.
        """
        tensors = tensors_of(inputs, register)
        kind = inputs.index.device.type
        key = (
            id(model),
            model.training,
            tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in tensors),
            (inputs.starts is None, inputs.stop, segment, window, late, len(plan(inputs))),
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        )
        if key not in self._loops:
            make = partial(Loop, model, segment=segment, window=window, late=late)
            self._loops[key] = CapturedLoop(make, inputs, plan, register)
        result: Tensor = _Captured.apply(self._loops[key], len(tensors), *tensors, *trained(model))
        return result


class CapturedLoop:
    """One loop.

    Args:
        make: makes a loop of inputs, steps and the first register.
        inputs: see ``CapturedLoops.run``.
        plan: likewise.
        register: likewise.

    Attributes:
        number: forward runs so far; backward belongs to the last.
    """

    def __init__(self, make: Callable[..., Loop], inputs: Inputs, plan: Plan, register: Feedback) -> None:
        self._tensors = [
            each.detach().clone().requires_grad_(each.requires_grad) for each in tensors_of(inputs, register)
        ]
        self._like = inputs, register
        self.number = 0
        self._make: Callable[[], Loop] = lambda: self._loop(make, plan)
        self._pool: Any = None
        self._current: Loop | None = None
        self._forward: Replay | None = None
        self._backward: Replay | None = None
        self._gradient: Tensor | None = None

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the states of all slots."""
        self._read(tensors)
        self.number += 1
        if self._forward is None:
            self._forward = self._captured(self._run_forward, warm_up=self._run_both)
        (states,) = self._forward()
        assert states is not None
        return states.clone()

    def backward(self, gradient: Tensor) -> Results:
        """Return the gradients of the tensors and of the trained parameters."""
        if self._gradient is None:
            self._gradient = gradient.detach().clone(memory_format=torch.contiguous_format)
        self._gradient.copy_(gradient)
        if self._backward is None:
            self._backward = self._captured(self._run_backward, warm_up=None)
        return [None if each is None else each.clone() for each in self._backward()]

    def _read(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for held, each in zip(self._tensors, tensors, strict=True):
                held.copy_(each)

    def _loop(self, make: Callable[..., Loop], plan: Plan) -> Loop:
        """Return a loop over the tensors held."""
        inputs, register = self._like
        index, rest = self._tensors[0], list(self._tensors[1:])
        starts = None if inputs.starts is None else rest.pop(0)
        states = rest.pop(0)
        values = {name: rest.pop(0) for name in inputs.values}
        shared = tuple(Shared(rest.pop(0), rest.pop(0)) for _ in inputs.shared)
        held = replace(inputs, index=index, starts=starts, values=values, shared=shared)
        return make(held, plan(held), replace(register, states=states))

    def _run_forward(self) -> Results:
        self._current = self._make()
        return [self._current.forward()]

    def _run_backward(self) -> Results:
        assert self._current is not None
        assert self._gradient is not None
        return self._in_order(self._current, self._current.backward(self._gradient))

    def _run_both(self) -> None:
        loop = self._make()
        loop.backward(torch.zeros_like(loop.forward()))

    def _in_order(self, loop: Loop, found: Results) -> Results:
        """Return gradients as those of the tensors held, and behind them the parameters'."""
        by_tensor = {id(tensor): each for tensor, each in zip(loop.tensors, found, strict=True)}
        count = len(found) - len(loop.parameters)
        return [*(by_tensor.get(id(each)) for each in self._tensors), *found[count:]]

    def _captured(self, work: Callable[[], Results], warm_up: Callable[[], None] | None) -> Replay:
        device = self._tensors[0].device
        if device.type != "cuda":
            return work
        if warm_up is not None:
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    warm_up()
            torch.cuda.current_stream(device).wait_stream(side)
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = work()

        def replay() -> Results:
            graph.replay()
            return results

        return replay


def tensors_of(inputs: Inputs, register: Feedback) -> list[Tensor]:
    """Return all tensors that a loop reads beside the parameters."""
    starts = [] if inputs.starts is None else [inputs.starts]
    shared = [tensor for each in inputs.shared if isinstance(each, Shared) for tensor in (each.key, each.value)]
    return [inputs.index, *starts, register.states, *inputs.values.values(), *shared]


def trained(model: Architecture) -> list[Tensor]:
    """Return the parameters that gradients flow to, in the order of ``Loop.parameters``."""
    return [each for each in model.parameters() if each.requires_grad]


class _Captured(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loop: CapturedLoop, count: int, *tensors: Tensor) -> Tensor:
        ctx.loop = loop
        states = loop.forward(tensors[:count])
        ctx.number = loop.number
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        if ctx.number != ctx.loop.number:
            raise RuntimeError(
                "a captured loop ran forward again before its backward; with solver.capture=false that is no matter"
            )
        return None, None, *ctx.loop.backward(outputs[0])
