"""The loop whose backward is taken by hand finds autograd's gradients, and behaves like any other node of a graph."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.bench.live_memory import LiveMemory
from pipeline.models import ARCHITECTURES, Architecture, layers
from pipeline.models.collector import Collector, current
from pipeline.models.rlt import RLT
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.loop import SEGMENT_ROWS, Loop, uncollected_garbage
from tests.models.cases import assert_close, make_model, make_starts
from tests.solvers.cases import refused
from tests.solvers.loop_cases import (
    FEEDING,
    TOLERANCE,
    VARIANTS,
    Gradients,
    assert_same,
    chunked,
    compare,
    count_as_many,
    error,
    gradients_of,
    loss_of,
    run,
    tokens_of,
    trained,
)

LENGTH = 13
STARTS = torch.tensor([[0] * 5 + [5] * 8, [0] * 13, [0] * 3 + [3] * 1 + [4] * 9])
# Intervals that divide the row, leave a rest, are longer than it; windows of backpropagation and segments that are
# multiples of each other or not.
CASES = [
    (1, False, 0),
    (1, True, 6),
    (2, True, 0),
    (5, False, 6),
    (5, True, 6),
    (20, True, 0),
]
pytestmark = pytest.mark.usefixtures("kernels")
each_architecture = pytest.mark.parametrize("architecture", FEEDING)


@pytest.mark.parametrize(("architecture", "variant"), VARIANTS, ids=map("-".join, VARIANTS))
def test_gradients_are_those_of_autograd(architecture: str, variant: str):
    model = trained(architecture, variant)
    tokens = tokens_of(model)
    for interval, documents, truncation in CASES:
        settings = {"interval": interval, "truncation": truncation}
        starts = STARTS if documents else None
        states, reference = run(model, tokens, starts, loop="autograd", **settings)
        for segment in (0, 4):
            found = run(model, tokens, starts, **settings, activation_checkpointing=segment > 0, segment_length=segment)
            assert_same(found, states, reference, f"{settings} {documents} {segment}")


@pytest.mark.parametrize(
    ("settings", "other"), [({"loop": "autograd"}, "solver.loop=autograd"), ({"capture": True}, "solver.capture")]
)
def test_compiled_kernels_without_use(settings: dict[str, Any], other: str):
    with refused(f"solver.kernels is compiled; it has no use with {other}"):
        ChunkedConfig("chunked", kernels="compiled", **settings).check()


@each_architecture
def test_rows_longer_than_tiles_and_than_what_is_kept(architecture: str):
    model = trained(architecture)
    tokens = tokens_of(model, rows=2, length=150)
    starts = torch.tensor([[0] * 70 + [70] * 80, [0] * 3 + [3] * 140 + [143] * 7])
    compare(model, tokens)
    compare(model, tokens, starts, interval=7, truncation=77, activation_checkpointing=True, segment_length=20)
    compare(model, tokens, starts, interval=70)


@each_architecture
@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_of_many_rows_the_last_one_shorter(architecture: str, checkpointing: bool):
    """More rows a step than are put aside before a product is taken."""
    model = trained(architecture)
    compare(model, tokens_of(model, rows=40, length=100), interval=60, activation_checkpointing=checkpointing)


@pytest.mark.parametrize(("architecture", "variant"), VARIANTS, ids=map("-".join, VARIANTS))
def test_same_draws(architecture: str, variant: str):
    """Dropout, and jitter, at the same places as in autograd's loop."""
    cls = ARCHITECTURES[architecture]
    model = make_model(cls, replace(cls.variants()[variant], dropout=0.3)).train()
    tokens = tokens_of(model)
    compare(model, tokens, interval=1, activation_checkpointing=True, segment_length=4)
    compare(model, tokens, interval=5)
    compare(model, tokens, STARTS, interval=1)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@each_architecture
def test_checkpointing_computes_the_same_again(architecture: str, dropout: float):
    cls = ARCHITECTURES[architecture]
    model = make_model(cls, replace(cls.variants()["plain"], dropout=dropout)).train()
    if architecture == "fbt":
        model.jitter = 0.2
    tokens = tokens_of(model)
    for settings in ({"interval": 1}, {"interval": 3, "truncation": 6}):
        states, reference = run(model, tokens, STARTS, **settings)
        after = torch.get_rng_state()
        for segment in (3, 5):
            found = run(model, tokens, STARTS, **settings, activation_checkpointing=True, segment_length=segment)
            assert torch.equal(torch.get_rng_state(), after)
            assert torch.equal(found[0], states)
            assert error(found[1], reference) <= TOLERANCE


