"""Collects what weight gradients are made of over many calls of a module, and takes one product a weight.

In a loop over time every weight is used at every step. Autograd takes a product of few rows for each of them, and reads
and writes the whole gradient every time. Here backward through a step computes the gradient of the step's data alone;
the rows that a weight read, and the gradients of what it gave, are put aside until there are enough of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.models import products
from pipeline.models.kernels import Kernels


@dataclass
class Recording:
    """Which steps are recorded, to be gone backward through, and where their rows lie in buffers.

    Attributes:
        rows: rows of which a product is taken.
        capacity: rows of all steps that are recorded at once.
        left: rows that are left in the buffers of ``CollectedProduct`` for further stretches. Each stretch lies before
            the last one, so that backward, which goes from the last to the first, finds its rows without a gap.
        length: rows of the stretch of steps at hand.
        first: rows of its first step; 0 where nobody has said.
        steps: its steps.
        stretch: number of the stretch, from 1 on; 0 while nothing is recorded.
    """

    rows: int
    capacity: int
    left: int
    length: int = 0
    first: int = 0
    steps: int = 0
    stretch: int = 0


class Collector:
    """Stands in for a model's parameters while a loop runs.

    Args:
        parameters: trained parameters by name.
        rows: rows of which a product is taken.
        capacity: rows of all steps that are recorded at once.

    Attributes:
        recording: which steps are recorded.
        leaves: a stand-in for each parameter, by name: a tensor of the same storage that autograd does not connect to
            it. Layers that know the collector (``current``) put their gradient aside; what else reads a stand-in gets
            its gradient from autograd, as that of a leaf.
        links: what modules do, as ``links.Link``; None for one whose parameters are not collected.
        kernels: operations of links; None: torch's own.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], rows: int, capacity: int) -> None:
        self.recording = Recording(rows, capacity, capacity)
        self.leaves: dict[str, Tensor] = {}
        self.links: dict[object, object] = {}
        self.kernels: Kernels | None = None
        self._parameters = dict(parameters)
        self._weights: dict[str, CollectedWeight] = {}
        self._heads: list[CollectedHeads] = []
        self._products: list[CollectedProduct] = []
        self._names: dict[int, str] = {}
        self._versions = [0 if each.is_inference() else each._version for each in parameters.values()]
        self.open()

    def open(self) -> None:
        """Read the parameters anew; a sharded one may lie elsewhere than it did in forward."""
        self.leaves = {name: each.detach().requires_grad_() for name, each in self._parameters.items()}
        self._names = {id(leaf): name for name, leaf in self.leaves.items()}

    @contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[None]:
        """Put the stand-ins in the place of a model's parameters, wherever a module holds one.

        ``torch.func.functional_call`` would leave a stand-in behind in a module that the model holds at two places.
        """
        leaves = {id(each): self.leaves[name] for name, each in self._parameters.items()}
        places = [
            (module._parameters, name, each)
            for module in model.modules()
            for name, each in module._parameters.items()
            if each is not None and id(each) in leaves
        ]
        try:
            for held, name, each in places:
                held[name] = leaves[id(each)]  # type: ignore[assignment]
            yield
        finally:
            for held, name, each in places:
                held[name] = each

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a parameter has been changed in place since the collector was made."""
        now = zip(self._parameters.items(), self._versions, strict=True)
        changed = ", ".join(name for (name, each), version in now if each._version != version)
        if changed:
            raise RuntimeError(f"changed in place between forward and backward through a loop over time: {changed}")

    def let_go(self) -> dict[str, Tensor]:
        """Let go of the stand-ins; return those that a graph still holds: autograd is to give their gradients."""
        stand_ins = {name: weakref.ref(leaf) for name, leaf in self.leaves.items()}
        self.leaves, self._names = {}, {}
        held = ((name, reference()) for name, reference in stand_ins.items())
        return {name: leaf for name, leaf in held if leaf is not None}

    def close(self) -> None:
        """Let go of the parameters, so that a sharded one may be freed."""
        self.leaves, self._names = {}, {}
        held: list[CollectedWeight | CollectedProduct | CollectedHeads]
        held = [*self._weights.values(), *self._products, *self._heads]
        for each in held:
            each.forget()

    def find(self, weight: Tensor | None) -> CollectedWeight | None:
        """Return where the gradient of a stand-in is put aside; None if the tensor is none."""
        name = None if weight is None else self._names.get(id(weight))
        return None if name is None else self.weight(name)

    def weight(self, name: str) -> CollectedWeight:
        """Return where the gradient of the parameter ``name`` is put aside."""
        found = self._weights.get(name)
        if found is None:
            found = self._weights[name] = CollectedWeight(self._parameters[name], self.recording.rows)
        return found

    def heads(self, query: CollectedWeight, key: CollectedWeight, heads: tuple[int, int]) -> CollectedHeads:
        """Return two norms' weights as one; see ``CollectedHeads``."""
        self._heads.append(CollectedHeads(query, key, heads, self.recording.rows))
        return self._heads[-1]

    def product(self, weight: CollectedWeight) -> CollectedProduct:
        """Return products with a weight; see ``CollectedProduct``."""
        self._products.append(CollectedProduct(self.recording, weight, self.kernels))
        return self._products[-1]

    def record(self, rows: int, *, first: int = 0, steps: int = 0) -> None:
        """Begin a stretch of steps that are recorded; those recorded before are done with.

        Args:
            rows: rows of all its steps.
            first: rows of the first.
            steps: number of them. A weight that reads fewer rows than ``first`` there reads as many in every step.
        """
        recording = self.recording
        if recording.left < rows:
            for product in self._products:
                product.take()
            recording.left = recording.capacity
        recording.left -= rows
        recording.length, recording.first, recording.steps = rows, first, steps
        recording.stretch += 1

    def gradients(self) -> dict[str, Tensor]:
        """Take the products that are due; return the gradients by name."""
        for product in self._products:
            product.take()
        for heads in self._heads:
            heads.take()
        found = {name: weight.gradient() for name, weight in self._weights.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}


