"""Attention subset by subset is attention with a mask, and a memory in subsets is one in row order."""

import pytest
import torch

from pipeline.models import subset_memory
from pipeline.models.inputs import Inputs, Visibility, visibility
from pipeline.models.layers import attend
from pipeline.models.memory import KeyValueMemory
from pipeline.models.subset_memory import SubsetMemory, attend_parts, takes_parts
from pipeline.models.subsets import Alike, packed
from tests.models.cases import ROUNDING, assert_close, random, starts_of

ROWS, HEADS, HEAD_DIM = 3, 4, 6


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=random(seed), dtype=torch.float64).to(dtype).requires_grad_()


def masked(query, key, value, turn, subsets):
    positions = torch.arange(key.shape[1])
    mask = positions <= positions[turn::subsets, None]
    return attend(query, key.transpose(1, 2), value.transpose(1, 2), Visibility(mask[None, None]))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("subsets", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 5, 40, 67])
def test_attention_to_parts(length, subsets, kv_heads):
    """In value and gradient, for each subset's turn; the last subsets may be shorter, or empty."""
    key, value = (drawn(ROWS, length, kv_heads, HEAD_DIM, seed=seed) for seed in (0, 1))
    for turn in range(min(subsets, length)):
        count = len(range(turn, length, subsets))
        query = drawn(ROWS, count, HEADS, HEAD_DIM, seed=2)
        weights = drawn(ROWS, count, HEADS, HEAD_DIM, seed=3).detach()
        found = attend_parts(query, Alike(subsets, length).deal(key), Alike(subsets, length).deal(value), turn)
        expected = masked(query, key, value, turn, subsets)
        assert_close(found, expected)
        both = (torch.autograd.grad((out * weights).sum(), [query, key, value]) for out in (found, expected))
        for mine, plain in zip(*both, strict=True):  # the weight of a single key has no gradient but rounding's
            assert float((mine - plain).abs().max()) <= 1e-14 * length


def test_attention_to_parts_in_half_precision():
    key, value, query = (drawn(ROWS, 40, HEADS, HEAD_DIM, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    found = attend_parts(query[:, 1::2], Alike(2, 40).deal(key), Alike(2, 40).deal(value), 1)
    assert found.dtype == torch.bfloat16
    expected = masked(query[:, 1::2].double(), key.double(), value.double(), 1, 2)
    assert float((found - expected).detach().abs().max()) <= ROUNDING * torch.finfo(torch.bfloat16).eps


def test_where_attention_goes_by_parts(monkeypatch):
    query = torch.zeros(1, 8, 2, 4)
    assert not takes_parts(query, 0.0)
    monkeypatch.setattr(subset_memory, "LONG", 8)
    assert takes_parts(query, 0.0)
    assert not takes_parts(query[:, :7], 0.0)
    assert not takes_parts(query, 0.1), "dropout is drawn for the weights, which the kernel does not show"
    assert not takes_parts(query.to("meta"), 0.0)


@pytest.mark.parametrize("long", [1, 1000], ids=["parts", "mask"])
@pytest.mark.parametrize("subsets", [1, 2, 3, 11])
@pytest.mark.parametrize("borders", [None, [0, 3, 4], [0]], ids=["", "packed", "one"])
def test_a_memory_in_subsets_is_one_in_row_order(monkeypatch, borders, subsets, long):
    """What queries find, and what is held afterwards, is what a memory does whose positions are rewritten."""
    monkeypatch.setattr(subset_memory, "LONG", long)
    length, layers, starts = 9, 2, None
    division = Alike(subsets, length)
    if borders is not None:
        starts = torch.stack([starts_of(borders, length), starts_of([0, 5], length), starts_of([0], length)])
        division = packed(starts, subsets)
    whole = Inputs(torch.arange(length)[None], starts, length, {})
    memories = [SubsetMemory(division), KeyValueMemory().rewritable()]
    for turn in range(-1, division.count):
        inputs = whole if turn < 0 else division.inputs(whole, turn)
        full = [drawn(layers, ROWS, length, HEADS, HEAD_DIM, seed=3 * turn + each) for each in range(3, 6)]
        if turn >= 0:
            full = [torch.stack([division.deal(each)[turn] for each in tensor]) for tensor in full]
        steps = [memory.step(inputs) for memory in memories]
        for layer in range(layers):
            found = []
            for step in steps:
                visible = visibility(inputs, step.key_index, None, same=step.same, exact=step.exact)
                found.append(step.attention(layer)(*(each[layer] for each in full), visible, 0.0))
            if inputs.valid is not None:
                found = [each * inputs.valid[:, :, None, None] for each in found]
            assert_close(found[0], found[1])
        memories = [step.close() for step in steps]
        for name in ("keys", "values"):
            for mine, plain in zip(getattr(memories[0], name), getattr(memories[1], name), strict=True):
                assert torch.equal(mine, plain)
