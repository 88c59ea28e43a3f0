"""Layers as links of a chain, for loops over time.

Autograd's own work for one small operation costs about as much as the operation. Within a loop, layers that follow each
other are one node to autograd: a chain of links, each with a forward and a backward of its own that put the gradients
of parameters aside (``collector``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

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


class Link(Protocol):
    """One layer outside autograd."""

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Return what the layer makes of x, and what its backward needs."""

    def backward(self, kept: Any, gradient: Any) -> Any:
        """Return the gradient of x; put those of parameters aside."""


class LinearLink:
    """x W^T + b; under autocast in its dtype."""

    def __init__(self, product: CollectedProduct, bias: CollectedWeight | None) -> None:
        self._product, self._bias = product, bias

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map [..., in] to [..., out]."""
        dtype, kind = x.dtype, x.device.type
        if dtype is not torch.float64 and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y = self._product(rows, False)
        if self._bias is not None:
            y += self._bias.value(rows.dtype)
        return y.view(*x.shape[:-1], -1), (self._product.keep(rows), x.shape, dtype, rows.dtype)

    def backward(self, kept: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""
        place, shape, dtype, inner = kept
        gradient = gradient.reshape(-1, gradient.shape[-1])
        gradient = gradient if gradient.dtype is inner else gradient.to(inner)
        self._product.put_aside(place, gradient)
        if self._bias is not None:
            self._bias.put_aside_summands(gradient)
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
    """

    def __init__(self, weight: CollectedWeight | CollectedHeads | None, width: int, eps: float) -> None:
        self._weight, self._root, self._least = weight, math.sqrt(width), width * eps

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map [..., width] to the same shape."""
        wide = widened(x)
        factor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().add_(self._least).rsqrt_()
        unit = wide * factor
        y = unit * (self._root if self._weight is None else self._weight.scaled(unit.dtype, self._root))
        return (y if y.dtype is x.dtype else y.to(x.dtype)), (unit, factor, x.dtype)

    def backward(self, kept: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""
        unit, factor, dtype = kept
        gradient = widened(gradient)
        if self._weight is None:
            gradient = gradient * self._root
            along = (gradient * unit).sum(dim=-1, keepdim=True)
        else:
            weight, product = self._weight.scaled(unit.dtype, self._root), gradient * unit
            self._weight.put_aside_summands(product, self._root)
            gradient = gradient * weight
            if weight.dim() == 1:
                along = torch.matmul(product, weight).unsqueeze_(-1)
            else:
                along = (gradient * unit).sum(dim=-1, keepdim=True)
        of_x = torch.addcmul(gradient, unit, along, value=-1).mul_(factor)
        return of_x if of_x.dtype is dtype else of_x.to(dtype)


class LayerNormLink:
    """LayerNorm."""

    def __init__(self, weight: CollectedWeight, bias: CollectedWeight, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map [..., width] to the same shape."""
        wide = widened(x)
        weight, bias = self._weight.value(wide.dtype), self._bias.value(wide.dtype)
        y, mean, scale = torch.native_layer_norm(wide, x.shape[-1:], weight, bias, self._eps)
        return y.to(x.dtype), (x, mean, scale)

    def backward(self, kept: Any, gradient: Tensor) -> Tensor:
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
    """silu(gate) * up; see ``functions.swiglu``."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map [..., 2 hidden] to [..., hidden]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up), x

    def backward(self, kept: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""
        return swiglu_backward(kept, gradient)


class GELULink:
    """GELU."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map x to the same shape."""
        return F.gelu(x), x

    def backward(self, kept: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""
        return torch.ops.aten.gelu_backward(gradient, kept)


class SquaredReLULink:
    """The square of the positive part."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map x to the same shape."""
        positive = F.relu(x)
        return positive.square(), positive

    def backward(self, kept: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""
        return torch.mul(gradient, kept).mul_(2)


class RotationLink:
    """Rotary positions; see ``functions.rotate``."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos, self._sin = cos, sin

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Rotate x [rows, n, heads, head_dim]."""
        return rotate_forward(x, self._cos, self._sin), None

    def backward(self, kept: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""
        return rotate_backward(gradient, self._cos, self._sin)


class HeadsLink:
    """Queries, keys and values of a packed projection: QK-norm and rotation of the first two, both at once.

    Args:
        heads: heads of queries, and of keys.
        head_dim: width of a head.
        norm: QK-norm of both; None for none.
        rotation: rotary positions.
    """

    def __init__(self, heads: tuple[int, int], head_dim: int, norm: RMSNormLink | None, rotation: RotationLink) -> None:
        self._heads, self._head_dim = heads, head_dim
        self._links: list[Link] = [rotation] if norm is None else [norm, rotation]

    def forward(self, x: Tensor) -> tuple[Any, Any]:
        """Map [rows, n, packed] to queries, keys and values [rows, n, heads, head_dim], heads of their own."""
        packed = x.view(*x.shape[:-1], -1, self._head_dim)
        both = sum(self._heads)
        turned, kept = run_links(packed[:, :, :both], self._links)
        return (turned[:, :, : self._heads[0]], turned[:, :, self._heads[0] :], packed[:, :, both:]), kept

    def backward(self, kept: Any, gradient: Any) -> Tensor:
        """Return the gradient of x."""
        of_query, of_key, of_value = gradient
        both = return_through(self._links, kept, torch.cat([of_query, of_key], dim=2))
        return torch.cat([both, of_value], dim=2).flatten(2)


class QueriesLink:
    """Queries of a projection that makes nothing else, QK-normed and rotated.

    Args:
        head_dim: width of a head.
        norm: QK-norm; None for none.
        rotation: rotary positions.
    """

    def __init__(self, head_dim: int, norm: Sequence[Link], rotation: RotationLink) -> None:
        self._head_dim, self._links = head_dim, [*norm, rotation]

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map [rows, n, heads * head_dim] to [rows, n, heads, head_dim]."""
        return run_links(x.view(*x.shape[:-1], -1, self._head_dim), self._links)

    def backward(self, kept: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of x."""
        return return_through(self._links, kept, gradient).flatten(2)


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


def follows(module: nn.Module, *methods: str) -> bool:
    """Return ``replaceable`` of a module within a loop, in which it stays as it is."""
    collector, key = current(), (module, *methods)
    if collector is None:
        return False
    if key not in collector.links:
        collector.links[key] = replaceable(module, *methods)
    return bool(collector.links[key])


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


def run_links(x: Any, links: Sequence[Link]) -> tuple[Any, list[Any]]:
    """Return what the links make of x, and what each keeps."""
    kept = []
    for link in links:
        x, each = link.forward(x)
        kept.append(each)
    return x, kept


def return_through(links: Sequence[Link], kept: list[Any], gradient: Any) -> Any:
    """Return the gradient of what went into the links; what they kept is let go."""
    for link in reversed(links):
        gradient = link.backward(kept.pop(), gradient)
    return gradient


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
        gradient = outputs[0]
        for links in reversed(ctx.branches):
            inner = gradient if ctx.scale == 1.0 else gradient * ctx.scale
            gradient = gradient + return_through(links, ctx.kept.pop(), inner)
        return gradient, None, None
