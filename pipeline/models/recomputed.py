"""Position-parallel layers that are computed again in backward, a few positions at a time.

Where memory counts, the peak of a step would otherwise be the one layer whose activations are all there at once.
Forward is taken as without, so its results are the same to the last bit; gradients of parameters are sums over other
groups of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.models.links import hooked

SHARE, AT_ONCE = 16, 256
"""The activations of one in so many positions are there at once, or of so many positions if these are more; where rows
are taken as they are, of one row at least."""


@dataclass(frozen=True)
class Layers:
    """What is computed again: two functions that draw nothing at random, the second of what the first returns.

    Attributes:
        module: holds all parameters that they read.
        first: of x [rows, n, ...] and the place of its rows among all; any tensors [rows, ...].
        second: position by position, of the only tensor [rows, n, d] that the first returns, a tensor likewise; None
            where there is no second.
    """

    module: nn.Module
    first: Callable[[Tensor, slice], tuple[Tensor, ...]]
    second: Callable[[Tensor], Tensor] | None = None

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what they make of x [rows, n, d], contiguous; of all that was computed backward keeps x alone."""
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        found: tuple[Tensor, ...] = _Recomputed.apply(self, x, *parameters)
        return found

    def backward(
        self, x: Tensor, gradients: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of x and of the parameters, given those of the results."""
        of_x, sums = torch.empty_like(x), Sums(len(parameters))
        at_once = max(AT_ONCE, len(x) * x.shape[1] // SHARE)
        for rows in slices(len(x), at_once // x.shape[1]):
            leaf = x[rows].detach().requires_grad_()
            with torch.enable_grad():
                made = self.first(leaf, rows)
            of_made: Sequence[Tensor] = [each[rows] for each in gradients]
            if self.second is not None:
                of_made = [self._through_second(made[0].detach(), of_made[0], parameters, sums, at_once)]
            found = torch.autograd.grad(made, [leaf, *parameters], of_made, allow_unused=True)
            of_x[rows] = found[0]
            sums.add(found[1:])
        return of_x, sums.found

    def _through_second(
        self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor], sums: Sums, at_once: int
    ) -> Tensor:
        assert self.second is not None
        of_x = torch.empty_like(x)
        for part in slices(x.shape[1], at_once // len(x)):
            leaf = x[:, part].detach().requires_grad_()
            with torch.enable_grad():
                made = self.second(leaf)
            found = torch.autograd.grad(made, [leaf, *parameters], gradient[:, part], allow_unused=True)
            del made
            of_x[:, part] = found[0]
            sums.add(found[1:])
        return of_x


class Sums:
    """Gradients, added up.

    Attributes:
        found: a tensor for each; None where there was nothing to add.
    """

    def __init__(self, count: int) -> None:
        self.found: list[Tensor | None] = [None] * count
        self._own: set[int] = set()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, which others may hold too."""
        for place, each in enumerate(gradients):
            so_far = self.found[place]
            if each is None:
                continue
            if so_far is None:
                self.found[place] = each
            elif place in self._own:
                so_far += each
            else:
                self.found[place] = so_far + each
                self._own.add(place)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: Layers, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.layers, ctx.parameters, ctx.autocast = layers, parameters, current_autocast(x.device.type)
        ctx.save_for_backward(x)
        found = layers.first(x, slice(None))
        if layers.second is not None:
            found = (layers.second(found[0]),)
        return tuple(each.contiguous() for each in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        with ctx.autocast():
            of_x, of_parameters = ctx.layers.backward(*ctx.saved_tensors, outputs, ctx.parameters)
        return None, of_x if ctx.needs_input_grad[1] else None, *of_parameters


def callable_by_rows(module: nn.Module) -> bool:
    """Return whether nobody sees that a module is called for some rows at a time: it is as written, without hooks."""
    return all("forward" not in vars(each) and not hooked(each) for each in module.modules())


def of_rows(tensor: Tensor, rows: slice) -> Tensor:
    """Return some rows of a tensor [rows or 1, ...]."""
    return tensor if tensor.shape[0] == 1 else tensor[rows]


def slices(count: int, size: int) -> Iterator[slice]:
    """Return slices of ``count`` things, ``size`` each, or one if that is less."""
    size = max(1, size)
    return (slice(begin, begin + size) for begin in range(0, count, size))


def current_autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what brings the present settings of autocast back."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
