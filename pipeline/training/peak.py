"""The machine's peak, measured: what utilisation is a share of."""

from __future__ import annotations

import time

import torch


def measured_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.5) -> float:
    """Return the FLOP/s of one device in a large square matrix product, the best of those that fit in ``seconds``.

    Args:
        device: device to measure.
        dtype: dtype of the factors.
        seconds: time to spend, after one product to warm up.
    """
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    synchronize(device)
    best, end = 0.0, time.perf_counter() + seconds
    torch.mm(a, b)
    while time.perf_counter() < end or not best:
        synchronize(device)
        begin = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
