"""Functions whose backward is written by hand: against finite differences, and against torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.models import functions
from pipeline.models.layers import rotation

EPS = 1e-6
SHAPES = [(5, 8), (2, 3, 8), (2, 3, 4, 8), (8,), (0, 8)]


def plain_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    wide = x if x.dtype is torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    return (y if weight is None else y * weight).to(x.dtype)


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def tables(count: int, head_dim: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return rotation(torch.arange(3, 3 + count)[None], head_dim, 100.0, dtype, "geometric")


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def arrangements(x: Tensor) -> list[Tensor]:
    """Return the same numbers, as tensors that do not lie in one piece."""
    wide = torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    turned = x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 2 else x.t().contiguous().t()
    spread = torch.stack([x, x], dim=-1)[..., 0]
    return [wide, turned, spread]


def compare(function: Callable[..., Tensor], plain: Callable[..., Tensor], *arguments: Tensor | None) -> None:
    """Compare values and gradients."""
    leaves = [each for each in arguments if each is not None and each.requires_grad]
    found, expected = function(*arguments), plain(*arguments)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    mine, reference = (torch.autograd.grad(y, leaves, gradient) for y in (found, expected))
    torch.testing.assert_close(mine, reference)


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return functions.rms_norm(x, weight, EPS)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...], learned: bool):
    x, weight = drawn(*shape), drawn(8) if learned else None
    compare(rms_norm, plain_norm, x, weight)
    torch.testing.assert_close(rms_norm(x, weight), F.rms_norm(x, (8,), weight, EPS))
    if x.numel():
        assert torch.autograd.gradcheck(rms_norm, (x, weight))


@pytest.mark.parametrize("learned", [True, False])
def test_rms_norm_of_extremes(learned: bool):
    """Rows of zeros, tiny and large ones: eps rules the first two."""
    weight = drawn(8) if learned else None
    x = (torch.randn(4, 8, dtype=torch.float64) * torch.tensor([0.0, 1e-8, 1.0, 1e8])[:, None]).requires_grad_()
    compare(rms_norm, plain_norm, x, weight)
    assert bool(rms_norm(x, weight).isfinite().all())


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_swiglu(shape: tuple[int, ...]):
    x = drawn(*shape)
    compare(functions.swiglu, plain_swiglu, x)
    assert torch.autograd.gradcheck(functions.swiglu, (x,))


@pytest.mark.parametrize("rows", [1, 2])
def test_rotate(rows: int):
    """With tables of every row and with one for all."""
    x, (cos, sin) = drawn(2, 4, 3, 8), tables(4)
    cos, sin = cos.expand(rows, -1, -1, -1), sin.expand(rows, -1, -1, -1)
    compare(lambda x: functions.rotate(x, cos, sin), lambda x: plain_rotation(x, cos, sin), x)
    assert torch.autograd.gradcheck(lambda x: functions.rotate(x, cos, sin), (x,))
    turned = functions.rotate(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(functions.rotate_backward(turned.detach(), cos, sin), x.detach())


@pytest.mark.parametrize("place", range(3))
def test_any_strides(place: int):
    cos, sin = tables(4)
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    strided = arrangements(x)[place].detach()
    assert not strided.is_contiguous()
    assert torch.equal(strided, x)
    strided.requires_grad_()
    compare(rms_norm, plain_norm, strided, drawn(8))
    compare(functions.swiglu, plain_swiglu, strided)
    compare(lambda x: functions.rotate(x, cos, sin), lambda x: plain_rotation(x, cos, sin), strided)


def test_any_strides_of_gradients():
    cos, sin = tables(4)
    x, weight = drawn(2, 4, 3, 8), drawn(8)
    for function in (
        lambda x: rms_norm(x, weight),
        functions.swiglu,
        lambda x: functions.rotate(x, cos, sin),
    ):
        y = function(x)
        expected = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)  # a gradient without strides
        torch.testing.assert_close((found,), expected)
        gradient = torch.randn_like(y)
        expected = torch.autograd.grad(y, x, gradient, retain_graph=True)
        for strided in arrangements(gradient):
            torch.testing.assert_close(torch.autograd.grad(y, x, strided, retain_graph=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weights", [torch.float32, None, "same"])
def test_half_precision(dtype: torch.dtype, weights: torch.dtype | str | None):
    """Results and gradients have the dtype of what they belong to, and are rounded once."""
    exact, cos_sin = torch.randn(2, 4, 3, 8, dtype=torch.float64), tables(4, dtype=torch.float32)
    x = exact.to(dtype).requires_grad_()
    weight = None if weights is None else torch.randn(8).to(dtype if weights == "same" else weights).requires_grad_()
    limit = 2 * torch.finfo(dtype).eps
    for function, plain, parameters in (
        (rms_norm, plain_norm, (weight,)),
        (functions.swiglu, plain_swiglu, ()),
        (functions.rotate, plain_rotation, cos_sin),
    ):
        leaves = [each for each in (x, *parameters) if each is not None and each.requires_grad]
        wide = [None if each is None else each.detach().double().requires_grad_() for each in (x, *parameters)]
        y, expected = function(x, *parameters), plain(*wide)
        assert y.dtype is dtype
        torch.testing.assert_close(y.double(), expected, rtol=limit, atol=limit)
        gradient = torch.randn_like(y)
        found = torch.autograd.grad(y, leaves, gradient)
        reference = torch.autograd.grad(expected, [wide[0], *wide[1:2]][: len(leaves)], gradient.double())
        for mine, leaf, truth in zip(found, leaves, reference, strict=True):
            assert mine.dtype is leaf.dtype
            torch.testing.assert_close(mine.double(), truth, rtol=8 * limit, atol=8 * limit)


def test_inputs_stay_as_they_are():
    x, weight, (cos, sin) = drawn(2, 4, 3, 8), drawn(8), tables(4)
    before, gradient = x.detach().clone(), torch.randn(2, 4, 3, 8, dtype=torch.float64)
    kept = gradient.clone()
    rms_norm(x, weight).backward(gradient)
    functions.rotate(x, cos, sin).backward(gradient)
    functions.swiglu(torch.cat([x, x], dim=-1)).backward(gradient)
    assert torch.equal(x, before)
    assert torch.equal(gradient, kept)