@pytest.mark.parametrize("interval", [1, 3, 8])
@each_architecture
def test_checkpointing_changes_no_bit_of_few_rows(architecture: str, interval: int):
    """Of no more rows than are summed at once, segments or not; weights that read one state a chunk, too."""
    model = trained(architecture).float()
    tokens = tokens_of(model, rows=2, length=32)
    assert tokens.numel() <= SEGMENT_ROWS
    for starts in (None, torch.tensor([[0] * 13 + [13] * 19, [0] * 32])):
        states, reference = run(model, tokens, starts, interval=interval)
        for segment in (8, 9, 24):
            settings = {"activation_checkpointing": True, "segment_length": segment}
            found = run(model, tokens, starts, interval=interval, **settings)
            assert torch.equal(found[0], states)
            assert error(found[1], reference) == 0


@pytest.mark.parametrize(("architecture", "variant"), VARIANTS)
def test_what_is_done_where_memory_counts(architecture: str, variant: str, monkeypatch: pytest.MonkeyPatch):
    """Keys and values of one segment's window, gates of one segment, the encoder a few positions at a time."""
    count_as_many(monkeypatch)
    model = trained(architecture, variant)
    tokens = tokens_of(model)
    for interval, truncation, segment in ((1, 0, 4), (1, 6, 3), (2, 0, 3), (5, 6, 5)):
        settings = {"interval": interval, "truncation": truncation}
        for starts in (None, STARTS):
            # Whatever was set up for training before: the run without comes first.
            chunked(**settings, loop="autograd").adapt(model)
            expected, reference = run(model, tokens, starts, loop="autograd", **settings)
            settings_again = {**settings, "activation_checkpointing": True, "segment_length": segment}
            chunked(**settings_again).adapt(model)
            found = run(model, tokens, starts, **settings_again)
            assert_same(found, expected, reference, f"{settings_again}, {starts}")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_encoder_draws_the_same_again(dropout: float, monkeypatch: pytest.MonkeyPatch):
    count_as_many(monkeypatch)
    model = make_model(RLT, replace(RLT.variants()["plain"], dropout=dropout)).train()
    tokens = tokens_of(model)
    expected = run(model, tokens)
    after = torch.get_rng_state()
    chunked(activation_checkpointing=True, segment_length=4).adapt(model)
    found = run(model, tokens, activation_checkpointing=True, segment_length=4)
    assert torch.equal(torch.get_rng_state(), after)
    assert_same(found, *expected, "again")
    assert torch.equal(found[0], expected[0])


def test_hooks_of_the_encoder_run_as_often_as_without(monkeypatch: pytest.MonkeyPatch):
    """In forward once, and once more in backward; never for some positions alone."""
    count_as_many(monkeypatch)
    model, shapes = trained("rlt"), []
    tokens = tokens_of(model)
    for module in (model.encoder[0].ffn, model.memory):
        module.register_forward_hook(lambda _, given, __: shapes.append(tuple(given[0].shape)))
    reference = run(model, tokens)
    chunked(activation_checkpointing=True).adapt(model)
    found = run(model, tokens, activation_checkpointing=True)
    assert_same(found, *reference, "with hooks")
    assert set(shapes) == {(*tokens.shape, model.config.width)}


@each_architecture
def test_gradients_of_one_row_are_those_of_finite_differences(architecture: str):
    model = trained(architecture)
    if architecture == "fbt":
        model.jitter = 0.0
    tokens = tokens_of(model, rows=1, length=6)
    _, reference = run(model, tokens)
    generator = torch.Generator().manual_seed(3)
    parameters = dict(model.named_parameters())
    ways = {name: torch.randn(each.shape, generator=generator, dtype=each.dtype) for name, each in parameters.items()}
    expected = sum(float((ways[name] * each).sum()) for name, each in reference.items() if each is not None)

    def value(step: float) -> float:
        moved = {name: each.detach() + step * ways[name] for name, each in parameters.items()}
        before = {name: each.detach().clone() for name, each in parameters.items()}
        with torch.no_grad():
            model.load_state_dict(moved, strict=False)
            found = float(loss_of(chunked(loop="autograd").run(model, tokens).states))
            model.load_state_dict(before, strict=False)
        return found

    found = (value(1e-6) - value(-1e-6)) / 2e-6
    assert found == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- memory


