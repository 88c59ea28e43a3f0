"""Compiled operations equal torch's, leave what is not a number as it is, and change nothing else of the process."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.models import kernels
from pipeline.models.kernels import Kernels, chosen, compiled

DTYPES = [torch.float32, torch.float64]


def differentiated(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    gradient = torch.randn_like(y)
    return gradient, list(torch.autograd.grad(y, leaves, gradient))


@pytest.fixture
def operations() -> Kernels:
    return compiled()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1, 7), (2, 300, 48)])  # the second is shared among threads
@pytest.mark.parametrize("given", [False, True])
def test_norm(operations: Kernels, dtype: torch.dtype, shape: tuple[int, ...], given: bool):
    torch.manual_seed(0)
    x, weight = (torch.randn(*each, dtype=dtype, requires_grad=True) for each in (shape, shape[-1:]))
    expected = x * (x.square().sum(dim=-1, keepdim=True) + 0.5).rsqrt() * weight
    gradient, reference = differentiated(expected, [x, weight])
    out, of_x = (torch.full(shape, torch.nan, dtype=dtype) if given else None for _ in range(2))
    sums = torch.zeros(operations.threads, shape[-1], dtype=dtype)
    y, factor = operations.norm(x.detach(), weight.detach(), 0.5, out)
    found = operations.norm_back(x.detach(), weight.detach(), factor, gradient, sums, of_x)
    assert not given or (y is out and found is of_x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close([found, sums.sum(dim=0)], reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 11])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 64), (130, 200)])  # whole blocks of columns, and parts
def test_multiply(operations: Kernels, dtype: torch.dtype, rows: int, height: int, width: int):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, height, dtype=dtype), torch.randn(height, width, dtype=dtype)
    torch.testing.assert_close(operations.multiply(x, weight), x @ weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 300])
def test_swiglu(operations: Kernels, dtype: torch.dtype, rows: int):
    torch.manual_seed(0)
    x = (20 * torch.randn(rows, 2 * 37, dtype=dtype)).requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    gradient, reference = differentiated(expected, [x])
    torch.testing.assert_close(operations.swiglu(x.detach(), None), expected)
    torch.testing.assert_close([operations.swiglu_back(x.detach(), gradient, None)], reference)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(operations: Kernels, bad: float):
    x = torch.ones(2, 8)
    x[0, 0] = bad
    weight, gradient = torch.ones(8), torch.ones(2, 8)
    y, factor = operations.norm(x, weight, 1e-6, None)
    assert not y[0].isfinite().all()
    found = operations.norm_back(x, weight, factor, gradient, torch.zeros(operations.threads, 8), None)
    assert not found[0].isfinite().all()
    assert found[1].isfinite().all()
    assert not operations.swiglu_back(torch.full((1, 8), torch.nan), torch.ones(1, 4), None).isfinite().any()


def test_small_numbers_are_kept():
    """Code linked with -ffast-math would flush them to zero, everywhere in the process."""
    code = (
        "from pipeline.models.kernels import compiled; import torch; compiled(); print(torch.tensor(1e-40).item() * 2)"
    )
    command = [sys.executable, "-c", f"{code}; print(float(torch.tensor([1e-40]).mul(0.5)[0]))"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert all(float(each) > 0 for each in found)


def test_which_tensors():
    assert Kernels.take(torch.zeros(1))
    assert not Kernels.take(torch.zeros(1, dtype=torch.bfloat16))
    assert not Kernels.take(torch.zeros(1, device="meta"))


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler --flag")
    with pytest.raises(ConfigError, match=r"needs a C compiler, and there is no 'no-such-compiler'.*kernels=torch"):
        compiled.__wrapped__()


def test_chosen_where_there_is_no_compiler(monkeypatch):
    assert chosen("torch") is None
    assert chosen("auto") is chosen("compiled") is compiled()
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(kernels, "compiled", compiled.__wrapped__)
    assert kernels._at_hand.__wrapped__() is None
    with pytest.raises(ConfigError, match="needs a C compiler"):
        chosen("compiled")


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "kernels.c"
    source.write_text("this is no C\n")
    monkeypatch.setattr(kernels, "SOURCE", source)
    with pytest.raises(ConfigError, match="made no library"):
        compiled.__wrapped__()
    assert [each.name for each in (tmp_path / "backfeed").iterdir()] == []


def test_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.__wrapped__()
    (made,) = (tmp_path / "backfeed").iterdir()
    before = made.stat().st_mtime_ns
    compiled.__wrapped__()
    assert os.listdir(tmp_path / "backfeed") == [made.name]
    assert made.stat().st_mtime_ns == before
