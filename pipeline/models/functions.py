"""Functions of layers with backward written by hand: fewer passes over memory, and fewer tensors kept, than autograd's.

The functions whose names end in ``_forward`` and ``_backward`` work outside autograd; ``links`` uses them too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension, in x's dtype and computed in float32 at least.

    Args:
        x: [..., width].
        weight: [width], or None.
        eps: added to the mean square.
    """
    if x.is_cuda:  # one kernel there
        return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., hidden], for both packed behind each other, [..., 2 hidden]."""
    result: Tensor = _SwiGLU.apply(gate_up)
    return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [rows, n, heads, head_dim] by the tables of ``rotation``; computed in their dtype, returned in x's."""
    result: Tensor = _Rotate.apply(x, cos, sin)
    return result


def rms_norm_forward(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x, and the factor [..., 1] that made each row's mean square one."""
    wide = widened(x)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    y = wide * scale
    if weight is not None:
        y.mul_(weight)
    return (y if y.dtype is x.dtype else y.to(x.dtype)), scale


def rms_norm_backward(x: Tensor, weight: Tensor | None, scale: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and what summed over rows is the weight's, [..., width]."""
    wide, gradient = widened(x), widened(gradient)
    normed = wide * scale
    product = gradient * normed
    if weight is None:
        along = product.mean(dim=-1, keepdim=True)
    else:
        along = torch.matmul(product, weight.to(product.dtype)).mul_(1 / x.shape[-1]).unsqueeze_(-1)
        gradient = gradient * weight
    of_x = normed.mul_(along).sub_(gradient).mul_(-scale)
    return (of_x if of_x.dtype is x.dtype else of_x.to(x.dtype)), product


def swiglu_backward(gate_up: Tensor, gradient: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the gradient of ``gate_up``, written to ``out`` if that is given; see ``swiglu``."""
    gate, up = gate_up.chunk(2, dim=-1)
    both = torch.empty_like(gate_up, memory_format=torch.contiguous_format) if out is None else out
    of_gate, of_up = both.chunk(2, dim=-1)
    torch.mul(gradient, F.silu(gate), out=of_up)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
    return both


def rotate_forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x turned by the tables' angle; see ``rotate``."""
    wide = x if x.dtype is cos.dtype else x.to(cos.dtype)
    y = wide * cos
    (first, second), (before, after) = y.chunk(2, dim=-1), wide.chunk(2, dim=-1)
    half = sin[..., : first.shape[-1]]
    first.addcmul_(after, half, value=-1)
    second.addcmul_(before, half)
    return y if y.dtype is x.dtype else y.to(x.dtype)


def rotate_backward(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of x, which is turned back; see ``rotate``."""
    wide = gradient if gradient.dtype is cos.dtype else gradient.to(cos.dtype)
    y = wide * cos
    (first, second), (before, after) = y.chunk(2, dim=-1), wide.chunk(2, dim=-1)
    half = sin[..., : first.shape[-1]]
    first.addcmul_(after, half)
    second.addcmul_(before, half, value=-1)
    return y if y.dtype is gradient.dtype else y.to(gradient.dtype)


def widened(x: Tensor) -> Tensor:
    """Return x in float32 at least."""
    return x if x.dtype is torch.float32 or x.dtype is torch.float64 else x.float()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y, scale = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        of_x, product = rms_norm_backward(x, weight, scale, outputs[0])
        of_weight = product.reshape(-1, product.shape[-1]).sum(dim=0) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return swiglu_backward(ctx.saved_tensors[0], outputs[0])


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_forward(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return rotate_backward(outputs[0], *ctx.saved_tensors), None, None
