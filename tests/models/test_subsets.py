"""How rows are divided into subsets: dealt and collected again, and what lies before each position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.inputs import Inputs
from pipeline.models.subsets import Alike, packed
from tests.models.cases import random, starts_of


@st.composite
def rows_and_divisions(draw):
    """Rows of documents, divided; where all begin at multiples of S, in either way."""
    length, subsets, rows = draw(st.integers(1, 12)), draw(st.integers(1, 14)), draw(st.integers(1, 3))
    unit = draw(st.sampled_from([1, subsets]))
    borders = [draw(st.sets(st.integers(1, max(1, length // unit)), max_size=4)) for _ in range(rows)]
    starts = torch.stack([starts_of([0, *(unit * each for each in sorted(row))], length) for row in borders])
    alike = unit == subsets and draw(st.booleans())
    return starts, subsets, Alike(subsets, length) if alike else packed(starts, subsets)


def drawn(starts, seed=0):
    return torch.randn(*starts.shape, 2, generator=random(seed), dtype=torch.float64).requires_grad_()


@settings(max_examples=200)
@given(rows_and_divisions())
def test_parts_hold_every_position_once(scene):
    starts, subsets, division = scene
    rows, length = starts.shape
    inputs = Inputs(torch.arange(length)[None], starts, length, {"number": torch.arange(length).expand(rows, -1)})
    index = division.index(inputs)
    assert len(index) == division.count <= subsets
    found = [[] for _ in range(rows)]
    for number, part in enumerate(index):
        own = division.inputs(inputs, number)
        assert own.key_index.tolist() == part.tolist()
        for row, places in enumerate(part.expand(rows, -1).tolist()):
            kept = [place for place in places if place >= 0]
            assert kept == sorted(kept)
            assert places[: len(kept)] == kept, "empty slots come last"
            assert all((place - int(starts[row, place])) % subsets == number for place in kept)
            assert own.values["number"].expand(rows, -1)[row, : len(kept)].tolist() == kept
            assert max(kept, default=0) < own.stop <= length
            found[row] += kept
    assert all(sorted(row) == list(range(length)) for row in found)


@settings(max_examples=100)
@given(rows_and_divisions())
def test_what_is_dealt_is_collected(scene):
    """With its gradient."""
    starts, _, division = scene
    values = drawn(starts)
    parts = division.deal(values)
    whole = division.collect(parts)
    assert torch.equal(whole, values)
    assert all(torch.equal(part, rest) for part, rest in zip(parts[1:], division.deal(values, 1), strict=True))
    weights = drawn(starts, seed=1).detach()
    (gradient,) = torch.autograd.grad((whole * weights).sum(), values)
    assert torch.equal(gradient, weights)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_part_that_nobody_needs_gets_no_gradient(number):
    values = drawn(torch.zeros(3, 7, dtype=torch.int64))
    parts = Alike(5, 7).deal(values)
    (gradient,) = torch.autograd.grad(parts[number].sum(), values)
    expected = torch.zeros_like(gradient)
    expected[:, number::5] = 1
    assert torch.equal(gradient, expected)


@settings(max_examples=200)
@given(rows_and_divisions())
def test_what_lies_before(scene):
    """Every position but a document's first finds the values of the one before it."""
    starts, _, division = scene
    rows, length = starts.shape
    values = drawn(starts).detach()
    parts = division.deal(values)
    index = division.index(Inputs(torch.arange(length)[None], starts, length, {}))
    for number in range(division.count):
        found = division.before(number, parts[number - 1]) if number else division.before_first(values)
        for row in range(rows):
            for slot, place in enumerate(index[number].expand(rows, -1)[row].tolist()):
                if place >= 0 and place != int(starts[row, place]):
                    assert torch.equal(found[row, slot], values[row, place - 1])
