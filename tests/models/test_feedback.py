"""What is fed back: which states, to which positions, and nothing to others."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models import Feedback
from tests.models.cases import random

ROWS, LENGTH, WIDTH = 3, 4, 2


def normal(seed, *shape):
    return torch.randn(*shape, generator=random(seed), dtype=torch.float64)


def booleans(draw, *shape):
    count = torch.Size(shape).numel()
    return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count))).view(shape)


@st.composite
def feedbacks(draw, seed):
    """States for every row and position or for all alike, fed to all, or by a mask of any shape that broadcasts."""
    states = normal(seed, draw(st.sampled_from([1, ROWS])), draw(st.sampled_from([1, LENGTH])), WIDTH)
    if draw(st.booleans()):
        return Feedback(states)
    return Feedback(states, booleans(draw, draw(st.sampled_from([1, ROWS])), draw(st.sampled_from([1, LENGTH])), 1))


def spelled_out(feedback):
    """Return states and whether they are fed, for every row and position."""
    states = feedback.states.expand(ROWS, LENGTH, WIDTH)
    if feedback.fed is None:
        return states, torch.ones(ROWS, LENGTH, dtype=torch.bool)
    assert feedback.fed.dtype == torch.bool
    return states, feedback.fed.expand(ROWS, LENGTH, 1)[..., 0]


@given(feedbacks(1), feedbacks(2), st.data(), st.sampled_from([1, LENGTH]))
def test_where(one, other, data, length):
    mask = booleans(data.draw, ROWS, length)
    found = one.where(mask, other)
    assert (found.fed is None) == (one.fed is None and other.fed is None)
    states, fed = spelled_out(found)
    sides = {True: spelled_out(one), False: spelled_out(other)}
    for row in range(ROWS):
        for place in range(LENGTH):
            expected = sides[bool(mask.expand(-1, LENGTH)[row, place])]
            assert torch.equal(states[row, place], expected[0][row, place])
            assert fed[row, place] == expected[1][row, place]


@given(feedbacks(1), st.data(), st.sampled_from([1, ROWS]), st.sampled_from([1, LENGTH]))
def test_only(feedback, data, rows, length):
    """Masks add up, whatever their order."""
    first, second = booleans(data.draw, rows, length), booleans(data.draw, ROWS, LENGTH)
    before = spelled_out(feedback)[1].clone()
    found = feedback.only(first)
    assert found.states is feedback.states
    assert torch.equal(spelled_out(found)[1], before & first)
    assert torch.equal(spelled_out(found.only(second))[1], before & first & second)
    assert torch.equal(spelled_out(feedback.only(second).only(first))[1], before & first & second)
    assert torch.equal(spelled_out(feedback)[1], before), "it is left as it was"


@pytest.mark.parametrize("start", [0, 1, LENGTH - 1])
@pytest.mark.parametrize("fed_shape", [None, (1, 1), (ROWS, 1), (1, LENGTH), (ROWS, LENGTH)])
def test_cut(start, fed_shape):
    states = normal(0, ROWS, LENGTH, WIDTH)
    fed = None if fed_shape is None else torch.rand(*fed_shape, 1, generator=random(0)) < 0.5
    whole, found = Feedback(states, fed), Feedback(states, fed).cut(start)
    assert torch.equal(found.states, states[:, start:])
    assert found.states.is_contiguous()
    if fed is None:
        assert found.fed is None
        return
    kept = found.fed.expand(ROWS, LENGTH - start, 1)[..., 0]
    assert torch.equal(kept, spelled_out(whole)[1][:, start:])


@given(feedbacks(1))
def test_choose(feedback):
    """Where nothing is fed, what would be has no effect: neither on values nor through gradients."""
    fed, plain = (normal(seed, ROWS, LENGTH, WIDTH).requires_grad_() for seed in (3, 4))
    found = feedback.choose(fed, plain)
    if feedback.fed is None:
        assert found is fed
        return
    chosen = spelled_out(feedback)[1][..., None].expand(ROWS, LENGTH, WIDTH)
    assert torch.equal(found[chosen], fed[chosen])
    assert torch.equal(found[~chosen], plain[~chosen])
    found.sum().backward()
    assert torch.equal(fed.grad, chosen.double())
    assert torch.equal(plain.grad, (~chosen).double())


def test_what_is_fed_does_not_change():
    feedback = Feedback(normal(0, 1, 1, WIDTH))
    with pytest.raises(dataclasses.FrozenInstanceError):
        feedback.fed = torch.ones(1, 1, 1, dtype=torch.bool)
