"""Truncated backpropagation through time: what is cut, what is not, and that the states are the same."""

import pytest
import torch

from pipeline.models import RLT
from pipeline.solvers import build
from pipeline.solvers.chunked import ChunkedConfig
from tests.models.cases import LENGTH, SEEDS, make_starts, model_and_tokens, relative
from tests.models.contract import loss_of
from tests.solvers.cases import FEEDING, each_feeding, refused

pytestmark = pytest.mark.usefixtures("kernels")


def chunked(**settings):
    config = ChunkedConfig(name="chunked", **settings)
    config.check()
    return build(config)


def gradients(model, states, seed=0):
    model.zero_grad(set_to_none=True)
    loss_of(model.readout(states), seed).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def by_hand(model, tokens, window, interval=1):
    """Compute a row in calls of ``window`` positions, each going on from constants."""
    solver = chunked(interval=interval)
    carry, found = solver.new_carry(model, len(tokens)), []
    for begin in range(0, tokens.shape[1], window):
        solution = solver.run(model, tokens[:, begin : begin + window], carry=carry)
        found.append(solution.states)
        memory = {name: each.detached() for name, each in solution.carry.memory.items()}
        carry = solution.carry
        carry.memory, carry.register = memory, carry.register.detached()
    return torch.cat(found, dim=1)


@each_feeding
@pytest.mark.parametrize("interval", [1, 3])
def test_states_are_the_same(cls, interval):
    for seed in SEEDS:
        model, tokens = model_and_tokens(cls, seed)
        for starts in (None, make_starts(seed)):
            whole = chunked(interval=interval).run(model, tokens, starts).states
            for window in (interval, 2 * interval + 1, 50):
                cut = chunked(interval=interval, truncation=window).run(model, tokens, starts).states
                assert torch.equal(cut, whole)


@each_feeding
def test_a_window_as_long_as_the_row_cuts_nothing(cls):
    model, tokens = model_and_tokens(cls)
    for starts in (None, make_starts(0)):
        expected = gradients(model, chunked().run(model, tokens, starts).states)
        for window in (LENGTH, LENGTH + 5):
            found = gradients(model, chunked(truncation=window).run(model, tokens, starts).states)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("cls", [cls for cls in FEEDING if cls is not RLT])
@pytest.mark.parametrize(("window", "interval"), [(1, 1), (4, 1), (6, 3), (5, 2)])
def test_gradients_are_those_of_calls_that_go_on_from_constants(cls, window, interval):
    """For architectures all of whose memory recurs; a window takes whole chunks."""
    model, tokens = model_and_tokens(cls)
    solver = chunked(interval=interval, truncation=window)
    found = gradients(model, solver.run(model, tokens).states)
    expected = gradients(model, by_hand(model, tokens, window // interval * interval, interval))
    for name, gradient in expected.items():
        assert relative(found[name], gradient) <= 1e-12, name


@each_feeding
def test_something_is_cut(cls):
    """And state and keys together: with either alone the gradient would be another."""
    model, tokens = model_and_tokens(cls)
    whole = gradients(model, chunked().run(model, tokens).states)
    cut = gradients(model, chunked(truncation=3).run(model, tokens).states)
    assert relative(cut["embedding.weight"], whole["embedding.weight"]) > 1e-6


def test_the_encoder_still_learns_across_windows():
    """RLT report, H.1: the state and the decoder's caches are cut, the encoder and its memory are not."""
    model, tokens = model_and_tokens(RLT)
    model.embedding.weight.requires_grad_(False)
    entries = []
    plain = model.prepare

    def prepare(*arguments, **named):
        inputs, memory = plain(*arguments, **named)
        inputs.values["entry"].retain_grad()
        entries.append(inputs.values["entry"])
        return inputs, memory

    model.prepare = prepare
    states = chunked(truncation=4).run(model, tokens).states
    model.readout(states[:, -1]).sum().backward()  # the last window's loss alone
    reached = entries[0].grad.abs().amax(dim=(0, 2))
    assert bool((reached > 0).all()), "the memory of every position is read by the last one"


@each_feeding
def test_with_activation_checkpointing(cls):
    model, tokens = model_and_tokens(cls)
    for settings in ({"truncation": 5}, {"truncation": 6, "interval": 2}):
        for loop in ("fast", "autograd"):
            expected = gradients(model, chunked(**settings, loop=loop).run(model, tokens).states)
            again = chunked(**settings, loop=loop, activation_checkpointing=True, segment_length=2)
            again.adapt(model)
            found = gradients(model, again.run(model, tokens).states)
            for name in expected:
                if loop == "autograd":
                    assert torch.equal(found[name], expected[name])
                else:  # rows of a weight's gradient are summed in other groups
                    assert torch.allclose(found[name], expected[name], rtol=1e-12, atol=1e-13)


def test_mistakes():
    with refused("solver.truncation is -1"):
        chunked(truncation=-1)
    with refused("solver.truncation is 3; it must be 0, or at least solver.interval=4"):
        chunked(truncation=3, interval=4)
