"""Layers as links of a chain, for loops over time.

Autograd's own work for one small operation costs about as much as the operation. Within a loop, layers that follow each
other are one node to autograd: a chain of links, each with a forward and a backward of its own that put the gradients
of parameters aside (``collector``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.models.collector import CollectedHeads, CollectedProduct, CollectedWeight, Collector, current
from pipeline.models.functions import (
    rotate_backward,
    rotate_forward,
    swiglu_backward,
    widened,
)
from pipeline.models.kernels import Kernels

Made = TypeVar("Made")


class Link(Protocol):
    """One layer outside autograd.

    Both methods may be given a tensor that the result is to be written to (``out``). They may as well return another.
    """

    def forward(self, x: Any, out: Tensor | None = None) -> tuple[Any, Any]:
        """Return what the layer makes of x, and what its backward needs."""

    def backward(self, kept: Any, gradient: Any, out: Tensor | None = None) -> Any:
        """Return the gradient of x; put those of parameters aside."""


class LinearLink:
    """x W^T + b; under autocast in its dtype.

    What it reads, and the gradient of what it gives, are kept in buffers. It offers them to the links before and behind
    it, so that these write there what would be copied otherwise.
    """

    def __init__(self, product: CollectedProduct, bias: CollectedWeight | None) -> None:
        self._product, self._bias, product.bias = product, bias, bias
        self._room: tuple[Tensor, Tensor, int] | None = None
        self._gradient_room: tuple[Tensor, Tensor] | None = None

    def room(self, shape: torch.Size, like: Tensor) -> Tensor | None:
        """Return where its next input [*shape, in] may be written; None if it wants to copy it.

        Args:
            shape: rows of the input.
            like: a tensor of its dtype and device.
        """
        if like.dtype is not torch.float64 and torch.is_autocast_enabled(like.device.type):
            return None
        found = self._product.room(shape.numel(), like)
        if found is None:
            return None
        place, rows = found
        shaped = rows.view(*shape, -1)
        self._room = shaped, rows, place
        return shaped

    def gradient_room(self, kept: Any) -> Tensor | None:
        """Return where the gradient of its result may be written, given what forward kept; None as in ``room``."""
        place, shape, dtype, inner = kept
        if place < 0 or dtype is not inner:
            return None
        rows = self._product.gradient_room(place, shape[:-1].numel(), inner)
        shaped = rows.view(*shape[:-1], -1)
        self._gradient_room = shaped, rows
        return shaped

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map [..., in] to [..., out]."""
        room, self._room = self._room, None
        shape, dtype = x.shape, x.dtype
        if room is not None:
            shaped, rows, place = room
            if x is not shaped:
                shaped.copy_(x)
        else:
            kind = x.device.type
            if dtype is not torch.float64 and torch.is_autocast_enabled(kind):
                x = x.to(torch.get_autocast_dtype(kind))
            rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            place = self._product.keep(rows)
        y = self._product(rows, False)
        if self._bias is not None:
            y += self._bias.value(rows.dtype)
        return y.view(*shape[:-1], -1), (place, shape, dtype, rows.dtype)

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        place, shape, dtype, inner = kept
        room, self._gradient_room = self._gradient_room, None
        if room is not None:
            shaped, rows = room
            if gradient is not shaped:
                shaped.copy_(gradient)
            gradient = rows
        else:
            gradient = gradient.reshape(-1, gradient.shape[-1])
            gradient = gradient if gradient.dtype is inner else gradient.to(inner)
            self._product.put_aside(place, gradient)
        of_x = self._product(gradient, True).view(shape)
        return of_x if of_x.dtype is dtype else of_x.to(dtype)