@each_architecture
def test_segments_keep_little(architecture: str):
    """The peak of live tensors, weights left out: with segments a fraction of that without."""
    model = trained(architecture, dtype=torch.float32)
    tokens = tokens_of(model, rows=16, length=128)

    def peak(**settings: Any) -> int:
        with LiveMemory() as memory:
            run(model, tokens, **settings)
        return memory.peak

    assert peak(interval=4, activation_checkpointing=True, segment_length=16) <= 0.6 * peak(interval=4)


def living() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter, Loop, Collector)]


@each_architecture
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("settings", [{}, {"interval": 2, "activation_checkpointing": True}], ids=["whole", "segments"])
def test_nothing_waits_for_the_garbage_collector(architecture: str, backward: bool, settings: dict):
    model = trained(architecture)
    tokens = tokens_of(model)
    run(model, tokens, **settings)
    gc.collect()
    gc.disable()
    try:
        before = len(living())
        states = chunked(**settings).run(model, tokens).states
        if backward:
            model.zero_grad(set_to_none=False)  # gradients that are there already
            states.sum().backward()
        del states
        assert len(living()) == before
    finally:
        gc.enable()


def test_garbage_collection_goes_on_as_before():
    model = trained("rlt")
    tokens = tokens_of(model)
    for enabled in (True, False):
        try:
            gc.enable() if enabled else gc.disable()
            run(model, tokens)
            assert gc.isenabled() is enabled
            with uncollected_garbage():
                assert not gc.isenabled()
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


# ---------------------------------------------------------------- as a node of a graph


def test_backward_is_taken_once():
    model = trained("rlt")
    loss = loss_of(chunked().run(model, tokens_of(model)).states)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward through a loop over time can be taken only once"):
        loss.backward()


