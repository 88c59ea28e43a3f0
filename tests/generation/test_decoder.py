"""Decoding from caches: the numbers of one whole pass, and nothing that grows or waits for each token."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline import models, solvers
from pipeline.generation import generate as generation
from pipeline.generation.decoder import Decoder
from pipeline.generation.generate import generate
from pipeline.generation.sampling import Sampling
from pipeline.generation.weights import HeldWeights
from pipeline.models import ARCHITECTURES, buffers, products
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.parallel import ParallelConfig
from tests.generation.test_generation import CASES, GREEDY, collect

LONG = 24
PADDING = (0, 3, 5)


@pytest.fixture(autouse=True)
def _short_buffers(monkeypatch):
    """Let the buffers of a window be moved every few tokens."""
    monkeypatch.setattr(buffers, "SPARE", 4)


def build(config):
    """Return a model in float64 that settles: with larger weights the recurrence is chaotic, and rounding grows."""
    model = models.build(config).double().eval()
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    return model


def text(config, rows, length=LONG):
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(4))


def decoded(model, solver, tokens, prompt, *, starts=None, held=True):
    """Return the logits [rows, n, V] of positions from the last of the prompt on, read token by token."""
    weights = HeldWeights(model) if held else None
    decoder = Decoder(model, solver, len(tokens), tokens.shape[1], starts=starts, weights=weights)
    parts = [tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)]
    return torch.stack([decoder.logits(decoder.read(part)) for part in parts], dim=1)


@pytest.mark.parametrize("held", [True, False], ids=["held", "unheld"])
@pytest.mark.parametrize(("cls", "config", "solver"), CASES)
@torch.inference_mode()
def test_caches_hold_the_whole(cls, config, solver, held):
    """In float64, far beyond every window, and with the buffers moved again and again."""
    model, solver = build(config), solvers.build(solver)
    tokens = text(config, 2)
    whole = model.readout(solver.run(model, tokens).states[:, 4:])
    found = decoded(model, solver, tokens, 5, held=held)
    assert float((found - whole).abs().max()) <= 1e-12 * float(whole.abs().max())


@pytest.mark.parametrize(("cls", "config", "solver"), CASES)
@torch.inference_mode()
def test_rows_padded_on_the_left(cls, config, solver):
    model, solver = build(config), solvers.build(solver)
    tokens = text(config, len(PADDING))
    found = decoded(model, solver, tokens, 7, starts=torch.tensor(PADDING))
    for row, padding in enumerate(PADDING):
        alone = model.readout(solver.run(model, tokens[row : row + 1, padding:]).states)[0, 6 - padding :]
        assert float((found[row] - alone).abs().max()) <= 1e-12 * float(alone.abs().max())


def test_a_window_much_shorter_than_the_text():
    """As long as real buffers are, so that they are moved as they are in use."""
    for name, options in {"rlt": {"window": 9}, "transformer": {"attention_window": 9}, "crt": {"layers": 1}}.items():
        config = replace(ARCHITECTURES[name].variants()["plain"], **options)
        model = build(config)
        solver = solvers.build(ChunkedConfig("chunked") if model.feeds_back else ParallelConfig("parallel"))
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(buffers, "SPARE", 64)
            tokens = text(config, 1, 300)
            found = decoded(model, solver, tokens, 100)
            whole = model.readout(solver.run(model, tokens).states[:, 99:])
        assert float((found - whole).abs().max()) <= 1e-12 * float(whole.abs().max()), name


def plain_tensors(tree):
    """Return the tensors with a storage: those in oneDNN's layout have none."""
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and not each.is_mkldnn]


class Allocations(TorchDispatchMode):
    """Writes down the size of every storage that an operation makes, and every look of the host at a tensor."""

    LOOKS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")

    def __init__(self):
        super().__init__()
        self.sizes, self.looks, self.reordered = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.looks += func.name() in self.LOOKS
        self.reordered += func.name() == "mkldnn::_reorder_linear_weight"
        known = {each.untyped_storage()._cdata for each in plain_tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for each in plain_tensors(out):
            if each.untyped_storage()._cdata not in known:
                self.sizes.append(each.untyped_storage().nbytes())
        return out


def allocations(model, solver, *, starts=None, tokens=20):
    """Return the sorted sizes of what each token allocates."""
    rows = 1 if starts is None else len(starts)
    read = text(model.config, rows, 6 + tokens)
    found = []
    with torch.inference_mode():
        decoder = Decoder(model, solver, rows, 6 + tokens, starts=starts, weights=HeldWeights(model))
        for part in [read[:, :6], *read[:, 6:].split(1, dim=1)]:
            with Allocations() as seen:
                decoder.logits(decoder.read(part))
            found.append(sorted(seen.sizes))
    return found[2:]  # the prompt, and what follows it, set buffers aside


DECODED = [
    pytest.param(cls, config, id=f"{name}-{variant}")
    for name, cls in ARCHITECTURES.items()
    for variant, config in cls.variants().items()
]


def exact(cls):
    return solvers.build(ChunkedConfig("chunked") if cls.feeds_back else ParallelConfig("parallel"))


@pytest.mark.parametrize(("cls", "config"), DECODED)
def test_a_token_allocates_what_the_one_before_did(cls, config):
    """Whatever number of positions there are; but a window's buffers are moved to the front from time to time."""
    per_token = allocations(build(config), exact(cls))
    ordinary = min(per_token, key=sum)
    moves = [sizes for sizes in per_token if sizes != ordinary]
    if cls.__name__ == "RLT" and config.decoder_layers and config.window > 1:
        layers, window = config.decoder_layers, config.window
    elif getattr(config, "attention_window", None) and not config.full_attention_every:
        layers, window = config.layers, config.attention_window
    else:
        layers, window = 0, 0
    assert len(moves) <= (len(per_token) / (max(window - 1, buffers.SPARE) + 1) + 1 if window else 0)
    for sizes in moves:  # at most a copy of the window's keys and values
        assert (
            sum(sizes) - sum(ordinary)
            <= 2 * layers * 8 * config.key_value_heads * config.head_width * window + 8 * window
        )


@pytest.mark.parametrize(("cls", "config"), DECODED)
def test_padding_costs_a_mask(cls, config):
    """A byte or a few for each slot and row, where keys and values have hundreds."""
    per_token = allocations(build(config), exact(cls), starts=torch.tensor(PADDING))
    assert max(map(sum, per_token)) - min(map(sum, per_token)) <= 8 * len(PADDING) * len(per_token)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, top_k=5, top_p=0.9)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4]]], ids=["one", "padded"])
