"""Buffers that decoding writes in place hold what a memory holds that grows by concatenation."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models import buffers
from pipeline.models.buffers import Buffers, window_size
from pipeline.models.inputs import Inputs
from pipeline.models.memory import KeyValueMemory

ROWS, HEADS, WIDTH, LAYERS = 2, 3, 4, 2


@pytest.fixture(autouse=True)
def _short_buffers(monkeypatch):
    monkeypatch.setattr(buffers, "SPARE", 3)


def tagged(index, layer):
    """Return keys [rows, heads, n, width] that tell their layer, row and index apart."""
    index = index.expand(ROWS, -1)
    tag = (1000.0 * layer + 100.0 * torch.arange(ROWS)[:, None] + index)[:, None, :, None]
    return tag + torch.arange(HEADS * WIDTH).reshape(1, HEADS, 1, WIDTH) / 64


def advance(memory, inputs, mark=0.0):
    """Take a step with tagged keys; return what was joined, and the memory after."""
    step = memory.step(inputs)
    keys = [tagged(inputs.index, layer) + mark for layer in range(LAYERS)]
    joined = [step.join(layer, key, -key) for layer, key in enumerate(keys)]
    return step, joined, step.close()


def positions(begin, stop):
    return Inputs(torch.arange(begin, stop)[None], None, stop, {})


def assert_alike(one, other):
    """Assert that a growing and a buffered memory hold the same."""
    assert (one.length, one.stop, one.gaps) == (other.length, other.stop, other.gaps)
    if one.length:
        assert torch.equal(one.index.expand(ROWS, -1), other.index.expand(ROWS, -1))
        filled = (one.index >= 0)[:, None, :, None]
        for keys, held in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
            assert torch.equal(keys * filled, held[:, :, : other.length] * filled)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 7), st.integers(1, 60))
def test_a_window_takes_positions_without_end(lengths, window, capacity):
    growing, buffered, begin = KeyValueMemory(window=window), KeyValueMemory(window=window, capacity=capacity), 0
    for length in lengths:
        inputs = positions(begin, begin + length)
        begin += length
        one, joined, growing = advance(growing, inputs)
        two, written, buffered = advance(buffered, inputs)
        assert torch.equal(one.key_index, two.key_index)
        assert (one.same, one.exact) == (two.same, two.exact)
        for expected, found in zip(joined, written, strict=True):
            assert all(map(torch.equal, expected, found))
        assert_alike(growing, buffered)


def test_a_window_keeps_its_buffers():
    """One piece of memory for hundreds of positions, hardly longer than the window."""
    for window in (2, 5, 40):
        memory, places = KeyValueMemory(window=window, capacity=1000), set()
        for begin in range(300):
            *_, memory = advance(memory, positions(begin, begin + 1))
            places.add(memory.keys[1].untyped_storage().data_ptr())
        assert len(places) == 1
        slots = memory.keys[1].untyped_storage().nbytes() // (4 * ROWS * HEADS * WIDTH)
        assert slots == window_size(window, 1000) <= max(2 * (window - 1), window + 2)


def test_a_window_longer_than_the_row_sets_no_more_aside_than_the_row():
    memory = KeyValueMemory(window=500, capacity=8)
    for begin in range(8):
        *_, memory = advance(memory, positions(begin, begin + 1))
    assert memory.keys[0].untyped_storage().nbytes() == 4 * ROWS * HEADS * WIDTH * 8


def random_gaps(data):
    """Yield inputs of calls in which rows go on at different paces."""
    seen = [0] * ROWS
    for _ in range(data.draw(st.integers(1, 12))):
        width = data.draw(st.integers(1, 4))
        counts = [data.draw(st.integers(0, width)) for _ in range(ROWS)]
        valid = torch.tensor([[place < count for place in range(width)] for count in counts])
        index = torch.tensor([[begin + place for place in range(width)] for begin in seen])
        seen = [begin + count for begin, count in zip(seen, counts, strict=True)]
        yield Inputs(index, None, max(seen), {}, valid=valid)


@given(st.data(), st.one_of(st.none(), st.integers(1, 6)), st.integers(1, 40))
def test_rows_at_different_paces(data, window, capacity):
    growing, buffered = KeyValueMemory(window=window), KeyValueMemory(window=window, capacity=capacity)
    for inputs in random_gaps(data):
        one, joined, growing = advance(growing, inputs)
        two, written, buffered = advance(buffered, inputs)
        assert torch.equal(one.key_index.expand(ROWS, -1), two.key_index.expand(ROWS, -1))
        filled = (one.key_index >= 0)[:, None, :, None]
        for expected, found in zip(joined, written, strict=True):
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a * filled, b * filled)
        assert_alike(growing, buffered)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.integers(1, 6),
    st.lists(st.integers(1, 3), min_size=1, max_size=9),
    st.sampled_from([None, 2, 4, 30]),
)
def test_positions_that_are_computed_again_and_then_go_on(before, again, after, window):
    """The whole of a rewritable memory stays, is rewritten in place, and then cut and written on."""
    capacity = sum(before) + again + sum(after)
    pair, begin = [KeyValueMemory(window=window), KeyValueMemory(window=window, capacity=capacity)], 0
    for length in before:
        pair = [advance(memory, positions(begin, begin + length))[2] for memory in pair]
        begin += length
    inputs = positions(begin, begin + again)
    pair = [advance(memory.rewritable(), inputs)[2] for memory in pair]
    assert_alike(*pair)
    pair = [advance(memory, inputs.strided(0, 2, begin + (again - 1) // 2 * 2 + 1), 0.5)[2] for memory in pair]
    assert_alike(*pair)
    uneven = inputs.gather(torch.tensor([[0], [again - 1]]), torch.tensor([[True], [True]]), begin + again)
    pair = [advance(memory, uneven, 0.25)[2].settled() for memory in pair]
    assert_alike(*pair)
    begin += again
    for length in after:
        steps = [advance(memory, positions(begin, begin + length)) for memory in pair]
        for expected, found in zip(steps[0][1], steps[1][1], strict=True):
            assert all(map(torch.equal, expected, found))
        pair = [memory for *_, memory in steps]
        assert_alike(*pair)
        begin += length


@pytest.mark.parametrize("window", [None, 4])
def test_keys_that_somebody_made_anew_are_taken_in(window):
    memory, growing = KeyValueMemory(window=window, capacity=20), KeyValueMemory(window=window)
    for begin in range(7):
        memory, growing = (advance(each, positions(begin, begin + 1))[2] for each in (memory, growing))
    memory, growing = (
        replace(each, keys=[2 * key for key in each.keys], values=[3 * value for value in each.values])
        for each in (memory, growing)
    )
    for begin in range(7, 14):
        memory, growing = (advance(each, positions(begin, begin + 1))[2] for each in (memory, growing))
        assert_alike(growing, memory)


def test_buffers_that_are_too_short_grow():
    room, index = Buffers(2), torch.arange(5)[None]
    key = tagged(index, 0)
    for place in range(5):
        found = room.admit(index[:, place : place + 1], place)
        keys, values = room.write(0, place, key[:, :, place : place + 1], -key[:, :, place : place + 1])
        assert torch.equal(found, index[:, : place + 1])
        assert torch.equal(keys, key[:, :, : place + 1])
        assert torch.equal(values, -keys)
    assert room.size == 6