class RMSNormLink:
    """RMSNorm; see ``functions.rms_norm``.

    What the width makes of the mean is left to the weight, so that it costs nothing at a step: with the norm n of x,
    y = x / sqrt(n^2 + width eps) * sqrt(width) weight.

    Args:
        weight: learned weight, [width] or [heads, width]; None for ones.
        width: width of the last dimension.
        eps: added to the mean square.
        kernels: what takes it in one pass, where it can; None: torch's operations.

    Attributes:
        weight: as given.
        root: square root of the width.
        least: what is added to the squared norm.
    """

    def __init__(
        self,
        weight: CollectedWeight | CollectedHeads | None,
        width: int,
        eps: float,
        kernels: Kernels | None = None,
    ) -> None:
        self.weight, self.root, self.least = weight, math.sqrt(width), width * eps
        self._kernels = None if weight is None else kernels

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map [..., width] to the same shape."""
        if self._kernels is not None and isinstance(self.weight, CollectedWeight) and self._kernels.take(x):
            x, weight = x.contiguous(), self.weight.scaled(x.dtype, self.root)
            y, factor = self._kernels.norm(x, weight, self.least, out)
            return y, (x, factor)
        wide = widened(x)
        factor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().add_(self.least).rsqrt_()
        unit = wide * factor
        y = torch.mul(unit, self.root if self.weight is None else self.weight.scaled(unit.dtype, self.root), out=out)
        return (y if y.dtype is x.dtype else y.to(x.dtype)), (unit, factor, x.dtype)

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        if len(kept) == 2:
            x, factor = kept
            assert self._kernels is not None
            assert isinstance(self.weight, CollectedWeight)
            weight = self.weight.scaled(x.dtype, self.root)
            sums = self.weight.running(x.dtype, self._kernels.threads, self.root)
            return self._kernels.norm_back(x, weight, factor, gradient, sums, out)
        unit, factor, dtype = kept
        gradient = widened(gradient)
        if self.weight is None:
            gradient = gradient * self.root
            along = (gradient * unit).sum(dim=-1, keepdim=True)
        else:
            weight, product = self.weight.scaled(unit.dtype, self.root), gradient * unit
            self.weight.put_aside_summands(product, self.root)
            gradient = gradient * weight
            if weight.dim() == 1:
                along = torch.matmul(product, weight).unsqueeze_(-1)
            else:
                along = (gradient * unit).sum(dim=-1, keepdim=True)
        of_x = torch.addcmul(gradient, unit, along, value=-1, out=out).mul_(factor)
        return of_x if of_x.dtype is dtype else of_x.to(dtype)


class LayerNormLink:
    """LayerNorm."""

    def __init__(self, weight: CollectedWeight, bias: CollectedWeight, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map [..., width] to the same shape."""
        wide = widened(x)
        weight, bias = self._weight.value(wide.dtype), self._bias.value(wide.dtype)
        y, mean, scale = torch.native_layer_norm(wide, x.shape[-1:], weight, bias, self._eps)
        return y.to(x.dtype), (x, mean, scale)

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        x, mean, scale = kept
        wide = widened(x)
        of_x, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            widened(gradient).contiguous(),
            wide,
            x.shape[-1:],
            mean,
            scale,
            self._weight.value(wide.dtype),
            self._bias.value(wide.dtype),
            [True, True, True],
        )
        self._weight.put_aside_summands(of_weight[None])
        self._bias.put_aside_summands(of_bias[None])
        return of_x.to(x.dtype)


class SwiGLULink:
    """silu(gate) * up; see ``functions.swiglu``, and ``RMSNormLink`` for the kernels."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map [..., 2 hidden] to [..., hidden]."""
        if self._kernels is not None and self._kernels.take(x):
            return self._kernels.swiglu(x, out), x
        gate, up = x.chunk(2, dim=-1)
        return torch.mul(F.silu(gate), up, out=out), x

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        if self._kernels is not None and self._kernels.take(kept):
            return self._kernels.swiglu_back(kept, gradient, out)
        return swiglu_backward(kept, gradient, out)


class GELULink:
    """GELU."""

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map x to the same shape."""
        return F.gelu(x), x

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        return torch.ops.aten.gelu_backward(gradient, kept)


class SquaredReLULink:
    """The square of the positive part."""

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map x to the same shape."""
        positive = F.relu(x)
        return positive.square(), positive

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        return torch.mul(gradient, kept).mul_(2)