class CollectedWeight:
    """One parameter and its gradient.

    Args:
        parameter: the parameter.
        rows: rows put aside before they are summed.
    """

    def __init__(self, parameter: nn.Parameter, rows: int) -> None:
        self._parameter, self._rows = parameter, rows
        self._values: dict[torch.dtype, Tensor] = {}
        self._scaled: Tensor | None = None
        self._summands: list[Tensor] = []
        self._waiting = 0
        self._factor = 1.0
        self._sum: Tensor | None = None
        self._running: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self._parameter.shape

    def forget(self) -> None:
        """Let go of the parameter's value."""
        self._values, self._scaled = {}, None

    def value(self, dtype: torch.dtype) -> Tensor:
        """Return the parameter in a dtype."""
        found = self._values.get(dtype)
        if found is None:
            found = self._values[dtype] = self._parameter.detach().to(dtype)
        return found

    def scaled(self, dtype: torch.dtype, factor: float) -> Tensor:
        """Return ``factor`` times the parameter in a dtype; the factor is always the same."""
        if self._scaled is None or self._scaled.dtype is not dtype:
            self._scaled = self.value(dtype) * factor
        return self._scaled

    def put_aside_summands(self, gradient: Tensor, factor: float = 1.0) -> None:
        """Remember gradients [..., width] whose sum, times a factor that is always the same, is the parameter's."""
        self._summands.append(gradient.reshape(-1, gradient.shape[-1]))
        self._factor = factor
        self._waiting += self._summands[-1].shape[0]
        if self._waiting >= self._rows:
            self._take()

    def running(self, dtype: torch.dtype, threads: int, factor: float) -> Tensor:
        """Return sums [threads, width] that all together, times a factor, are part of the gradient, to be added to."""
        if self._running is None:
            self._running, self._factor = torch.zeros(threads, *self.shape, dtype=dtype), factor
        return self._running

    def add(self, gradient: Tensor) -> None:
        """Add to the gradient a tensor that nobody else holds."""
        if self._sum is None:
            dtype = torch.promote_types(torch.float32, gradient.dtype)
            self._sum = gradient.to(dtype).contiguous()
        else:
            self._sum += gradient

    def gradient(self) -> Tensor | None:
        """Return the gradient, and begin anew; None if there was none."""
        self._take()
        found, self._sum = self._sum, None
        return found

    def _take(self) -> None:
        if self._summands:
            self.add(joined(self._summands).sum(dim=0).mul_(self._factor))
        if self._running is not None:
            self.add(self._running.sum(dim=0).mul_(self._factor))
        self._summands, self._waiting, self._running = [], 0, None


