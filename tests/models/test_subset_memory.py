"""Attention subset by subset is attention with a mask, and a memory in subsets is one in row order."""

import pytest
import torch

from pipeline.models import subset_memory
from pipeline.models.inputs import Inputs, Visibility
from pipeline.models.layers import attend
from pipeline.models.memory import KeyValueMemory
from pipeline.models.subset_memory import SubsetMemory, attend_parts, collected, dealt, takes_parts
from tests.models.cases import ROUNDING, assert_close, random

ROWS, HEADS, HEAD_DIM = 3, 4, 6


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=random(seed), dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("subsets", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_dealt_and_collected(length, subsets):
    values = drawn(ROWS, length, 2)
    parts = dealt(values, subsets)
    assert len(parts) == min(subsets, length)
    for number, part in enumerate(parts):
        assert torch.equal(part, values[:, number::subsets])
    whole = collected(parts)
    assert torch.equal(whole, values)
    weights = drawn(ROWS, length, 2, seed=1).detach()
    (gradient,) = torch.autograd.grad((whole * weights).sum(), values, retain_graph=True)
    assert torch.equal(gradient, weights)
    (gradient,) = torch.autograd.grad(parts[0].sum(), values)
    expected = torch.zeros_like(gradient)
    expected[:, ::subsets] = 1
    assert torch.equal(gradient, expected)


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
        found = attend_parts(query, dealt(key, subsets), dealt(value, subsets), turn)
        expected = masked(query, key, value, turn, subsets)
        assert_close(found, expected)
        both = (torch.autograd.grad((out * weights).sum(), [query, key, value]) for out in (found, expected))
        for mine, plain in zip(*both, strict=True):  # the weight of a single key has no gradient but rounding's
            assert float((mine - plain).abs().max()) <= 1e-14 * length


def test_attention_to_parts_in_half_precision():
    key, value, query = (drawn(ROWS, 40, HEADS, HEAD_DIM, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    found = attend_parts(query[:, 1::2], dealt(key, 2), dealt(value, 2), 1)
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
def test_a_memory_in_subsets_is_one_in_row_order(monkeypatch, subsets, long):
    """What queries find, and what is held afterwards, is what a memory does whose positions are rewritten."""
    monkeypatch.setattr(subset_memory, "LONG", long)
    length, layers = 9, 2
    index = torch.arange(length)[None]
    whole = Inputs(index, None, length, {})
    memories = [SubsetMemory(subsets), KeyValueMemory().rewritable()]
    calls = [(whole, slice(None))]
    for first in range(min(subsets, length)):
        stop = int(index[0, first::subsets][-1]) + 1
        calls.append((whole.strided(first, subsets, stop), slice(first, None, subsets)))
    for number, (inputs, where) in enumerate(calls):
        key, value, query = (
            drawn(layers, ROWS, length, HEADS, HEAD_DIM, seed=3 * number + each)[:, :, where] for each in range(3)
        )
        steps = [memory.step(inputs) for memory in memories]
        for layer in range(layers):
            found = []
            for step in steps:
                mask = step.key_index[:, None] <= inputs.index[:, :, None]
                exact = isinstance(step, subset_memory.SubsetStep)
                visible = Visibility(None, causal=inputs.length > 1) if exact else Visibility(mask[:, None])
                found.append(step.attention(layer)(query[layer], key[layer], value[layer], visible, 0.0))
            assert_close(found[0], found[1])
        memories = [step.close() for step in steps]
        for name in ("keys", "values"):
            for mine, plain in zip(getattr(memories[0], name), getattr(memories[1], name), strict=True):
                assert torch.equal(mine, plain)
