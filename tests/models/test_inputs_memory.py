"""Positions and what they see; keys and values of earlier positions."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.inputs import Inputs, Visibility, pick, visibility
from pipeline.models.memory import KeyValueMemory, Shared, newest
from tests.models.cases import random, starts_of


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


@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_strided(step, start, documents):
    starts = torch.tensor([[0, 0, 12, 12, 12], [0, 11, 11, 13, 13]]) if documents else None
    each, memory = torch.arange(20).reshape(2, 5, 2), Shared(torch.zeros(2, 1, 15, 4), torch.ones(2, 1, 15, 4))
    inputs = replace(make_inputs(10, 15, starts=starts, each=each, one=torch.arange(5)[None]), shared=(memory,))
    part = inputs.strided(start, step, 15)
    places = list(range(start, 5, step))
    assert (part.length, part.stop, part.valid) == (len(places), 15, None)
    assert part.index.tolist() == [[10 + place for place in places]]
    assert part.values["each"].tolist() == [[row[place] for place in places] for row in each.tolist()]
    assert part.values["one"].tolist() == [places]
    assert part.shared is inputs.shared
    if documents:
        assert part.starts.tolist() == [[row[place] for place in places] for row in starts.tolist()]
    else:
        assert part.starts is None


def test_values_come_and_go():
    inputs = make_inputs(0, 3, x=torch.zeros(1, 3, 2))
    more = inputs.with_values(y=torch.ones(1, 3, 2), x=torch.ones(1, 3, 2))
    assert list(inputs.values) == ["x"]
    assert not inputs.values["x"].any()
    assert sorted(more.values) == ["x", "y"]
    assert more.values["x"].all()
    assert list(more.without("x").values) == ["y"]
    assert sorted(more.values) == ["x", "y"]


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
        joined.append(step.join(layer, key, -key))
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
    step.join(0, leaf * 2, leaf * 3)
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


def random_gaps(data):
    """Yield inputs of calls in which rows go on at different paces, and the positions each row has had after them."""
    seen = [0] * ROWS
    for _ in range(data.draw(st.integers(1, 5))):
        width = data.draw(st.integers(1, 3))
        counts = [data.draw(st.integers(0, width)) for _ in range(ROWS)]
        valid = torch.tensor([[place < count for place in range(width)] for count in counts])
        index = torch.tensor([[begin + place for place in range(width)] for begin in seen])
        seen = [begin + count for begin, count in zip(seen, counts, strict=True)]
        yield Inputs(index, None, max(seen), {}, valid=valid), seen


@given(st.data(), st.integers(1, 5))
def test_window_with_gaps(data, window):
    """Rows that go on at different paces each keep their own newest W - 1."""
    memory = KeyValueMemory(window=window)
    for inputs, seen in random_gaps(data):
        step, _, memory = advance(memory, inputs)
        assert not step.exact
        for row in range(ROWS):
            kept = [] if memory.index is None else [each for each in memory.index[row].tolist() if each >= 0]
            assert sorted(kept) == list(range(max(0, seen[row] - (window - 1)), seen[row]))
        if memory.index is not None:
            filled = (memory.index >= 0)[:, None, :, None]
            for layer in range(LAYERS):
                assert torch.equal(memory.keys[layer] * filled, tagged(memory.index, layer) * filled)


@given(st.data(), st.integers(1, 4))
def test_buffers_grow_when_gaps_fill_them(data, capacity):
    """Empty slots take room that the capacity, a number of positions, does not count."""
    growing, buffered = KeyValueMemory(), KeyValueMemory(capacity=capacity)
    for inputs, _ in random_gaps(data):
        one, joined, growing = advance(growing, inputs)
        two, written, buffered = advance(buffered, inputs)
        assert torch.equal(one.key_index, two.key_index)
        for layer in range(LAYERS):
            for expected, found in zip(joined[layer], written[layer], strict=True):
                assert torch.equal(expected, found)
        assert growing.length == buffered.length <= buffered.keys[0].shape[2]
        assert growing.stop == buffered.stop
        assert growing.gaps
        assert buffered.gaps


def test_buffers_that_grew_hold_what_was_there():
    memory, valid = KeyValueMemory(capacity=3), torch.tensor([[True, False], [True, True]])
    for begin in range(4):
        _, joined, memory = advance(memory, make_inputs(begin, begin + 2, valid=valid))
        indices = torch.cat([torch.arange(first, first + 2) for first in range(begin + 1)])[None]
        for layer in range(LAYERS):
            assert torch.equal(joined[layer][0], tagged(indices, layer))
            assert torch.equal(joined[layer][1], -tagged(indices, layer))
    assert memory.keys[0].shape[2] == 8  # 3, then twice the 4 that were too many, which takes the next 4 as well


# ---------------------------------------------------------------- memory whose positions are computed again

LENGTH = 7


def rewrite(memory, inputs, mark=0.5):
    """Give the positions of ``inputs`` other keys than ``advance`` did, larger by ``mark``; values still minus keys."""
    step = memory.step(inputs)
    joined = []
    for layer in range(LAYERS):
        key = tagged(inputs.index, layer) + mark
        joined.append(step.join(layer, key, -key))
    return step, joined, step.close()


def with_past(past, *, window=None, capacity=None):
    """Return a rewritable memory of LENGTH positions behind ``past`` others, and the inputs of those positions."""
    memory = KeyValueMemory(window=window, capacity=capacity)
    for begin in range(past):
        *_, memory = advance(memory, make_inputs(begin, begin + 1))
    inputs = make_inputs(past, past + LENGTH)
    step, _, memory = advance(memory.rewritable(), inputs)
    assert step.recomputes == (capacity is None)
    return memory, inputs


def held(memory, layer):
    """Return the keys and values in use."""
    return memory.keys[layer][:, :, : memory.length], memory.values[layer][:, :, : memory.length]


def assert_rewritten(pairs, index, chosen, mark=0.5):
    """Assert that the keys of all layers are tagged by ``index`` [1, m], those where ``chosen`` [rows, m] marked."""
    for layer, (keys, values) in enumerate(pairs):
        expected = tagged(index, layer) + mark * chosen[:, None, :, None]
        assert torch.equal(keys, expected)
        assert torch.equal(values, -expected)


PASTS = [(0, None, None), (0, None, 9), (3, None, None), (3, None, 12), (5, 3, None), (1, 3, None), (4, 1, None)]


@pytest.mark.parametrize(("past", "window", "capacity"), PASTS)
@pytest.mark.parametrize(("first", "stride"), [(0, 2), (1, 2), (2, 3), (0, 1), (6, 7)])
def test_rewriting_a_strided_subset(past, window, capacity, first, stride):
    memory, inputs = with_past(past, window=window, capacity=capacity)
    kept = past if window is None else min(past, window - 1)  # a window is cut before, and not while it is rewritten
    index = torch.arange(past - kept, past + LENGTH)[None]
    assert torch.equal(memory.index, index)
    last = past + first + (LENGTH - 1 - first) // stride * stride
    part = inputs.strided(first, stride, last + 1)
    step, joined, after = rewrite(memory, part)
    chosen = ((index >= past + first) & ((index - past - first) % stride == 0)).expand(ROWS, -1)
    assert torch.equal(step.key_index, index)
    assert not step.same, "keys of other positions are among them"
    assert not step.exact, "keys lie after the positions"
    assert_rewritten(joined, index, chosen)
    assert_rewritten([held(after, layer) for layer in range(LAYERS)], index, chosen)
    assert torch.equal(after.index, index)
    assert (after.stop, after.length, after.rewrites) == (past + LENGTH, kept + LENGTH, True)
    assert (after.window, after.capacity, after.gaps) == (window, capacity, False)
    if capacity is None:
        assert_rewritten([held(memory, layer) for layer in range(LAYERS)], index, 0 * chosen)
    else:
        assert after.keys[1].data_ptr() == memory.keys[1].data_ptr()
        assert after.keys[1].shape[2] == capacity


@pytest.mark.parametrize(("past", "window", "capacity"), PASTS)
@pytest.mark.parametrize("done", [1, 4, LENGTH - 1])
def test_rewriting_a_suffix(past, window, capacity, done):
    memory, inputs = with_past(past, window=window, capacity=capacity)
    step, joined, after = rewrite(memory, inputs.cut(done, LENGTH, inputs.stop))
    assert torch.equal(step.key_index, memory.index)
    assert_rewritten(joined, memory.index, (memory.index >= past + done).expand(ROWS, -1))
    assert (after.stop, after.length) == (memory.stop, memory.length)


@st.composite
def uneven_subsets(draw):
    """Places within LENGTH, other ones in each row, as (where, valid) with empty slots anywhere."""
    rows = [sorted(draw(st.sets(st.integers(0, LENGTH - 1)))) for _ in range(ROWS)]
    slots = max(1, draw(st.integers(max(map(len, rows)), LENGTH)))
    where, valid = torch.zeros(ROWS, slots, dtype=torch.int64), torch.zeros(ROWS, slots, dtype=torch.bool)
    for row, places in enumerate(rows):
        taken = sorted(draw(st.permutations(range(slots)))[: len(places)])
        valid[row, taken] = True
        where[row] = draw(st.integers(0, LENGTH - 1))  # what an empty slot names must not matter
        where[row, taken] = torch.tensor(places, dtype=torch.int64)
    return where, valid


def members(where, valid):
    """Return which places are named by a slot that is not empty, bool [rows, LENGTH]."""
    chosen = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    for row in range(ROWS):
        chosen[row, where[row][valid[row]]] = True
    return chosen


@given(uneven_subsets(), st.sampled_from(PASTS))
def test_rewriting_rows_that_differ(subset, setting):
    past, window, capacity = setting
    memory, inputs = with_past(past, window=window, capacity=capacity)
    where, valid = subset
    step, joined, after = rewrite(memory, inputs.gather(where, valid, inputs.stop))
    chosen = torch.cat([torch.zeros(ROWS, memory.length - LENGTH, dtype=torch.bool), members(where, valid)], dim=1)
    assert torch.equal(step.key_index, memory.index)
    assert_rewritten(joined, memory.index, chosen)
    assert_rewritten([held(after, layer) for layer in range(LAYERS)], memory.index, chosen)
    assert (after.stop, after.gaps) == (past + LENGTH, False)


@given(uneven_subsets(), uneven_subsets())
def test_the_last_one_to_write_counts(first, second):
    memory, inputs = with_past(0)
    for (where, valid), mark in ((first, 0.5), (second, 0.25)):
        *_, memory = rewrite(memory, inputs.gather(where, valid, inputs.stop), mark)
    marks = torch.where(members(*second), 0.25, 0.5 * members(*first))
    assert_rewritten([held(memory, layer) for layer in range(LAYERS)], memory.index, marks, mark=1)


@given(uneven_subsets())
def test_gradients_go_to_what_was_written(subset):
    """To new keys at the positions rewritten, to old ones elsewhere; an empty slot gets none."""
    inputs, (where, valid) = make_inputs(0, LENGTH), subset
    weights = torch.randn(ROWS, HEADS, LENGTH, WIDTH, generator=random(0), dtype=torch.float64)
    parts = [(inputs.gather(where, valid, LENGTH), members(where, valid))]
    parts.append((inputs.strided(1, 2, LENGTH), (torch.arange(LENGTH) % 2 == 1).expand(ROWS, -1)))
    for part, chosen in parts:
        old, new = (
            torch.ones(ROWS, HEADS, length, WIDTH, dtype=torch.float64, requires_grad=True)
            for length in (LENGTH, part.length)
        )
        step = KeyValueMemory().rewritable().step(inputs)
        step.join(0, old, 2 * old)
        keys, values = step.close().step(part).join(0, new, 3 * new)
        (keys * weights + values * weights).sum().backward()
        assert torch.equal(old.grad, 3 * weights * ~chosen[:, None, :, None])
        expected = pick(4 * weights.transpose(1, 2), part.index.expand(ROWS, -1)).transpose(1, 2)
        if part.valid is not None:
            expected = expected * part.valid[:, None, :, None]
        assert torch.equal(new.grad, expected)


def test_rewriting_keeps_the_dtype():
    memory, inputs = with_past(0)
    where = torch.tensor([[0, 1], [2, 3]])
    for part in (inputs.strided(0, 2, LENGTH), inputs.gather(where, torch.ones_like(where) > 0, LENGTH)):
        key = torch.ones(ROWS, HEADS, part.length, WIDTH, dtype=torch.bfloat16)
        keys, values = memory.step(part).join(0, key, key)
        assert keys.dtype == values.dtype == memory.keys[0].dtype == torch.float32


@pytest.mark.parametrize("window", [None, 1, 2, 4, 20])
@pytest.mark.parametrize(("past", "capacity"), [(0, None), (5, None), (5, 15)])
def test_settled_grows_again_and_has_its_window(window, past, capacity):
    """What is rewritten is as long as the positions at hand; then the memory goes on as any other."""
    memory, inputs = with_past(past, window=window, capacity=capacity)
    *_, memory = rewrite(memory, inputs.strided(0, 2, past + LENGTH))
    settled = memory.settled()
    total = past + LENGTH
    kept = total if window is None else min(total, window - 1)
    assert (settled.length, settled.stop, settled.rewrites) == (kept, total, False)
    assert (settled.window, settled.capacity) == (window, capacity)
    marked = ((torch.arange(total) >= past) & ((torch.arange(total) - past) % 2 == 0)).expand(ROWS, -1)
    if kept:
        index = torch.arange(total - kept, total)[None]
        assert torch.equal(settled.index, index)
        assert_rewritten([held(settled, layer) for layer in range(LAYERS)], index, marked[:, total - kept :])
    step, joined, after = advance(settled, make_inputs(total, total + 1))
    index = torch.arange(total - kept, total + 1)[None]
    assert torch.equal(step.key_index, index)
    assert not step.recomputes
    marked = torch.cat([marked[:, total - kept :], torch.zeros(ROWS, 1, dtype=torch.bool)], dim=1)
    assert_rewritten(joined, index, marked)
    assert after.stop == total + 1


def test_rewriting_behind_gaps():
    """A past with empty slots stays as it is, and is known for one: the window is cut row by row."""
    valid = torch.tensor([[True, True, False], [True, False, True]])
    *_, memory = advance(
        KeyValueMemory(window=9), Inputs(torch.tensor([[0, 1, 9], [0, 9, 1]]), None, 2, {}, valid=valid)
    )
    inputs = make_inputs(2, 5)
    *_, memory = advance(memory.rewritable(), inputs)
    step, joined, memory = rewrite(memory, inputs.strided(1, 2, 4))
    assert step.key_index.tolist() == [[0, 1, -1, 2, 3, 4], [0, -1, 1, 2, 3, 4]]
    marked = torch.tensor([0, 0, 0, 0, 1, 0]).expand(ROWS, -1)
    filled = (step.key_index >= 0)[:, None, :, None]
    for layer in range(LAYERS):
        expected = tagged(step.key_index, layer) + 0.5 * marked[:, None, :, None]
        assert torch.equal(joined[layer][0] * filled, expected * filled)
    assert memory.gaps
    settled = replace(memory, window=5).settled()
    assert settled.index.tolist() == [[1, 2, 3, 4]] * ROWS
    assert_rewritten([held(settled, layer) for layer in range(LAYERS)], settled.index[:1], settled.index == 3)


def test_only_a_rewritable_memory_is_rewritten():
    memory, inputs = with_past(0)
    step, *_ = advance(memory.settled(), inputs.cut(3, LENGTH, LENGTH))
    assert step.key_index.shape[1] == LENGTH + 4, "others take all positions for new ones"
    step, *_ = advance(memory, make_inputs(LENGTH, LENGTH + 2))
    assert step.key_index.tolist() == [list(range(LENGTH + 2))], "positions that it does not hold are new"
