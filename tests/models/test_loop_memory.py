"""A loop's buffers of keys and values against attention over joined ones, in autograd."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pipeline.models import loop_memory
from pipeline.models.inputs import Inputs, Visibility, visibility
from pipeline.models.loop_memory import LoopMemory, LoopShared
from pipeline.models.memory import KeyValueMemory, Shared

ROWS, HEADS, KV, DIM = 2, 4, 2, 6


def inputs_of(begin: int, stop: int, starts: Tensor | None) -> Inputs:
    index = torch.arange(begin, stop)[None]
    return Inputs(index, None if starts is None else starts[:, begin:stop], stop, {})


def seen(step, inputs: Inputs, window: int | None) -> Visibility:
    return visibility(inputs, step.key_index, window, same=step.same, exact=False)


def drawn(length: int, heads: int) -> Tensor:
    return torch.randn(ROWS, length, heads, DIM, dtype=torch.float64)


def through_time(
    query: Tensor, key: Tensor, value: Tensor, borders: list[int], window: int | None, starts: Tensor | None, live: int
) -> tuple[Tensor, list[Tensor]]:
    """Run forward and backward by hand; return what attention gave, and all gradients."""
    length = query.shape[1]
    memory = LoopMemory(torch.arange(length)[None], window, gaps=False)
    spans = list(pairwise(borders))

    def place(number: int) -> None:
        begin = spans[number][0]
        first = number // live * live if live else 0
        memory.place(begin, 0 if window is None else max(0, begin - (window - 1)), spans[first][0])

    outs, leaves = [], []
    for number, (begin, stop) in enumerate(spans):
        place(number)
        inputs = inputs_of(begin, stop, starts)
        step = memory.step(inputs)
        parts = [each[:, begin:stop].clone().requires_grad_() for each in (query, key, value)]
        outs.append(step.attention(0)(*parts, seen(step, inputs, window)))
        leaves.append(parts)
        assert step.close() is memory
    gradient = loss_weights(query)
    found = []
    for number in reversed(range(len(spans))):
        begin, stop = spans[number]
        place(number)
        found.append(torch.autograd.grad(outs[number], leaves[number], gradient[:, begin:stop]))
    return torch.cat(outs, dim=1), [torch.cat(each, dim=1) for each in zip(*reversed(found), strict=True)]


def by_autograd(
    query: Tensor, key: Tensor, value: Tensor, borders: list[int], window: int | None, starts: Tensor | None, live: int
) -> tuple[Tensor, list[Tensor]]:
    parts = [each.clone().requires_grad_() for each in (query, key, value)]
    memory, outs = KeyValueMemory(window=window), []
    for number, (begin, stop) in enumerate(pairwise(borders)):
        if live and number and number % live == 0:
            memory = memory.detached()
        inputs = inputs_of(begin, stop, starts)
        step = memory.step(inputs)
        cut = [each[:, begin:stop] for each in parts]
        outs.append(step.attention(0)(*cut, seen(step, inputs, window), 0.0))
        memory = step.close()
    out = torch.cat(outs, dim=1)
    return out, list(torch.autograd.grad(out, parts, loss_weights(query)))


def loss_weights(query: Tensor) -> Tensor:
    return torch.linspace(-1, 1, query.numel(), dtype=query.dtype).sin().view_as(query)


@pytest.mark.parametrize("live", [0, 3])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("borders", [[*range(15)], [0, 4, 8, 12, 14], [0, 1, 6, 7, 14], [0, 14]], ids=len)
@pytest.mark.parametrize(("tile", "kept"), [(64, 128), (4, 3), (1, 0)])
def test_attention_over_steps(
    monkeypatch, tile: int, kept: int, borders: list[int], window: int | None, documents: bool, live: int
):
    """With tiles that steps cross, and attention weights kept or computed again."""
    monkeypatch.setattr(loop_memory, "TILE", tile)
    monkeypatch.setattr(loop_memory, "KEPT_KEYS", kept)
    starts = torch.tensor([[0] * 5 + [5] * 9, [0] * 14]) if documents else None
    parts = drawn(14, HEADS), drawn(14, KV), drawn(14, KV)
    expected, reference = by_autograd(*parts, borders, window, starts, live)
    found, gradients = through_time(*parts, borders, window, starts, live)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, reference)


@pytest.mark.parametrize("tile", [64, 4])
def test_shared_keys(monkeypatch, tile: int):
    monkeypatch.setattr(loop_memory, "TILE", tile)
    length = 11
    key, value = (torch.randn(ROWS, KV, length, DIM, dtype=torch.float64, requires_grad=True) for _ in range(2))
    query = drawn(length, HEADS).requires_grad_()
    shared, plain = LoopShared(key.detach(), value.detach()), Shared(key, value)
    assert shared.length == plain.length == length
    outs, expected, leaves = [], [], []
    for begin, stop in ((0, 3), (3, 4), (4, 9), (9, 11)):
        inputs = inputs_of(begin, stop, None)
        past = visibility(inputs, torch.arange(stop)[None], None, same=begin == 0, exact=True)
        part = query[:, begin:stop]
        leaves.append(part.detach().requires_grad_())
        expected.append(plain.attention(stop)(part, past, 0.0))
        outs.append(shared.attention(stop)(leaves[-1], past))
    torch.testing.assert_close(torch.cat(outs, dim=1), torch.cat(expected, dim=1))
    gradient = loss_weights(query)
    reference = torch.autograd.grad(torch.cat(expected, dim=1), [query, key, value], gradient)
    parts = gradient.split([len(leaf[0]) for leaf in leaves], dim=1)
    of_query = [
        torch.autograd.grad(out, leaf, part)[0]
        for out, leaf, part in reversed([*zip(outs, leaves, parts, strict=True)])
    ]
    torch.testing.assert_close([torch.cat(of_query[::-1], dim=1), *shared.gradients()], list(reference))


def test_dropout_of_weights():
    """Drawn as torch draws it, and the same in backward."""
    query, key, value = drawn(1, HEADS), drawn(1, KV), drawn(1, KV)
    memory = LoopMemory(torch.arange(1)[None], None, gaps=False)
    step = memory.step(inputs_of(0, 1, None))
    parts = [each.clone().requires_grad_() for each in (query, key, value)]
    torch.manual_seed(1)
    out = step.attention(0)(*parts, Visibility(None), 0.5)
    torch.manual_seed(1)
    plain = [each.clone().requires_grad_() for each in (query, key, value)]
    opened = KeyValueMemory().step(inputs_of(0, 1, None))
    expected = opened.attention(0)(*plain, Visibility(None), 0.5)
    torch.testing.assert_close(out, expected)
    gradient = loss_weights(query)
    torch.testing.assert_close(
        torch.autograd.grad(out, parts, gradient), torch.autograd.grad(expected, plain, gradient)
    )


def test_half_precision_adds_up_in_single():
    memory = LoopMemory(torch.arange(4)[None], None, gaps=False)
    inputs = inputs_of(0, 4, None)
    parts = [each.bfloat16().requires_grad_() for each in (drawn(4, HEADS), drawn(4, KV), drawn(4, KV))]
    step = memory.step(inputs)
    out = step.attention(0)(*parts, seen(step, inputs, None))
    assert out.dtype is torch.bfloat16
    assert all(each.dtype is torch.bfloat16 for each in torch.autograd.grad(out.sum(), parts))
    layer = memory.layer(0, parts[1])
    assert layer.keys.dtype is torch.bfloat16
    assert layer.key_gradients.dtype is layer.value_gradients.dtype is torch.float32


def test_empty_slots_are_not_seen():
    """Rows whose steps lie at different places: a slot without a position changes nothing."""
    index = torch.tensor([[0, 1, 2, -1, 3, 4], [0, 1, -1, -1, 2, 3]])
    memory = LoopMemory(index, None, gaps=True)
    key, value, query = drawn(6, KV), drawn(6, KV), drawn(6, HEADS)
    outs = []
    for begin, stop in ((0, 2), (2, 4), (4, 6)):
        memory.place(begin, 0, 0)
        own = index[:, begin:stop]
        inputs = Inputs(own.clamp(min=0), None, 5, {}, valid=own >= 0)
        step = memory.step(inputs)
        assert not step.exact
        parts = (each[:, begin:stop].clone() for each in (query, key, value))
        outs.append(step.attention(0)(*parts, seen(step, inputs, None)))
    out = torch.cat(outs, dim=1)
    for row in range(ROWS):
        valid = index[row] >= 0
        alone = [each[row : row + 1, valid] for each in (query, key, value)]
        inputs = inputs_of(0, int(valid.sum()), None)
        opened = KeyValueMemory().step(inputs)
        expected = opened.attention(0)(*alone, seen(opened, inputs, None), 0.0)
        torch.testing.assert_close(out[row : row + 1, valid], expected)
