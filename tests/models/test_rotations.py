"""Rotation tables that are made once are those that each call would make."""

import pytest
import torch

from pipeline.models import layers
from pipeline.models.layers import Rotations, rotation

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", ["geometric", "integer"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_are_exactly_those_of_their_positions(dtype, kind):
    tables = Rotations(12, 500.0, kind)
    for begin, stop in ((0, 1), (3, 9), (250, 260), (255, 256), (0, 300), (511, 513), (2000, 2001), (7, 8)):
        positions = torch.arange(begin, stop)[None]
        expected = rotation(positions, 12, 500.0, dtype, kind)
        for found, table in zip(tables.between(begin, stop, CPU, dtype), expected, strict=True):
            assert torch.equal(found, table)
            assert found.dtype == table.dtype
        rows = torch.stack([positions[0], positions[0].flip(0)])
        expected = rotation(rows, 12, 500.0, dtype, kind)
        for found, table in zip(tables.at(rows, stop, dtype), expected, strict=True):
            assert torch.equal(found, table)


def test_tables_are_made_once_and_grow_seldom(monkeypatch):
    made = []
    monkeypatch.setattr(layers, "rotation", lambda positions, *rest: made.append(rest) or rotation(positions, *rest))
    tables = Rotations(8, 10_000.0, "geometric")
    for stop in range(1, 1025):
        tables.between(stop - 1, stop, CPU, torch.float32)
        tables.at(torch.tensor([[stop - 1]]), stop, torch.float32)
    assert len(made) == 3  # 256, 512 and 1,024 positions
    tables.between(0, 1, CPU, torch.float64)
    assert len(made) == 4


def test_tables_made_in_inference_mode_serve_training():
    tables, x = Rotations(8, 10_000.0, "geometric"), torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.inference_mode():
        tables.between(0, 4, CPU, torch.float32)
    cos, sin = tables.between(0, 4, CPU, torch.float32)
    layers.rotate(x, cos, sin).sum().backward()
    assert x.grad is not None


def test_meta_tensors_have_tables_of_their_own():
    tables = Rotations(8, 10_000.0, "geometric")
    assert tables.between(0, 4, torch.device("meta"), torch.float32)[0].is_meta
    assert not tables.between(0, 4, CPU, torch.float32)[0].is_meta