class RotationLink:
    """Rotary positions; see ``functions.rotate``."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Rotate x [rows, n, heads, head_dim]."""
        return rotate_forward(x, self._cos, self._sin), None

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        return rotate_backward(gradient, self._cos, self._sin)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines, [rows or 1, n, 1, head_dim]."""
        return self._cos, self._sin


class HeadsLink:
    """Queries, keys and values of a packed projection: QK-norm and rotation of the first two, both at once.

    Args:
        heads: heads of queries, and of keys.
        head_dim: width of a head.
        norm: QK-norm of both, or nothing.
        rotation: rotary positions.
    """

    def __init__(self, heads: tuple[int, int], head_dim: int, norm: Sequence[Link], rotation: RotationLink) -> None:
        self.heads, self.head_dim, self.norm, self.rotation = heads, head_dim, norm, rotation
        self._links = [*norm, rotation]

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Any, Any]:
        """Map [rows, n, packed] to queries, keys and values [rows, n, heads, head_dim], heads of their own."""
        packed = x.view(*x.shape[:-1], -1, self.head_dim)
        both = sum(self.heads)
        turned, kept = run_links(packed[:, :, :both], self._links)
        return (turned[:, :, : self.heads[0]], turned[:, :, self.heads[0] :], packed[:, :, both:]), kept

    def backward(self, kept: Any, gradient: Any, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        of_query, of_key, of_value = gradient
        both = torch.cat([of_query, of_key], dim=2)
        rows, count, heads, _ = both.shape
        if out is None:
            out = both.new_empty(rows, count, (heads + self.heads[1]) * self.head_dim)
        by_head = out.view(rows, count, -1, self.head_dim)
        turned = by_head[:, :, :heads]
        found = return_through(self._links, kept, both, turned)
        if found is not turned:
            turned.copy_(found)
        by_head[:, :, heads:].copy_(of_value)
        return out


class QueriesLink:
    """Queries of a projection that makes nothing else, QK-normed and rotated.

    Args:
        head_dim: width of a head.
        norm: QK-norm, or nothing.
        rotation: rotary positions.
    """

    def __init__(self, head_dim: int, norm: Sequence[Link], rotation: RotationLink) -> None:
        self.head_dim, self.norm, self.rotation = head_dim, norm, rotation
        self._links = [*norm, rotation]

    def forward(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """Map [rows, n, heads * head_dim] to [rows, n, heads, head_dim]."""
        return run_links(x.view(*x.shape[:-1], -1, self.head_dim), self._links)

    def backward(self, kept: Any, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient of x."""
        if out is None:
            return return_through(self._links, kept, gradient).flatten(2)
        by_head = out.view(*out.shape[:-1], -1, self.head_dim)
        found = return_through(self._links, kept, gradient, by_head)
        return out if found is by_head else found.flatten(2)


def links_of(module: nn.Module, collector: Collector) -> list[Link] | None:
    """Return a module as links; None if it has none, or if they are not all that a call of it does."""
    make: Any = getattr(module, "links", None)
    return make(collector) if make is not None and replaceable(module) else None


def replaceable(module: nn.Module, *methods: str) -> bool:
    """Return whether the links of a module do what its methods (``forward``, if none are named) do, and nothing else.

    They do not where they are those of a base class and a method has been written anew since, or with hooks.
    """
    order = type(module).__mro__

    def depth(name: str) -> int:
        return next((place for place, each in enumerate(order) if name in vars(each)), len(order))

    written = all(depth("links") <= depth(each) and each not in vars(module) for each in methods or ("forward",))
    return hasattr(module, "links") and written and not any(hooked(each) for each in module.modules())


def once(make: Callable[..., Made | None], *arguments: object) -> Made | None:
    """Return what a function makes of a collector and arguments, made once in a loop; None outside a loop."""
    collector = current()
    if collector is None:
        return None
    key = make, *arguments
    if key not in collector.links:
        collector.links[key] = make(collector, *arguments)
    found: Any = collector.links[key]
    return found


def hooked(module: nn.Module) -> bool:
    """Return whether a call of a module runs hooks."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def collected(*modules: nn.Module | None) -> list[Link] | None:
    """Return modules that follow each other as links; None outside a loop, or if some are not all collected."""
    collector = current()
    if collector is None:
        return None
    key = tuple(map(id, modules))
    if key not in collector.links:
        found: list[Link] | None = []
        for module in modules:
            if module is not None and found is not None:
                made = links_of(module, collector)
                found = None if made is None else [*found, *made]
        collector.links[key] = found
    cached: Any = collector.links[key]
    return cached


def run(x: Tensor, links: Sequence[Link], onto: Tensor | None = None) -> Tensor:
    """Return what links make of x, added to ``onto`` if that is given."""
    if not torch.is_grad_enabled():
        y, _ = run_links(x, links)
        return y if onto is None else onto + y
    result: Tensor = _Chain.apply(x, onto, links)
    return result


def chain(x: Tensor, *modules: nn.Module, onto: Tensor | None = None) -> Tensor:
    """Return what modules that follow each other make of x, added to ``onto`` if that is given."""
    found = collected(*modules)
    if found is not None:
        return run(x, found, onto)
    for module in modules:
        x = module(x)
    return x if onto is None else onto + x


def run_links(x: Tensor, links: Sequence[Link]) -> tuple[Any, list[Any]]:
    """Return what the links make of x, and what each keeps."""
    kept, shape, like, y = [], x.shape[:-1], x, cast(Any, x)
    for number, link in enumerate(links, start=1):
        following = links[number] if number < len(links) else None
        out = following.room(shape, like) if isinstance(following, LinearLink) else None
        y, each = link.forward(y, out)
        kept.append(each)
    return y, kept


def return_through(links: Sequence[Link], kept: list[Any], gradient: Any, out: Tensor | None = None) -> Any:
    """Return the gradient of what went into the links, written to ``out`` if they can; what they kept is let go."""
    for number in reversed(range(len(links))):
        each, room = kept.pop(), out
        if number:
            before = links[number - 1]
            room = before.gradient_room(kept[-1]) if isinstance(before, LinearLink) else None
        gradient = links[number].backward(each, gradient, room)
    return gradient


def gradient_room(links: Sequence[Link], kept: list[Any]) -> Tensor | None:
    """Return where the gradient of what links gave may be written (``LinearLink.gradient_room``)."""
    last = links[-1]
    return last.gradient_room(kept[-1]) if isinstance(last, LinearLink) else None


class _Chain(torch.autograd.Function):
    """What is kept are inputs of links, never what the chain returns, so nothing refers to itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, onto: Tensor | None, links: Sequence[Link]) -> Tensor:
        y, ctx.kept = run_links(x, links)
        ctx.links, ctx.onto = links, onto is not None
        return y if onto is None else onto + y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        of_x = return_through(ctx.links, ctx.kept, outputs[0])
        return of_x, outputs[0] if ctx.onto else None, None