def test_no_second_derivative():
    model = trained("rlt")
    loss = chunked().run(model, tokens_of(model)).states.square().sum()
    (found,) = torch.autograd.grad(loss, [model.merge.state.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


@each_architecture
def test_micro_batches_add_up(architecture: str):
    model = trained(architecture)
    if architecture == "fbt":
        model.jitter = 0.0
    tokens = tokens_of(model, rows=6)
    parts = [run(model, part)[1] for part in tokens.split(2)]
    model.zero_grad()
    for part in tokens.split(2):
        loss_of(chunked().run(model, part).states).backward()
    sums = {
        name: None if each is None else sum((other[name] for other in parts[1:]), each)
        for name, each in parts[0].items()
    }
    assert error(gradients_of(model), sums) <= TOLERANCE


@each_architecture
def test_two_loops_in_one_graph(architecture: str):
    """Backward through one after forward through both, and with the states used twice."""
    model = trained(architecture)
    first, second = tokens_of(model, rows=2), tokens_of(model, rows=2, length=9)
    found = []
    for loop in ("autograd", "fast"):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        solver = chunked(loop, interval=2)
        one, other = solver.run(model, first).states, solver.run(model, second).states
        (loss_of(one) * loss_of(other) + one.square().sum()).backward()
        found.append(gradients_of(model))
    assert error(found[1], found[0]) <= TOLERANCE


@pytest.mark.parametrize("pattern", ["ffn", "weight", "bias", "norm", "merge", "decoder", "embedding", ""])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_parameters(pattern: str, checkpointing: bool):
    model = trained("rlt", "layernorm")
    for name, each in model.named_parameters():
        each.requires_grad_(pattern not in name or name == "initial")
    compare(model, tokens_of(model), interval=2, activation_checkpointing=checkpointing)


def test_nothing_trained():
    model = trained("rlt").requires_grad_(False)
    tokens = tokens_of(model)
    states = chunked().run(model, tokens).states
    assert not states.requires_grad
    with torch.no_grad():
        assert_close(chunked().run(model, tokens).states, states)


def test_parameter_changed_between_forward_and_backward():
    model = trained("rlt")
    for settings in ({}, {"activation_checkpointing": True}):
        loss = loss_of(chunked(**settings).run(model, tokens_of(model)).states)
        with torch.no_grad():
            model.merge.state.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"changed in place .*: merge\.state\.weight"):
            loss.backward()


@each_architecture
def test_model_can_be_copied_and_pickled_after(architecture: str):
    model = trained(architecture)
    tokens = tokens_of(model)
    states, reference = run(model, tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = run(other, tokens)
        assert torch.equal(found[0], states)
        assert error(found[1], reference) == 0


@pytest.mark.parametrize("when", ["forward", "backward", "segments"])
def test_an_exception_leaves_everything_as_it_was(when: str):
    model = trained("rlt")
    tokens = tokens_of(model)
    settings = {"activation_checkpointing": True} if when == "segments" else {}
    states, reference = run(model, tokens, **settings)
    calls, advance, last = 0, model.advance, LENGTH + 5 if when == "segments" else 5

    def failing(*arguments: object, **named: object) -> tuple[Tensor, object]:
        nonlocal calls
        calls += 1
        if calls == last and when != "backward":
            raise ZeroDivisionError
        state, memory = advance(*arguments, **named)
        if when == "backward" and calls == 5:
            state.register_hook(lambda gradient: 1 / 0)
        return state, memory

    model.advance = failing
    with pytest.raises(ZeroDivisionError):
        run(model, tokens, **settings)
    del model.advance
    assert current() is None
    assert gc.isenabled()
    parameters = [each for module in model.modules() for each in module._parameters.values() if each is not None]
    assert all(isinstance(each, nn.Parameter) for each in parameters)
    found = run(model, tokens, **settings)
    assert torch.equal(found[0], states)
    assert error(found[1], reference) == 0


@pytest.mark.parametrize("interval", [1, 4])
@each_architecture
def test_half_precision_is_no_worse_than_autograd(architecture: str, interval: int):
    """Under autocast, against float64, in norm: both loops round in other places, and FBT carries that far."""
    ratios = []
    for seed in range(4):
        exact, model = (trained(architecture, seed=seed, dtype=dtype) for dtype in (torch.float64, torch.float32))
        if architecture == "fbt":
            exact.jitter = model.jitter = 0.0
        tokens = tokens_of(model, rows=8, length=20)
        _, reference = run(exact, tokens, interval=interval)
        by_hand = {
            name: distance(under_autocast(model, tokens, interval=interval, **settings), reference)
            for name, settings in (
                ("autograd", {"loop": "autograd"}),
                ("fast", {}),
                ("segments", {"activation_checkpointing": True}),
            )
        }
        assert by_hand["segments"] == pytest.approx(by_hand["fast"], rel=0.1)
        ratios.append(by_hand["fast"] / by_hand["autograd"])
    assert math.prod(ratios) ** (1 / len(ratios)) <= (2 if architecture == "fbt" else 1.25), ratios


def under_autocast(model: Architecture, tokens: Tensor, **settings: Any) -> Gradients:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(chunked(**settings).run(model, tokens).states.float())
    loss.backward()
    return gradients_of(model)


def distance(gradients: Gradients, reference: Gradients) -> float:
    both = [(each.double(), reference[name]) for name, each in gradients.items() if each is not None]
    difference = sum(float((found - truth).square().sum()) for found, truth in both)
    return (difference / sum(float(truth.square().sum()) for _, truth in both)) ** 0.5


@each_architecture
def test_weights_in_half_precision(architecture: str):
    """Gradients have the dtype of the weights, and autograd's size."""
    model = trained(architecture, dtype=torch.bfloat16)
    tokens = tokens_of(model)
    _, reference = run(model, tokens, loop="autograd")
    _, found = run(model, tokens)
    assert error(found, reference) < 0.5  # that they are no other gradients, no more


# ---------------------------------------------------------------- architectures that do what the loop does not know


class Untouched(RLT):
    """Adds to the states what a module makes of them that knows no collector."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(config.width, config.width)

    def advance(self, inputs, feedback, memory=None):
        states, memory = super().advance(inputs, feedback, memory)
        return states + torch.tanh(self.extra(states)), memory


class Direct(RLT):
    """Reads the weight of a collected layer as well."""

    def advance(self, inputs, feedback, memory=None):
        states, memory = super().advance(inputs, feedback, memory)
        weight = self.decoder[0].ffn.down.weight
        return states + torch.tanh(states @ weight @ weight.t()), memory


class Embedding(RLT):
    """Looks tokens up within the loop, in a table of its own and in that of the model."""

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.width)

    def prepare(self, tokens, index, starts, memory=None):
        inputs, memory = super().prepare(tokens, index, starts, memory)
        return inputs.with_values(tokens=tokens), memory

    def advance(self, inputs, feedback, memory=None):
        states, memory = super().advance(inputs, feedback, memory)
        tokens = inputs.values["tokens"]
        return states + self.table(tokens) * self.embedding(tokens), memory


class Twice(RLT):
    """Uses a layer three times in a step."""

    def advance(self, inputs, feedback, memory=None):
        states, memory = super().advance(inputs, feedback, memory)
        ffn = self.decoder[0].ffn
        return states + ffn(torch.tanh(ffn(states))), memory


class Sometimes(RLT):
    """Uses a collected layer, and a parameter of its own, in a step in the middle alone."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(config.width))

    def advance(self, inputs, feedback, memory=None):
        states, memory = super().advance(inputs, feedback, memory)
        if int(inputs.index[0, 0]) == 4:
            states = self.scale * self.decoder[0].ffn(states)
        return states, memory


class Split(RLT):
    """Uses a layer on one position after the other, and on fewer rows in one step than in others."""

    def advance(self, inputs, feedback, memory=None):
        states, memory = super().advance(inputs, feedback, memory)
        ffn, rows = self.decoder[0].ffn, 1 if int(inputs.index[0, 0]) == 4 else 2
        parts = [ffn(part[:rows]) for part in states.split(1, dim=1)]
        return states + torch.cat(parts, dim=1).sum(dim=0), memory


class Constant(RLT):
    """Ignores what is fed back."""

    def advance(self, inputs, feedback, memory=None):
        return super().advance(inputs, None, memory)


SUBCLASSES = [Untouched, Direct, Embedding, Twice, Sometimes, Split, Constant]


@pytest.mark.parametrize("cls", SUBCLASSES)
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_unusual_architectures(cls: type[Architecture], interval: int, checkpointing: bool):
    model = make_model(cls, RLT.variants()["layernorm"]).train()
    compare(model, tokens_of(model), interval=interval, activation_checkpointing=checkpointing)


class LowRank(layers.Linear):
    """A layer with an addition of low rank to its weight, as fine-tuning makes it."""

    def __init__(self, base: layers.Linear):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.to(base.weight.dtype).load_state_dict(base.state_dict())
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=base.weight.dtype))

    def forward(self, x):
        return super().forward(x) + x @ self.down.t() @ self.up.t()


