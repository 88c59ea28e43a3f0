"""Products through oneDNN are those of torch, to the rounding of float32; everything else is torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.models import ARCHITECTURES, kernels, layers, products
from tests.models.cases import make_model, make_tokens
from tests.solvers.loop_cases import FEEDING, error, run

here = pytest.mark.skipif(products._REORDER is None, reason="this build of torch has no oneDNN")
SHAPES = [(1, 8, 8), (3, 17, 31), (64, 128, 130), (130, 64, 256), (300, 96, 40), (1, 1024, 1024)]


def check(found: Tensor, one: Tensor, other: Tensor, added: Tensor | None = None) -> None:
    """Compare with one other^T + added [rows, columns], of matrices [rows, n] and [columns, n], in float64.

    The error of a sum of n products is below n eps times the sum of their sizes, whatever the order; that of any
    blocked kernel is far below.
    """
    exact, sizes = one.double() @ other.double().t(), one.double().abs() @ other.double().abs().t()
    if added is not None:
        exact, sizes = exact + added.double(), sizes + added.double().abs()
    limit = torch.finfo(one.dtype).eps * (1 + one.shape[1]) * sizes
    assert found.shape == exact.shape
    assert found.dtype is one.dtype
    assert bool(((found.double() - exact).abs() <= limit).all())


def drawn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape).requires_grad_(grad)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Note the shape of what is put through oneDNN."""
    calls: list[tuple[int, ...]] = []
    plain = products.product

    def noted(x: Tensor, *rest: Any) -> Tensor:
        calls.append(tuple(x.shape))
        return plain(x, *rest)

    monkeypatch.setattr(products, "product", noted)
    return calls


@here
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), SHAPES)
@pytest.mark.parametrize("reorders", [False, True])
def test_forward_and_backward(monkeypatch, taken, rows: int, width: int, out: int, bias: bool, reorders: bool):
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    monkeypatch.setattr(products, "REORDER_ROWS", 1 if reorders else 1 << 30)
    x, weight = drawn(rows, width, grad=True), drawn(out, width, grad=True)
    added = drawn(out, grad=True) if bias else None
    y = products.multiply(x, weight, added)
    gradient = drawn(rows, out)
    y.backward(gradient)
    assert len(taken) == 3
    check(y, x, weight, added)
    check(x.grad, gradient, weight.t())
    check(weight.grad, gradient.t(), x.t())
    if added is not None:
        check(added.grad[None], torch.ones(1, rows), gradient.t())


@here
@pytest.mark.parametrize(
    "arranged",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
        lambda x: x[:1].expand_as(x),
        lambda x: x[:, :1].expand_as(x),
        lambda x: x.flip(0)[::2].repeat_interleave(2, dim=0)[: x.shape[0]],
        lambda x: torch.stack([x, x], dim=1)[:, 1],
    ],
)
@pytest.mark.parametrize("which", ["x", "weight", "gradient"])
def test_any_strides(monkeypatch, which: str, arranged: Callable[[Tensor], Tensor]):
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    parts = {"x": drawn(24, 40), "weight": drawn(56, 40), "gradient": drawn(24, 56)}
    parts[which] = arranged(parts[which])
    x, weight = (parts[name].detach().requires_grad_() for name in ("x", "weight"))
    y = products.multiply(x, weight)
    y.backward(parts["gradient"])
    check(y, x, weight)
    check(x.grad, parts["gradient"], weight.t())
    check(weight.grad, parts["gradient"].t(), x.t())


@here
def test_leading_dimensions(monkeypatch):
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    weight, added = drawn(12, 8, grad=True), drawn(12, grad=True)
    for shape in ((8,), (1, 8), (5, 8), (2, 3, 8), (2, 1, 3, 8), (3, 8, 2)):
        x = drawn(*shape).transpose(-1, -2) if shape[-1] == 2 else drawn(*shape)
        x.requires_grad_()
        expected, found = F.linear(x, weight, added), products.multiply(x, weight, added)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        (one,), (other,) = (torch.autograd.grad(y.square().sum(), [x]) for y in (expected, found))
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@here
@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_needed(monkeypatch, taken, needed: tuple[bool, bool, bool]):
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    parts = [each.requires_grad_(need) for each, need in zip((drawn(6, 8), drawn(4, 8), drawn(4)), needed, strict=True)]
    y = products.multiply(*parts)
    y.sum().backward()
    assert [each.grad is not None for each in parts] == list(needed)
    assert len(taken) == 1 + (needed[0] or needed[1])


@here
def test_threshold(taken):
    rows = 8
    for extra, through in ((-1, 0), (0, 1)):
        out = products.LEAST_WORK // (rows * 128) + extra
        x, weight = drawn(rows, 128), drawn(out, 128)
        products.multiply(x, weight)
        assert len(taken) == through
        assert products.serves(x, weight) is bool(through)