def residual(x: Tensor, branches: Sequence[Sequence[Link]], scale: float) -> Tensor:
    """Return a residual stream x after branches that each add ``scale`` times what their links make of it."""
    if not branches:
        return x
    if not torch.is_grad_enabled():
        for links in branches:
            y, _ = run_links(x, links)
            x = x + y if scale == 1.0 else torch.add(x, y, alpha=scale)
        return x
    result: Tensor = _Residual.apply(x, branches, scale)
    return result


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branches: Sequence[Sequence[Link]], scale: float) -> Tensor:
        ctx.branches, ctx.scale, ctx.kept = branches, scale, []
        for links in branches:
            y, kept = run_links(x, links)
            ctx.kept.append(kept)
            x = x + y if scale == 1.0 else torch.add(x, y, alpha=scale)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        gradient, scaled = outputs[0], ctx.scale != 1.0
        for number in reversed(range(len(ctx.branches))):
            links, kept, room = ctx.branches[number], ctx.kept.pop(), None
            inner = torch.mul(gradient, ctx.scale, out=gradient_room(links, kept)) if scaled else gradient
            inner = return_through(links, kept, inner)
            if number and not scaled:  # the gradient of what the branch before gave
                room = gradient_room(ctx.branches[number - 1], ctx.kept[-1])
            gradient = torch.add(gradient, inner, out=room)
        return gradient, None, None


def gated(x: Tensor, entry: Tensor, gate: Tensor, links: Sequence[Link], alpha: float) -> Tensor:
    """Return entry + alpha sigmoid(gate + g) v, [rows, n, d], for what links make of x: g and v behind each other.

    Args:
        x: [rows or 1, n or 1, ...].
        entry: [rows or 1, n, d].
        gate: likewise.
        links: map x to [rows or 1, n or 1, 2 d].
        alpha: factor.
    """
    if not torch.is_grad_enabled():
        y, _ = run_links(x, links)
        return _open(y, entry, gate, alpha)[0]
    result: Tensor = _Gated.apply(x, entry, gate, links, alpha)
    return result


def _open(y: Tensor, entry: Tensor, gate: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``gated``, the open gate and v."""
    own, value = y.chunk(2, dim=-1)
    opened = torch.add(gate, own).sigmoid_()
    return torch.addcmul(entry, opened, value, value=alpha), opened, value


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: Tensor, gate: Tensor, links: Sequence[Link], alpha: float) -> Tensor:
        y, ctx.kept = run_links(x, links)
        ctx.links, ctx.alpha, ctx.shapes = links, alpha, (entry.shape, gate.shape)
        result, ctx.opened, ctx.value = _open(y, entry, gate, alpha)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        opened, value = ctx.opened, ctx.value
        scaled = outputs[0] * ctx.alpha
        of_gate = torch.ops.aten.sigmoid_backward(scaled * value, opened)
        room = gradient_room(ctx.links, ctx.kept)
        if room is None:
            room = value.new_empty(*value.shape[:-1], 2 * value.shape[-1])
        of_own, of_value = room.chunk(2, dim=-1)
        of_own.copy_(of_gate.sum_to_size(of_own.shape))
        of_value.copy_(scaled.mul_(opened).sum_to_size(of_value.shape))
        of_x = return_through(ctx.links, ctx.kept, room)
        of_entry = outputs[0].sum_to_size(ctx.shapes[0])
        return of_x, of_entry, of_gate.sum_to_size(ctx.shapes[1]), None, None