class Louder(layers.SwiGLU):
    def forward(self, x):
        return 2 * super().forward(x)


class LouderNorm(layers.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class LouderQueries(layers.SelfAttention):
    def enter(self, *arguments):
        query, key, value = super().enter(*arguments)
        return 2 * query, key, value


class LouderValues(layers.SelfAttention):
    def project(self, x):
        query, key, value = super().project(x)
        return query, key, 2 * value


class LouderRecall(layers.CrossAttention):
    def enter(self, *arguments):
        return 2 * super().enter(*arguments)


@pytest.mark.parametrize("cls", [Louder, LouderNorm, LouderQueries, LouderValues, LouderRecall])
def test_layers_whose_methods_are_written_anew(cls: type[nn.Module]):
    """They are called as they are, not as what they inherit."""
    model, plain = trained("rlt"), trained("rlt")
    for module in list(model.modules()):
        if type(module) is cls.__base__:
            module.__class__ = cls
    tokens = tokens_of(model)
    assert not torch.allclose(run(model, tokens)[0], run(plain, tokens)[0])
    compare(model, tokens, interval=2)


@pytest.mark.parametrize("place", ["decoder.0.cross.output", "decoder.0.ffn.down", "decoder.1.ffn.gate_up"])
@pytest.mark.parametrize("kind", ["low rank", "plain", "weight norm"])
def test_layers_in_the_place_of_others(place: str, kind: str):
    model = trained("rlt")
    outer, _, name = place.rpartition(".")
    layer = getattr(model.get_submodule(outer), name)
    if kind == "weight norm":
        nn.utils.parametrizations.weight_norm(layer)
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False).double()
        setattr(model.get_submodule(outer), name, LowRank(layer) if kind == "low rank" else plain)
    compare(model, tokens_of(model), interval=2)


