"""The machine's peak, measured: what utilisation is a share of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.models import products


def measured_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.5) -> float:
    """Return the FLOP/s of one device in a large square matrix product, the best of those that fit in ``seconds``.

    Where a CPU has several kernels for it, all of them are tried.

    Args:
        device: device to measure.
        dtype: dtype of the factors.
        seconds: time to spend, after one product of each kernel to warm up.
    """
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    kernels = products_of(a, b)
    for kernel in kernels:
        kernel()
    synchronize(device)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end or not best:
        for kernel in kernels:
            synchronize(device)
            begin = time.perf_counter()
            kernel()
            synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def products_of(a: Tensor, b: Tensor) -> list[Callable[[], Tensor]]:
    """Return the kernels at hand for a product of two square matrices."""
    found: list[Callable[[], Tensor]] = [lambda: torch.mm(a, b)]
    if products.serves(a, b):
        packed = products.reordered(b, a.shape[0])
        found.append(lambda: products.product(a, packed))
    return found


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
