"""Positions and what they see; keys and values of earlier positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.inputs import Inputs, Visibility, pick, visibility
from pipeline.models.memory import KeyValueMemory, newest
from tests.models.cases import starts_of


def make_inputs(begin, end, rows=1, starts=None, valid=None, **values):
    return Inputs(torch.arange(begin, end)[None], starts, end, values, valid=valid)


# ---------------------------------------------------------------- inputs


def test_pick():
    values, where = torch.arange(24).reshape(2, 4, 3), torch.tensor([[3, 0, 0], [1, 1, 2]])
    found = pick(values, where)
    for row in range(2):
        for place in range(3):
            assert torch.equal(found[row, place], values[row, where[row, place]])
    assert torch.equal(pick(values[:1], where)[1], values[0, where[1]])  # one row for all
    assert torch.equal(pick(values[:, :, 0], where), found[:, :, 0])


def test_cut_and_gather():
    starts = torch.tensor([[0, 0, 2, 2, 2], [0, 1, 1, 3, 3]])
    inputs = make_inputs(10, 15, starts=starts, each=torch.arange(20).reshape(2, 5, 2), shared=torch.arange(5)[None])
    part = inputs.cut(1, 3, 13)
    assert (part.length, part.stop, part.valid) == (2, 13, None)
    assert part.index.tolist() == [[11, 12]]
    assert part.starts.tolist() == [[0, 2], [1, 1]]
    assert part.values["each"].tolist() == [[[2, 3], [4, 5]], [[12, 13], [14, 15]]]
    valid = torch.tensor([[True, True], [True, False]])
    part = inputs.gather(torch.tensor([[2, 3], [4, 0]]), valid, 15)
    assert part.index.tolist() == [[12, 13], [14, 10]]
    assert part.key_index.tolist() == [[12, 13], [14, -1]]
    assert part.starts.tolist() == [[2, 2], [3, 0]]
    assert part.values["each"].tolist() == [[[4, 5], [6, 7]], [[18, 19], [10, 11]]]
    assert part.values["shared"].tolist() == [[2, 3], [4, 0]]
    assert torch.equal(inputs.key_index, inputs.index)


# ---------------------------------------------------------------- visibility


@st.composite
def scenes(draw):
    """Queries, the keys at hand, and what is true of them."""
    begin = draw(st.integers(0, 6))
    end = draw(st.integers(begin + 1, begin + 5))
    rows = draw(st.integers(1, 3))
    window = draw(st.none() | st.integers(1, 7))
    starts = valid = None
    if draw(st.booleans()):
        borders = [[0, *sorted(draw(st.sets(st.integers(1, end), max_size=3)))] for _ in range(rows)]
        starts = torch.stack([starts_of(row, end)[begin:] for row in borders])
    if draw(st.booleans()):
        valid = torch.tensor([[draw(st.booleans()) for _ in range(end - begin)] for _ in range(rows)])
    inputs = make_inputs(begin, end, starts=starts, valid=valid)
    oldest = draw(st.integers(0, begin))  # keys from here on, and the queries' own
    old = torch.arange(oldest, begin)[None]
    if draw(st.booleans()):  # slots without a key
        old = old.expand(rows, -1).clone()
        old[torch.tensor([[draw(st.booleans()) for _ in range(old.shape[1])] for _ in range(rows)]).bool()] = -1
    own = inputs.key_index
    count = max(old.shape[0], own.shape[0])
    keys = torch.cat([old.expand(count, -1), own.expand(count, -1)], dim=1)
    reach = window is None or oldest >= begin - (window - 1)
    exact = reach and bool((keys >= 0).all())
    return inputs, keys, window, old.shape[1] == 0, exact


@settings(max_examples=300)
@given(scenes(), st.booleans(), st.booleans())
def test_visibility(scene, tell_same, tell_exact):
    """Against the definition; what it is told may be less than what is true."""
    inputs, keys, window, same, exact = scene
    found = visibility(inputs, keys, window, same=same and tell_same, exact=exact and tell_exact)
    rows = max(keys.shape[0], 1 if inputs.starts is None else inputs.starts.shape[0])
    queries, count = inputs.length, keys.shape[1]
    if found.mask is None:
        seen = torch.ones(queries, count, dtype=torch.bool)
        if found.causal:
            assert queries == count
            seen = seen.tril()
        seen = seen.expand(rows, -1, -1)
    else:
        assert not found.causal
        assert found.mask.shape[1:] == (1, queries, count)
        seen = found.mask[:, 0].expand(rows, -1, -1)
    for row in range(rows):
        for place in range(queries):
            if inputs.valid is not None and not inputs.valid[row, place]:
                assert bool(seen[row, place].any()), "a slot without a position needs some key"
                continue
            query = int(inputs.index[0, place])
            start = 0 if inputs.starts is None else int(inputs.starts[row, place])
            for slot in range(count):
                key = int(keys[min(row, keys.shape[0] - 1), slot])
                expected = key >= 0 and start <= key <= query and (window is None or query - key < window)
                assert bool(seen[row, place, slot]) == expected, (row, query, key)


def test_visibility_needs_no_mask_where_all_is_plain():
    inputs = make_inputs(0, 5)
    assert visibility(inputs, inputs.index, None, same=True, exact=False) == Visibility(None, causal=True)
    assert visibility(inputs, inputs.index, 5, same=True, exact=False) == Visibility(None, causal=True)
    assert visibility(inputs, inputs.index, 4, same=True, exact=False).mask is not None
    single = make_inputs(6, 7)
    assert visibility(single, torch.arange(7)[None], None, same=False, exact=True) == Visibility(None)
    assert visibility(single, torch.arange(3, 7)[None], 4, same=False, exact=True) == Visibility(None)


# ---------------------------------------------------------------- memory

ROWS, HEADS, WIDTH, LAYERS = 2, 3, 4, 2


def tagged(index, layer):
    """Return keys [rows, heads, n, width] that tell their layer, row and index apart."""
    index = index.expand(ROWS, -1)
    row = torch.arange(ROWS)[:, None]
    tag = (1000.0 * layer + 100.0 * row + index)[:, None, :, None]
    return tag + torch.arange(HEADS * WIDTH).reshape(1, HEADS, 1, WIDTH) / 64


def advance(memory, inputs):
    """Take a step with tagged keys; return what was joined, and the memory after."""
    step = memory.step(inputs)
    joined = []
    for layer in range(LAYERS):
        key = tagged(inputs.index, layer)
        joined.append(step.join(key, -key))
    return step, joined, step.close()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 3))
def test_growing_memory_and_buffers_are_equal(lengths, spare):
    growing, buffered = KeyValueMemory(), KeyValueMemory(capacity=sum(lengths) + spare)
    begin = 0
    for length in lengths:
        inputs = make_inputs(begin, begin + length)
        begin += length
        one, joined, growing = advance(growing, inputs)
        two, written, buffered = advance(buffered, inputs)
        assert torch.equal(one.key_index, two.key_index)
        assert one.key_index.tolist() == [list(range(begin))]
        assert one.same == two.same == (begin == length)
        for layer in range(LAYERS):
            expected = tagged(torch.arange(begin)[None], layer)
            for keys, values in (joined[layer], written[layer]):
                assert torch.equal(keys, expected)
                assert torch.equal(values, -expected)
        assert growing.length == buffered.length == begin
        assert buffered.keys[0].shape[2] == sum(lengths) + spare
        assert not growing.gaps


def test_buffers_are_set_aside_once():
    memory = KeyValueMemory(capacity=8)
    pointers = set()
    for begin in range(8):
        *_, memory = advance(memory, make_inputs(begin, begin + 1))
        pointers.add(memory.keys[1].data_ptr())
    assert len(pointers) == 1


@pytest.mark.parametrize("lengths", [[6], [5, 1], [3, 2, 1], [1] * 6])
def test_more_than_the_capacity_is_refused(lengths):
    memory, begin = KeyValueMemory(capacity=5), 0
    for length in lengths[:-1]:
        *_, memory = advance(memory, make_inputs(begin, begin + length))
        begin += length
    with pytest.raises(ValueError, match="memory of 5 positions cannot take 6"):
        advance(memory, make_inputs(begin, begin + lengths[-1]))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("lengths", [[1] * 8, [3, 1, 4], [8], [2, 6], [7, 1]])
@pytest.mark.parametrize("capacity", [None, 9])
def test_window_keeps_the_newest(window, lengths, capacity):
    memory, begin = KeyValueMemory(window=window, capacity=capacity), 0
    for length in lengths:
        old = memory.length
        step, joined, memory = advance(memory, make_inputs(begin, begin + length))
        assert step.key_index.tolist() == [list(range(begin - old, begin + length))]
        assert joined[0][0].shape[2] == old + length
        begin += length
        kept = min(begin, window - 1)
        assert memory.length == kept
        if kept:
            expected = torch.arange(begin - kept, begin)[None]
            assert torch.equal(memory.index, expected)
            for layer in range(LAYERS):
                assert torch.equal(memory.keys[layer], tagged(expected, layer))
                assert torch.equal(memory.values[layer], -tagged(expected, layer))


def test_a_stepped_memory_stays_as_it_was():
    """Time can be computed again from any border."""
    for window in (None, 3):
        *_, memory = advance(KeyValueMemory(window=window), make_inputs(0, 4))
        index, keys = memory.index.clone(), [key.clone() for key in memory.keys]
        inputs = make_inputs(4, 6)
        first, second = advance(memory, inputs)[1], advance(memory, inputs)[1]
        assert torch.equal(first[1][0], second[1][0])
        assert torch.equal(memory.index, index)
        assert all(torch.equal(one, other) for one, other in zip(memory.keys, keys, strict=True))


def test_detached():
    inputs, memory = make_inputs(0, 3), KeyValueMemory(window=3)
    step, leaf = memory.step(inputs), torch.ones(ROWS, HEADS, 3, WIDTH, requires_grad=True)
    step.join(leaf * 2, leaf * 3)
    memory = step.close()
    alone = memory.detached()
    assert memory.keys[0].requires_grad
    assert memory.values[0].requires_grad
    assert not alone.keys[0].requires_grad
    assert not alone.values[0].requires_grad
    assert torch.equal(alone.keys[0], memory.keys[0])
    assert torch.equal(alone.values[0], memory.values[0])
    assert (alone.window, alone.capacity, alone.gaps) == (memory.window, memory.capacity, memory.gaps)
    assert torch.equal(alone.index, memory.index)


@given(st.data(), st.integers(1, 6))
def test_newest_with_gaps(data, count):
    """The highest indices of each row stay, ascending, and their keys with them; empty slots fill up in front."""
    slots = data.draw(st.integers(count, 9))
    rows = []
    for _ in range(ROWS):
        filled = sorted(data.draw(st.sets(st.integers(0, 20), max_size=slots)))
        places = sorted(data.draw(st.permutations(range(slots)))[: len(filled)])
        row = [-1] * slots
        for place, value in zip(places, filled, strict=True):
            row[place] = value
        rows.append(row)
    index = torch.tensor(rows)
    keys = [tagged(index, layer) for layer in range(LAYERS)]
    found, kept, values = newest(index, keys, [-key for key in keys], count)
    for row in range(ROWS):
        filled = [value for value in rows[row] if value >= 0][-count:]
        assert found[row].tolist() == [-1] * (count - len(filled)) + filled
    for layer in range(LAYERS):
        assert torch.equal(kept[layer], tagged(found, layer))
        assert torch.equal(values[layer], -tagged(found, layer))


@given(st.data(), st.integers(1, 5))
def test_window_with_gaps(data, window):
    """Rows that go on at different paces each keep their own newest W - 1."""
    memory = KeyValueMemory(window=window)
    seen = [0] * ROWS
    for _ in range(data.draw(st.integers(1, 5))):
        width = data.draw(st.integers(1, 3))
        counts = [data.draw(st.integers(0, width)) for _ in range(ROWS)]
        valid = torch.tensor([[place < count for place in range(width)] for count in counts])
        index = torch.tensor([[begin + place for place in range(width)] for begin in seen])
        step, _, memory = advance(memory, Inputs(index, None, 50, {}, valid=valid))
        assert step.gaps
        seen = [begin + count for begin, count in zip(seen, counts, strict=True)]
        for row in range(ROWS):
            kept = [] if memory.index is None else [each for each in memory.index[row].tolist() if each >= 0]
            assert sorted(kept) == list(range(max(0, seen[row] - (window - 1)), seen[row]))
        if memory.index is not None:
            filled = (memory.index >= 0)[:, None, :, None]
            for layer in range(LAYERS):
                assert torch.equal(memory.keys[layer] * filled, tagged(memory.index, layer) * filled)
