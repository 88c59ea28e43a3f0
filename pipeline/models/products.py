"""Matrix products of weights, by the fastest kernel at hand.

On a GPU, and for every dtype but float32, that is torch's own. For float32 on a CPU torch calls MKL, which leaves half
the width of processors that are not Intel's unused; oneDNN, which torch carries as well, does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.models.kernels import Kernels

# Up to so many multiply-adds our own kernel is faster than either, whose calls cost more than its arithmetic.
MOST_FEW = 1 << 20
# Below so many multiply-adds oneDNN's call costs more than its kernel saves.
LEAST_WORK = 1 << 20
# A weight that is put into oneDNN's own layout once and for many products is read faster from so many elements on, ...
LEAST_HELD = 1 << 16
# ... in the layout for so many rows at least: with that for fewer, products of few rows read no faster than without.
HELD_ROWS = 16
# From so many rows on a weight is put into oneDNN's own layout for a single product: it takes as long as a hundred rows
# and makes the product a twentieth faster.
REORDER_ROWS = 4096

_POINTWISE = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
_REORDER = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None) if _POINTWISE is not None else None
if _POINTWISE is not None:
    _POINTWISE = _POINTWISE.default


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, [..., out], in autograd.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.
    """
    if not serves(x, weight):
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


def serves(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN takes a product, rather than what torch would call."""
    return x.numel() * weight.shape[0] >= LEAST_WORK and takes(x, weight)


def serves_held(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN takes a product with a weight that is held in its layout (``held``)."""
    return (weight.numel() >= LEAST_HELD or x.numel() * weight.shape[0] >= LEAST_WORK) and takes(x, weight)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN can take a product."""
    return (
        _REORDER is not None
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.maybe_current_level()
    )


def reordered(weight: Tensor, rows: int) -> Tensor:
    """Return a float32 weight [out, in] in the layout that oneDNN likes best for products of so many rows."""
    assert _REORDER is not None
    packed: Tensor = _REORDER(weight, rows)
    return packed


def held(weight: Tensor, rows: int) -> Tensor:
    """Return a float32 weight [out, in] in the layout for many products of so many rows each."""
    return reordered(weight, max(rows, HELD_ROWS))


def repeated(weight: Tensor, like: Tensor, kernels: Kernels | None) -> Callable[[Tensor], Tensor]:
    """Return what maps x [rows, in] to x W^T, outside autograd, for many products with a weight [out, in].

    Args:
        weight: W, put into the layout of the kernel that is chosen.
        like: the first x; the others have its dtype and device, and about as many rows.
        kernels: compiled operations; None: there are none.
    """
    if kernels is not None and kernels.take(like) and like.numel() * weight.shape[0] <= MOST_FEW:
        right = weight.t().contiguous()
        return lambda x: kernels.multiply(x.contiguous(), right)
    if serves_held(like, weight):
        return partial(product, weight=held(weight, like.shape[0]))
    return partial(torch.mm, mat2=weight.t())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b [rows, out] outside autograd, for x [rows, in] and a weight [out, in], reordered or not."""
    assert _POINTWISE is not None
    result: Tensor = _POINTWISE(x, weight, bias, "none", [], "")
    return result


def weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """Return gradient^T x, [out, in], for x [rows, in] and a gradient [rows, out]."""
    if not serves(x, gradient.t()):
        return gradient.t() @ x
    rows, width, height = *x.shape, gradient.shape[1]
    # The first factor is copied, which takes longer than its share; so is a result that must be turned afterwards.
    if (height - width) * rows > height * width:
        return product(x.t(), gradient.t()).t()
    return product(gradient.t(), x.t())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        rows = x.reshape(-1, x.shape[-1])
        return _once(rows, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = outputs[0].reshape(-1, weight.shape[0])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _once(gradient, weight.t()).view(x.shape) if needs_x else None,
            weight_gradient(x.reshape(-1, x.shape[-1]), gradient) if needs_weight else None,
            gradient.sum(dim=0) if needs_bias and ctx.has_bias else None,
        )


def _once(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a product with a weight that may be another the next time."""
    rows = x.shape[0]
    return product(x, reordered(weight, rows) if rows >= REORDER_ROWS else weight, bias)
