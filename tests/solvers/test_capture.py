"""The loop on tensors that stay where they are, as CUDA graphs need it; a CPU runs it again where a GPU replays."""

import pytest
import torch

from pipeline import solvers
from pipeline.models import ARCHITECTURES
from pipeline.solvers.chunked import ChunkedConfig
from tests.models.cases import make_model
from tests.solvers.cases import refused
from tests.solvers.loop_cases import count_as_many


def chunked(**settings):
    return solvers.build(ChunkedConfig("chunked", **settings))


NAMES = ("rlt", "crt", "lrt", "fbt")
STARTS = torch.tensor([[0] * 4 + [4] * 4, [0] * 8, [0, 0, 2, 2, 4, 4, 4, 4]])


def gradients(model, solver, tokens, starts=None):
    model.zero_grad()
    states = solver.run(model, tokens, starts).states
    weight = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
    (states * weight).sum().backward()
    return states.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
@pytest.mark.parametrize("settings", [{}, {"interval": 2}, {"truncation": 3}, {"activation_checkpointing": True}])
@pytest.mark.parametrize("name", NAMES)
def test_batch_after_batch(name, settings, starts, monkeypatch):
    """Each batch of a shape finds the same loop, with its own contents and the weights of the day."""
    if settings.get("activation_checkpointing"):
        count_as_many(monkeypatch)
    cls = ARCHITECTURES[name]
    model = make_model(cls, cls.variants()["plain"])
    captured, plain = chunked(**settings, capture=True), chunked(**settings, kernels="torch")
    generator = torch.Generator().manual_seed(1)
    for batch in range(3):
        tokens = torch.randint(29, (3, 8), generator=generator)
        states, found = gradients(model, captured, tokens, starts)
        expected_states, expected = gradients(model, plain, tokens, starts)
        assert torch.equal(states, expected_states)
        assert found.keys() == expected.keys()
        for parameter in expected:
            assert torch.equal(found[parameter], expected[parameter]), (batch, parameter)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)


def test_other_shapes_are_other_loops():
    cls = ARCHITECTURES["rlt"]
    model = make_model(cls, cls.variants()["plain"])
    captured, plain = chunked(capture=True), chunked(kernels="torch")
    for rows, length in ((2, 5), (3, 5), (2, 7), (2, 5)):
        tokens = torch.arange(rows * length).view(rows, length) % 29
        assert torch.equal(gradients(model, captured, tokens)[0], gradients(model, plain, tokens)[0])


def test_forward_twice_before_backward():
    cls = ARCHITECTURES["rlt"]
    model = make_model(cls, cls.variants()["plain"])
    solver, tokens = chunked(capture=True), torch.arange(10).view(2, 5)
    first = solver.run(model, tokens).states
    solver.run(model, tokens)
    with pytest.raises(RuntimeError, match="ran forward again before its backward"):
        first.sum().backward()


def test_mistakes():
    with refused("solver.capture is set; it has no use with solver.loop=autograd"):
        ChunkedConfig("chunked", capture=True, loop="autograd").check()
