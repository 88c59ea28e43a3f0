"""The sliced loss is the plain one, in value and gradient, for every architecture's readout."""

import pytest
import torch

from pipeline.bench.live_memory import LiveMemory
from pipeline.evaluation import loss
from pipeline.evaluation.loss import token_losses
from pipeline.models import ARCHITECTURES
from pipeline.training import chunked_loss
from tests.models.cases import LENGTH, ROWS, make_model, make_tokens

CASES = [(name, variant) for name, cls in ARCHITECTURES.items() for variant in cls.variants()]


@pytest.fixture
def slices(monkeypatch):
    """Slices of 5 positions of 29 logits: several a batch, the last one shorter."""
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 5 * 29 + 3)


def setup(name, variant, dtype=torch.float64):
    cls = ARCHITECTURES[name]
    config = cls.variants()[variant]
    model = make_model(cls, config, dtype=dtype)
    tokens = make_tokens(config, length=LENGTH)
    states = torch.randn(ROWS, LENGTH, model.state_width, generator=torch.Generator().manual_seed(0)).to(dtype)
    return model, states.requires_grad_(), tokens


def gradients(model, states, value):
    model.zero_grad()
    states.grad = None
    (3 * value).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {**found, "states": states.grad}


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_value_and_gradient(slices, name, variant):
    model, states, targets = setup(name, variant)
    plain = token_losses(model, states, targets).mean()
    expected = gradients(model, states, plain)
    sliced = chunked_loss.mean_loss(model, states, targets)
    assert sliced.grad_fn is not None
    assert "ChunkedLoss" in type(sliced.grad_fn).__name__
    found = gradients(model, states, sliced)
    assert float(sliced.detach()) == pytest.approx(float(plain.detach()), rel=1e-14)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert float((found[key] - gradient).norm()) <= 1e-13 * float(gradient.norm()), key


def test_a_small_batch_is_taken_whole():
    model, states, targets = setup("transformer", "plain")
    whole = chunked_loss.mean_loss(model, states, targets)
    assert torch.equal(whole, token_losses(model, states, targets).mean())


def test_each_parameter_gets_its_gradient_once(slices):
    """Also where the embedding is both looked up and read out with, and several losses share the readout."""
    model, _, tokens = setup("fbt", "plain")
    counts = {"embedding.weight": 0}
    model.embedding.weight.register_post_accumulate_grad_hook(
        lambda _: counts.__setitem__("embedding.weight", counts["embedding.weight"] + 1)
    )
    states = model.embedding(tokens)
    (chunked_loss.mean_loss(model, states, tokens) + chunked_loss.mean_loss(model, 2 * states, tokens)).backward()
    assert counts == {"embedding.weight": 1}


def test_frozen_parameters_get_none(slices):
    model, states, targets = setup("transformer", "untied")
    model.readout_layer.requires_grad_(False)
    found = gradients(model, states, chunked_loss.mean_loss(model, states, targets))
    assert set(found) == {"states"}


def test_autocast(slices):
    """Under bfloat16 autocast the slices round as the whole does, up to the order of the sums."""
    model, states, targets = setup("transformer", "plain", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = token_losses(model, states, targets).mean()
        sliced = chunked_loss.mean_loss(model, states, targets)
    assert sliced.dtype == torch.float32
    assert float(sliced.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    expected, found = gradients(model, states, plain), gradients(model, states, sliced)
    for key, gradient in expected.items():
        assert float((found[key] - gradient).norm()) <= 2**-8 * float(gradient.norm()), key


def test_memory_is_that_of_a_slice(monkeypatch):
    """A step's live bytes stay below those of two of the logits' four tensors, which the plain loss holds at once."""
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 1 << 12)
    cls = ARCHITECTURES["transformer"]
    config = cls.variants()["plain"]
    config.vocab_size = 4096
    model = cls(config)
    model.init_weights(torch.Generator().manual_seed(0))
    states, targets = torch.randn(4, 64, config.width, requires_grad=True), torch.randint(4096, (4, 64))
    peaks = []
    for step in (
        lambda: token_losses(model, states, targets).mean(),
        lambda: chunked_loss.mean_loss(model, states, targets),
    ):
        with LiveMemory() as memory:
            step().backward()
        peaks.append(memory.peak)
        model.zero_grad()
    logits = 4 * 64 * 4096 * 4
    assert peaks[0] > 2 * logits
    assert peaks[1] < logits / 2


@torch.no_grad()
def test_evaluation_goes_slice_by_slice(slices):
    """Each token's loss is that of all logits at once, up to the order of sums in a product of fewer rows."""
    model, states, targets = setup("lrt", "plain")
    found = token_losses(model, states, targets)
    logits = model.readout(states)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    assert float((found.flatten() - expected).abs().max()) <= 1e-14 * float(expected.max())