class CollectedProduct:
    """Products with one weight.

    The rows that it reads lie in one buffer, in the order of forward, and the gradients of what it gives in another.

    Args:
        recording: which steps are recorded. The collector itself would make a cycle, that only the garbage collector
            could free.
        weight: W, [out, in].
        kernels: compiled operations; None: there are none.

    Attributes:
        bias: what is added to the products, whose gradient is the sum of those put aside; None for nothing.
    """

    def __init__(self, recording: Recording, weight: CollectedWeight, kernels: Kernels | None) -> None:
        self._recording, self._weight, self._kernels = recording, weight, kernels
        self.bias: CollectedWeight | None = None
        self._out, self._in = weight.shape  # a sharded parameter has its shape in a loop alone
        self._products: dict[tuple[bool, torch.dtype], Callable[[Tensor], Tensor]] = {}
        self._stretch = self._next = self._end = 0
        self._begin: int | None = None
        self._inputs: Tensor | None = None
        self._gradients: Tensor | None = None
        self._low = self._stop = 0
        self._others: list[Others] = []

    def forget(self) -> None:
        """Let go of the weight's value."""
        self._products = {}

    def __call__(self, x: Tensor, transposed: bool) -> Tensor:
        """Return x W^T for x [rows, in], or x W for x [rows, out] if ``transposed``.

        The kernel is chosen, and the weight put into its layout, at the first product.
        """
        product = self._products.get((transposed, x.dtype))
        if product is None:
            weight = self._weight.value(x.dtype)
            product = products.repeated(weight.t() if transposed else weight, x, self._kernels)
            self._products[transposed, x.dtype] = product
        return product(x)

    def keep(self, x: Tensor) -> int:
        """Keep the rows x [rows, in] that the weight reads; return where they are kept."""
        if not self._recording.stretch:
            return 0
        found = self.room(x.shape[0], x)
        if found is None:
            self._others.append(Others(x.clone()))
            return -len(self._others)
        place, room = found
        room.copy_(x)
        return place

    def room(self, rows: int, like: Tensor) -> tuple[int, Tensor] | None:
        """Return the place of the next rows that the weight reads, and the buffer [rows, in] that keeps them.

        The caller writes them. None if they are not kept, or not in the buffer.

        Args:
            rows: their number.
            like: a tensor of their dtype and device.
        """
        recording = self._recording
        if not recording.stretch:
            return None
        if self._stretch != recording.stretch:
            self._open(rows)
        place, stop = self._next, self._next + rows
        if stop > self._end:  # the layer is used several times in a step
            return None
        if self._inputs is None:
            self._inputs = like.new_empty(recording.capacity, self._in)
        if self._inputs.dtype is not like.dtype:
            return None
        self._next = stop
        return place, self._inputs[place:stop]

    def _open(self, rows: int) -> None:
        """Set the stretch at hand before the last one, given the rows that the weight reads in its first step.

        What reads one state a chunk is given no more room than it fills: without gaps the rows of all stretches are
        summed at once, to the same last bit however many stretches there are.
        """
        recording = self._recording
        length = min(rows * recording.steps, recording.length) if rows < recording.first else recording.length
        self._end = recording.capacity if self._begin is None else self._begin
        self._begin = self._next = self._end - length
        self._stretch = recording.stretch

    def put_aside(self, place: int, gradient: Tensor) -> None:
        """Remember the gradient [rows, out] of what the weight made of the rows kept at a place."""
        if place < 0:
            self._others[-place - 1].gradient = gradient.clone()
        else:
            self.gradient_room(place, gradient.shape[0], gradient.dtype).copy_(gradient)

    def gradient_room(self, place: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer [rows, out] that ``put_aside`` fills for the rows kept at a place that is not negative.

        The caller writes them, before anything else is put aside.
        """
        if self._gradients is None or self._gradients.shape[0] < rows:  # the last step may be shorter than others
            self._take_block()
            size = max(rows, min(self._recording.rows, self._recording.capacity))
            assert self._inputs is not None
            self._gradients = self._inputs.new_empty(size, self._out, dtype=dtype)
        size = self._gradients.shape[0]
        if self._low < self._stop and (place + rows != self._low or self._stop - place > size):
            self._take_block()
        if self._low == self._stop:
            self._low = self._stop = place + rows
        self._low = place
        begin = size - (self._stop - place)
        return self._gradients[begin : begin + rows]

    def take(self) -> None:
        """Add the products of what was put aside to the gradient."""
        self._take_block()
        for other in self._others:
            if other.gradient is not None:
                self._add(other.rows, other.gradient)
        self._others, self._inputs, self._gradients, self._begin = [], None, None, None

    def _take_block(self) -> None:
        if self._inputs is not None and self._gradients is not None and self._low < self._stop:
            gradients = self._gradients[self._gradients.shape[0] - (self._stop - self._low) :]
            self._add(self._inputs[self._low : self._stop], gradients)
        self._low = self._stop = 0

    def _add(self, rows: Tensor, gradients: Tensor) -> None:
        self._weight.add(products.weight_gradient(rows, gradients))
        if self.bias is not None:
            self.bias.add(gradients.sum(dim=0))


@dataclass
class Others:
    """Rows that a weight read beside those of its buffer, and the gradient of what it made of them."""

    rows: Tensor
    gradient: Tensor | None = None


class CollectedHeads:
    """The weights [head_dim] of a norm of queries and of one of keys, for heads of both that lie behind each other.

    Args:
        query: weight of the queries' norm.
        key: weight of the keys'.
        heads: heads of queries, and of keys.
        rows: rows put aside before they are summed.
    """

    def __init__(self, query: CollectedWeight, key: CollectedWeight, heads: tuple[int, int], rows: int) -> None:
        self._both, self._heads, self._rows = (query, key), heads, rows
        self._scaled: Tensor | None = None
        self._summands: list[Tensor] = []
        self._waiting = 0
        self._factor = 1.0
        self._running: Tensor | None = None

    def forget(self) -> None:
        """Let go of the weights' values."""
        self._scaled = None

    def scaled(self, dtype: torch.dtype, factor: float) -> Tensor:
        """Return ``factor`` times the weight of each head, [heads, head_dim]; see ``CollectedWeight.scaled``."""
        if self._scaled is None or self._scaled.dtype is not dtype:
            values = (
                weight.value(dtype).expand(count, -1) for weight, count in zip(self._both, self._heads, strict=True)
            )
            self._scaled = torch.cat(list(values)) * factor
        return self._scaled

    def put_aside_summands(self, gradient: Tensor, factor: float) -> None:
        """Remember gradients [..., heads, head_dim]; see ``CollectedWeight.put_aside_summands``."""
        self._summands.append(gradient.view(-1, *gradient.shape[-2:]))
        self._factor = factor
        self._waiting += self._summands[-1].shape[0]
        if self._waiting >= self._rows:
            self.take()

    def running(self, dtype: torch.dtype, threads: int, factor: float) -> Tensor:
        """Return sums [threads, heads, head_dim]; see ``CollectedWeight.running``."""
        if self._running is None:
            shape = sum(self._heads), *self._both[0].shape
            self._running, self._factor = torch.zeros(threads, *shape, dtype=dtype), factor
        return self._running

    def take(self) -> None:
        """Add what was put aside to the weights' gradients."""
        found = [joined(self._summands).sum(dim=0)] if self._summands else []
        if self._running is not None:
            found.append(self._running.sum(dim=0))
        for each in found:
            for weight, part in zip(self._both, each.mul_(self._factor).split(self._heads), strict=True):
                weight.add(part.sum(dim=0))
        self._summands, self._waiting, self._running = [], 0, None


def joined(parts: list[Tensor]) -> Tensor:
    """Return the parts behind each other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


_current: ContextVar[Collector | None] = ContextVar("collector", default=None)


def current() -> Collector | None:
    """Return the collector at work; None outside a loop."""
    return _current.get()


@contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Let layers put the gradients of their parameters aside."""
    token = _current.set(collector)
    try:
        yield
    finally:
        _current.reset(token)