@here
@pytest.mark.parametrize(
    ("rows", "width", "out"), [(8, 512, 16), (8, 16, 512), (512, 16, 8), (512, 8, 16), (64, 64, 64)]
)
def test_weight_gradient_in_either_orientation(monkeypatch, taken, rows: int, width: int, out: int):
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    x, gradient = drawn(rows, width), drawn(rows, out)
    found = products.weight_gradient(x, gradient)
    check(found, gradient.t(), x.t())
    assert taken == [(width, rows) if (out - width) * rows > out * width else (out, rows)]


def test_both_orientations_occur(monkeypatch, taken):
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    if products._REORDER is not None:
        for rows, width, out in ((512, 8, 64), (512, 64, 8)):
            products.weight_gradient(drawn(rows, width), drawn(rows, out))
        assert taken == [(8, 512), (8, 512)]


@here
def test_held_weights_serve_any_number_of_rows():
    weight = drawn(96, 64)
    for made in (1, 16, 100):
        held = products.held(weight, made)
        for rows in (1, 2, 16, 33, 300):
            x = drawn(rows, 64)
            check(products.product(x, held), x, weight)
    turned = products.held(weight.t(), 4)
    x = drawn(5, 96)
    check(products.product(x, turned), x, weight.t())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_not_taken(taken, dtype: torch.dtype):
    x, weight = drawn(256, 128).to(dtype), drawn(128, 128).to(dtype)
    assert not products.takes(x, weight)
    assert torch.equal(products.multiply(x, weight), F.linear(x, weight))
    assert torch.equal(products.weight_gradient(x, x), x.t() @ x)
    assert not taken


def test_autocast_and_transforms_are_not_taken(taken):
    x, weight = drawn(256, 128), drawn(128, 128)
    with torch.autocast("cpu", torch.bfloat16):
        found = products.multiply(x, weight)
        assert found.dtype is torch.bfloat16
    tangent = torch.func.jvp(lambda each: products.multiply(each, weight), (x,), (x,))[1]
    torch.testing.assert_close(tangent, F.linear(x, weight))
    torch.testing.assert_close(
        torch.vmap(lambda each: products.multiply(each, weight))(x[:, None]), F.linear(x, weight)[:, None]
    )
    assert not taken


def test_without_the_operation(monkeypatch, taken):
    monkeypatch.setattr(products, "_REORDER", None)
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    monkeypatch.setattr(products, "LEAST_HELD", 0)
    x, weight, added = drawn(256, 128, grad=True), drawn(128, 128), drawn(128)
    assert torch.equal(products.multiply(x, weight, added), F.linear(x, weight, added))
    assert not products.serves_held(x, weight)
    model = make_model(ARCHITECTURES["rlt"], ARCHITECTURES["rlt"].variants()["plain"], dtype=torch.float32).train()
    run(model, make_tokens(model.config))
    assert not taken


@here
def test_layer():
    layer, plain = layers.Linear(256, 512), torch.nn.Linear(256, 512)
    plain.load_state_dict(layer.state_dict())
    x = drawn(4, 64, 256)
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-5, atol=1e-5)


@here
@pytest.mark.parametrize("loop", ["fast", "autograd"])
@pytest.mark.parametrize("architecture", FEEDING)
def test_architectures_give_the_same(monkeypatch, taken, architecture: str, loop: str):
    """With every product through oneDNN and with none, to the rounding of float32."""
    cls = ARCHITECTURES[architecture]
    model = make_model(cls, cls.variants()["untied" if architecture != "rlt" else "tied"], dtype=torch.float32).train()
    tokens = make_tokens(model.config)
    found = []
    for least in (0, 1 << 60):
        monkeypatch.setattr(products, "LEAST_WORK", least)
        monkeypatch.setattr(products, "LEAST_HELD", least)
        taken.clear()
        found.append(run(model, tokens, loop=loop, interval=2))
        assert bool(taken) is (least == 0)
    (states, gradients), (expected, reference) = found
    torch.testing.assert_close(states, expected, rtol=1e-3, atol=1e-4)
    assert error(gradients, reference) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 80])
@pytest.mark.parametrize(("out", "width"), [(3, 7), (300, 260)])
@pytest.mark.parametrize("transposed", [False, True])
def test_repeated(dtype: torch.dtype, rows: int, out: int, width: int, transposed: bool):
    """Whatever takes it, it is the same product."""
    weight = drawn(width, out).t() if transposed else drawn(out, width)
    weight = weight.to(dtype)
    for operations in (None, kernels.compiled()):
        like = drawn(rows, width).to(dtype)
        product = products.repeated(weight, like, operations)
        for x in (like, drawn(max(1, rows - 1), 2 * width).to(dtype)[:, ::2]):
            check(product(x), x, weight)