@pytest.mark.parametrize("place", ["decoder.0.ffn", "decoder.0.ffn.down", "decoder.1.cross_norm", "merge.state"])
def test_forward_hooks_run(place: str):
    model = trained("rlt")
    tokens = tokens_of(model)
    module, calls = model.get_submodule(place), []
    module.register_forward_hook(lambda *arguments: calls.append(place) or 0.5 * arguments[2])
    compare(model, tokens)
    assert len(calls) == 2 * LENGTH


def test_hooks_of_a_norm_of_queries_run():
    model, calls = trained("rlt"), []
    model.decoder[0].head_norms.query.register_forward_pre_hook(lambda *arguments: calls.append(arguments))
    compare(model, tokens_of(model))
    assert len(calls) == 2 * LENGTH


def test_forward_replaced_in_an_object():
    model = trained("rlt")
    ffn = model.decoder[0].ffn
    before = ffn.forward
    ffn.forward = lambda x: 2 * before(x)
    compare(model, tokens_of(model))


@pytest.mark.parametrize("shared", ["weights", "modules"])
@each_architecture
def test_blocks_that_share(architecture: str, shared: str):
    """One parameter at two places, or one module; both are the model's own again afterwards."""
    model = trained(architecture)
    first, second = (model.decoder if architecture == "rlt" else model.blocks)[:2]
    if shared == "modules":
        second.attention.query_key_value, second.ffn = first.attention.query_key_value, first.ffn
    else:
        second.attention.query_key_value.weight = first.attention.query_key_value.weight
        second.ffn.down.weight = first.ffn.down.weight
    kept = dict(model.named_parameters())
    for settings in ({}, {"interval": 3, "activation_checkpointing": True}):
        compare(model, tokens_of(model), **settings)
        assert all(each is kept[name] for name, each in model.named_parameters())


def test_inside_a_checkpoint():
    """Somebody else's checkpoint around the whole loop."""
    model = trained("rlt")
    tokens, anchor = tokens_of(model), torch.zeros((), dtype=torch.float64, requires_grad=True)
    _, reference = run(model, tokens)
    model.zero_grad(set_to_none=True)
    states = checkpoint(lambda zero: chunked().run(model, tokens).states + zero, anchor, use_reentrant=False)
    loss_of(states).backward()
    assert error(gradients_of(model), reference) == 0


def test_in_threads():
    """Several loops at once, and backward in another thread than forward."""
    models = [trained("rlt") for _ in range(3)]
    tokens = tokens_of(models[0])
    _, reference = run(models[0], tokens)
    for model in models:
        model.zero_grad(set_to_none=True)
    losses = [loss_of(chunked(activation_checkpointing=True).run(model, tokens).states) for model in models]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Tensor.backward, losses))
        list(pool.map(lambda model: loss_of(chunked().run(model, tokens).states).backward(), models))
    for model in models:
        found = {name: None if each is None else each / 2 for name, each in gradients_of(model).items()}
        assert error(found, reference) <= TOLERANCE


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (4, 1)])
@each_architecture
def test_short_rows(architecture: str, shape: tuple[int, int]):
    model = trained(architecture)
    compare(model, tokens_of(model, *shape))
    compare(model, tokens_of(model, *shape), activation_checkpointing=True, segment_length=1)


@each_architecture
def test_every_token_a_document(architecture: str):
    model = trained(architecture)
    compare(model, tokens_of(model), torch.arange(LENGTH).expand(3, -1), interval=3)
    compare(model, tokens_of(model), torch.arange(LENGTH).expand(3, -1), truncation=1)


# ---------------------------------------------------------------- settings


def test_evaluation_does_not_care():
    model = trained("rlt").eval()
    tokens = tokens_of(model)
    with torch.no_grad():
        assert torch.equal(*(chunked(loop, interval=2).run(model, tokens).states for loop in ("fast", "autograd")))


def test_documents_at_random():
    model = trained("rlt")
    tokens = tokens_of(model)
    for seed in range(4):
        compare(model, tokens, make_starts(seed, length=LENGTH), interval=3)


def test_mistakes():
    with refused("solver.segment_length is set"):
        chunked(segment_length=4)