def test_the_host_looks_at_nothing_but_the_end(name, sampling, prompts):
    model = build(ARCHITECTURES[name].variants()["plain"])
    drawn = generate(model, exact(type(model)), prompts, count=8, sampling=sampling, seed=0, stop=-1, ended_every=3)
    with Allocations() as seen:
        assert len(list(drawn)) == 8
    assert seen.looks == 2


def test_looking_seldom_adds_stops_alone():
    config = ARCHITECTURES["transformer"].variants()["plain"]
    model, solver = build(config), exact(ARCHITECTURES["transformer"])
    options = {"count": 12, "sampling": Sampling(2.0), "seed": 0}
    stop = int(collect(model, solver, [[1], [2]], **options)[0, 3])
    each = collect(model, solver, [[1], [2]], stop=stop, **options)
    for ended_every in (3, 5, 50):
        found = collect(model, solver, [[1], [2]], stop=stop, ended_every=ended_every, **options)
        end = each.shape[1]
        assert found.shape[1] == min(12, -(-end // ended_every) * ended_every)
        assert torch.equal(found[:, :end], each)
        assert (found[:, end:] == stop).all()


def test_fewer_tokens_are_the_first_of_more():
    model, solver = build(ARCHITECTURES["crt"].variants()["plain"]), exact(ARCHITECTURES["crt"])
    many = collect(model, solver, [[1], [2], [3]], count=50, sampling=Sampling(2.0), seed=3)
    for count in (1, 7, 49):
        assert torch.equal(
            collect(model, solver, [[1], [2], [3]], count=count, sampling=Sampling(2.0), seed=3), many[:, :count]
        )


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_held_weights_are_the_same_weights(name):
    """In float32, where they are copied into another layout, and for several calls."""
    config = replace(ARCHITECTURES[name].variants()["plain"], width=256, ffn_width=512, vocab_size=300)
    model = build(config).float()
    solver, prompts = exact(type(model)), [[1, 2], [5]]
    tokens = text(config, 2)
    with torch.inference_mode():
        plain, held = (decoded(model, solver, tokens, 5, held=held) for held in (False, True))
    assert float((held - plain).abs().max()) <= 1e-4 * float(plain.abs().max())
    weights = HeldWeights(model)
    written = []
    for call in range(2):
        with Allocations() as seen:
            written.append(collect(model, solver, prompts, count=4, sampling=GREEDY, seed=0, weights=weights))
        assert bool(seen.reordered) == (call == 0 and products.serves_held(torch.zeros(1, 256), torch.zeros(768, 256)))
    assert torch.equal(*written)


def test_weights_are_held_anew_by_each_call():
    model = build(ARCHITECTURES["crt"].variants()["plain"])
    solver, count = exact(type(model)), generation.HOLDING_TOKENS
    before = collect(model, solver, [[1]], count=count, sampling=GREEDY, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    after = collect(model, solver, [[1]], count=count, sampling=GREEDY, seed=0)
    assert not torch.equal(before, after)
    assert torch.equal(after[:, :4], collect(model, solver, [[1]], count=4, sampling=GREEDY, seed=0))


def test_training_goes_on_after_generation():
    """What inference mode leaves behind (rotation tables) can be saved for backward."""
    model = build(ARCHITECTURES["rlt"].variants()["plain"])
    for padded in ([[1, 2, 3]], [[1, 2, 3], [1]]):
        collect(model, exact(type(model)), padded, count=3, sampling=GREEDY, seed=0)
        tokens = text(model.config, 2, 6)
        starts = torch.tensor([0, 0, 0, 3, 3, 3]).expand(2, -1)
        for given in (None, starts):
            model.readout(exact(type(model)).run(model, tokens, given).states).sum().backward()
