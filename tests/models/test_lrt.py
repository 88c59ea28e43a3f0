"""What is LRT's own: the zero memory of a plain pass, subsets and refinements, and what the memory adds to a model."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models import LRT, Feedback
from pipeline.models.base import build
from pipeline.models.inputs import Inputs
from pipeline.models.lrt import LRTConfig
from pipeline.models.transformer import TransformerConfig
from pipeline.solvers.interleaved import split
from tests.models.cases import (
    EXACT,
    FEEDING_SOLVERS,
    LENGTH,
    PARALLEL,
    ROWS,
    SEEDS,
    assert_close,
    gradient_vector,
    make_model,
    make_starts,
    make_tokens,
    model_and_tokens,
    mute,
    own_names,
    passes_of,
    plain_of,
    prepared,
    random,
    relative,
    shifted,
    solver,
    starts_of,
    token_loss,
    tolerance,
    watched,
)
from tests.models.contract import loss_of

VARIANTS = LRT.variants()
PLAIN = VARIANTS["plain"]
INTERLEAVED = {
    **{f"interleaved{subsets}": solver("interleaved", subsets=subsets) for subsets in (1, 2, 3, 5)},
    "refreshed3": solver("interleaved", subsets=3, refresh_keys_values=True),
}
ORDERS = {**FEEDING_SOLVERS, "refreshed2": solver("interleaved", subsets=2, refresh_keys_values=True)}


def objective(model, run, tokens):
    """Return what is trained."""
    return sum(weight * token_loss(model, states, tokens) for states, weight in run.run(model, tokens).loss_terms)


def assert_gradients_alike(model, found, expected):
    """Raise AssertionError unless two losses have the same gradients up to rounding."""
    found, expected = (gradient_vector(model, loss, keep=True) for loss in (found, expected))
    assert relative(found, expected) < 1e-13


# ---------------------------------------------------------------- zero memory, and the plain transformer inside


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_first_pass_has_zero_memory(variant):
    """Of either schedule, to the last bit, and token by token with a cache it is the same."""
    for seed in SEEDS:
        model, tokens = model_and_tokens(LRT, seed, variant)
        for starts in (None, make_starts(seed)):
            inputs = prepared(model, tokens, starts)
            reference, _ = model.advance(inputs, Feedback(torch.zeros(ROWS, LENGTH, model.config.width).double()))
            assert torch.equal(PARALLEL.run(model, tokens, starts).states, reference)
            for run in [*INTERLEAVED.values(), solver("unrolled", passes=3, loss="mean")]:
                assert torch.equal(run.run(model, tokens, starts).loss_terms[0][0], reference)
            beyond = solver("chunked", interval=LENGTH + 1).run(model, tokens, starts).states
            assert_close(beyond, reference, "one chunk, fed the initial memory")
            memory, zero = model.new_memory(), model.initial_feedback(ROWS)
            assert not bool(zero.states.any())
            assert zero.fed is None
            for position in range(LENGTH):
                state, memory = model.advance(inputs.cut(position, position + 1, position + 1), zero, memory)
                assert_close(state, reference[:, position : position + 1], "decoding with zero memory")


def without_gates(model):
    """Let all gates be one."""
    for name, parameter in model.named_parameters():
        if name.endswith("memory_gate.weight"):
            torch.nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_gates_of_one_are_the_plain_transformer(variant):
    """Its plain pass to the last bit; weights as they are first drawn have such gates."""
    for seed in SEEDS:
        model, tokens = model_and_tokens(LRT, seed, variant)
        parts = ("recurrent.", "source_norm.", ".memory_gate.", ".memory_scale")
        assert own_names(model) == {name for name in model.state_dict() if any(part in name for part in parts)}
        fresh = LRT(VARIANTS[variant]).double().eval()
        fresh.init_weights(random(seed))
        assert all(
            float(block.memory_scale) == pytest.approx(0.1 * fresh.settings.input_scale) for block in fresh.lrt_blocks()
        )
        for each in (without_gates(model), fresh):
            plain = plain_of(each)
            for starts in (None, make_starts(seed)):
                reference = PARALLEL.run(plain, tokens, starts).states
                states = PARALLEL.run(each, tokens, starts).states
                assert torch.equal(states[..., : each.config.width], reference)
                assert torch.equal(each.readout(states), plain.readout(reference))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_muted_feedback_is_the_plain_pass_in_every_order(variant):
    """With gates of one the plain transformer; either way in alone is still heard."""
    config = VARIANTS[variant]
    for seed in SEEDS[:2]:
        model, tokens = model_and_tokens(LRT, seed, variant)
        before = mute(model)
        own = {n for n in model.state_dict() if n.startswith("recurrent.") or n.endswith(".memory_scale")}
        assert before.keys() == own
        for _ in range(2):
            for starts in (None, make_starts(seed)):
                reference = PARALLEL.run(model, tokens, starts).states
                for name, run in ORDERS.items():
                    for states, _ in run.run(model, tokens, starts).loss_terms:
                        assert_close(states, reference, name)
            without_gates(model)
        plain = PARALLEL.run(plain_of(model), tokens).states
        assert_close(EXACT.run(model, tokens).states[..., : config.width], plain)
        for way in ("recurrent.", ".memory_scale"):
            heard = {name: weight for name, weight in before.items() if way in name}
            model.load_state_dict({**model.state_dict(), **heard})
            assert float((EXACT.run(model, tokens).states[..., : config.width] - plain).abs().max()) > 1e-2, way
            model.mute_feedback()


# ---------------------------------------------------------------- the memory's source


@pytest.mark.parametrize(
    ("layers", "source"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 5), (10, 6), (12, 7), (20, 12), (24, 14)]
)
def test_the_source_is_the_block_at_0_6_of_the_depth(layers, source):
    config = replace(PLAIN, layers=layers)
    assert config.source == source
    assert replace(config, source_layer=layers).source == layers
    assert replace(config, source_layer=-1).source == -1


@pytest.mark.parametrize("variant", ["plain", "layernorm", "nanochat"])
@pytest.mark.parametrize("source", [1, 2, 3, -1])
@torch.no_grad()
def test_every_block_is_fed_the_normed_output_of_the_source_block(variant, source):
    config = replace(VARIANTS[variant], layers=3, source_layer=source)
    for seed in SEEDS:
        model, tokens, starts = make_model(LRT, config, seed), make_tokens(config, seed), make_starts(seed)
        outputs, fed = [], []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda block, args, fed=fed: fed.append(args[-1].state))
            block.register_forward_hook(lambda block, args, output, outputs=outputs: outputs.append(output))
        first, second = passes_of(model, tokens, 2, starts)
        assert fed[:3] == [None] * 3
        for states, found in ((first, outputs[:3]), (second, outputs[3:])):
            assert torch.equal(states[..., : config.width], found[-1])
            assert states.shape[-1] == config.width * (1 if source == -1 else 2) == model.state_width
            if source != -1:
                assert torch.equal(states[..., config.width :], found[source - 1])
        norm = model.readout_layer.norm if source == -1 else model.source_norm
        memory = shifted(norm(outputs[:3][source - 1 if source != -1 else -1]), starts)
        assert all(torch.equal(each, memory) for each in fed[3:])


# ---------------------------------------------------------------- refinements


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_row_of_t_takes_t_minus_1_refinements(variant):
    """The first token's memory is zero in every pass: the plain pass settles its state, each refinement one more."""
    for length in (2, 3, 4, 6):
        for seed in SEEDS:
            model, tokens = model_and_tokens(LRT, seed, variant, length)
            exact = EXACT.run(model, tokens).states
            for passes in (length, length + 1, length + 9):
                assert_close(solver("unrolled", passes=passes).run(model, tokens).states, exact, f"{passes} passes")
            error = (solver("unrolled", passes=length - 1).run(model, tokens).states - exact).abs().amax(dim=(0, 2))
            assert float(error[: length - 1].max()) <= tolerance(exact)
            assert float(error[-1]) > 100 * tolerance(exact), "T - 2 refinements are exact"


WEIGHTS = ([0.1, 0.3, 0.6], [1.0, 3.0, 6.0], [0.0, 2.0, 2.0, 1.0], [5.0], [0.0, 1.0])


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_refinements_are_trained_by_the_mean_of_weights_over_their_sum(weights):
    for seed in SEEDS:
        model, tokens = model_and_tokens(LRT, seed)
        each = [token_loss(model, states, tokens) for states in passes_of(model, tokens, len(weights))]
        for chosen, run in (
            (weights, solver("unrolled", passes=len(weights), loss="weighted", loss_weights=weights)),
            ([1.0] * len(weights), solver("unrolled", passes=len(weights), loss="mean")),
        ):
            expected = sum(weight * loss for weight, loss in zip(chosen, each, strict=True)) / sum(chosen)
            found = objective(model, run, tokens)
            assert_close(found, expected, "loss")
            assert_gradients_alike(model, found, expected)


@torch.no_grad()
def test_passes_that_would_change_nothing_keep_their_weight():
    """More passes than a row needs are not run; what is trained is the same."""
    model, tokens = model_and_tokens(LRT)
    most = LENGTH + 7
    states = [solver("unrolled", passes=passes).run(model, tokens).states for passes in range(1, most + 1)]
    every = [token_loss(model, each, tokens) for each in states]
    for passes in (LENGTH, LENGTH + 1, most):
        losses = every[:passes]
        for loss, expected in {
            "mean": sum(losses) / passes,
            "last": losses[-1],
            "plain_and_fed": losses[0] + sum(losses[1:]) / (passes - 1),
        }.items():
            run = solver("unrolled", passes=passes, loss=loss)
            assert_close(objective(model, run, tokens), expected, "loss")
            assert len(run.run(model, tokens).loss_terms) <= LENGTH


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("passes", [2, 3])
def test_detaching_passes(variant, passes):
    """The states are the same, the embedding's gradient is not; it is that of the last pass with its memory held."""
    for seed in SEEDS[:2]:
        model, tokens = model_and_tokens(LRT, seed, variant)
        found = {}
        for detach in (False, True):
            states = solver("unrolled", passes=passes, detach_passes=detach).run(model, tokens).states
            loss = loss_of(model.readout(states), seed)
            found[detach] = states.detach(), gradient_vector(model, loss, keep=True), loss
        assert torch.equal(found[False][0], found[True][0])
        wte = [torch.autograd.grad(loss, model.embedding.weight)[0] for *_, loss in found.values()]
        assert relative(wte[1], wte[0]) > 1e-2
        inputs, held = prepared(model, tokens), None
        for _ in range(passes):
            memory = None if held is None else Feedback(shifted(model.fed_back(held)))
            states, _ = model.advance(inputs, memory)
            held = states.detach()
        by_hand = gradient_vector(model, loss_of(model.readout(states), seed))
        assert relative(found[True][1], by_hand) < 1e-13


# ---------------------------------------------------------------- interleaved subsets


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_subset_is_one_refinement(variant):
    """To the last bit; gradients up to rounding."""
    for seed in SEEDS:
        model, tokens = model_and_tokens(LRT, seed, variant)
        for starts in (None, make_starts(seed)):
            one = solver("interleaved", subsets=1).run(model, tokens, starts).loss_terms
            two = solver("unrolled", passes=2, loss="mean").run(model, tokens, starts).loss_terms
            assert [weight for _, weight in one] == [weight for _, weight in two] == [0.5, 0.5]
            for (found, _), (expected, _) in zip(one, two, strict=True):
                assert torch.equal(found, expected)
            losses = [sum(w * loss_of(model.readout(s), seed) for s, w in terms) for terms in (one, two)]
            assert_gradients_alike(model, *losses)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_as_many_subsets_as_positions_are_the_recurrence(variant):
    """Of a row, and of the longest document in it; one subset fewer is not."""
    starts = torch.stack([starts_of(row, LENGTH) for row in ([0, 3, 8], [0, 6, 7], [0, 1, 2, 7])])
    for seed in SEEDS[:2]:
        model, tokens = model_and_tokens(LRT, seed, variant)
        for borders, longest in ((None, LENGTH), (starts, 6)):
            exact = EXACT.run(model, tokens, borders).states
            for refresh in (False, True):
                for subsets in (longest, 3 * longest):
                    run = solver("interleaved", subsets=subsets, refresh_keys_values=refresh)
                    assert_close(run.run(model, tokens, borders).states, exact, f"{subsets} subsets")
                run = solver("interleaved", subsets=longest - 1, refresh_keys_values=refresh)
                assert float((run.run(model, tokens, borders).states - exact).abs().max()) > 100 * tolerance(exact)


@given(
    subsets=st.integers(1, 9),
    offset=st.integers(0, 7),
    length=st.integers(1, 12),
    seed=st.integers(0, 1000),
    packed=st.booleans(),
)
def test_subsets_partition_the_positions(subsets, offset, length, seed, packed):
    """Each position is in one, that of its place in the document, and they come in order."""
    starts = make_starts(seed, length=offset + length)[:, offset:] if packed else None
    index = torch.arange(offset, offset + length)[None]
    marks = torch.arange(ROWS * length).view(ROWS, length, 1)
    inputs = Inputs(index, starts, offset + length, {"mark": marks})
    within = (index if starts is None else index - starts).expand(ROWS, -1)
    seen = torch.full((ROWS, length), -1)
    order = []
    for subset in split(inputs, subsets, offset):
        mask = subset.mask(ROWS, length)
        assert bool((seen[mask] == -1).all()), "a position is in two subsets"
        (number,) = (within[mask] % subsets).unique().tolist()
        seen[mask] = number
        order.append(number)
        part = subset.inputs
        valid = torch.ones_like(part.values["mark"][..., 0], dtype=torch.bool) if part.valid is None else part.valid
        assert part.values["mark"][..., 0][valid].sort().values.equal(marks[..., 0][mask].sort().values)
        rows = part.index.expand(ROWS, -1)
        assert bool((rows[valid] < part.stop).all())
        assert rows[valid].sort().values.equal(index.expand(ROWS, -1)[mask].sort().values)
        filled = subset.into(torch.zeros_like(marks), torch.where(valid[..., None], subset.of(marks), 0))
        assert filled.equal(torch.where(mask[..., None], marks, 0))
    assert order == sorted(set(order))
    assert seen.equal(within % subsets)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("run", INTERLEAVED.values(), ids=INTERLEAVED)
@torch.no_grad()
def test_every_position_is_refined_once_and_trained_as_refined(variant, run):
    for seed in SEEDS[:2]:
        model, tokens = watched(LRT, VARIANTS[variant], seed), make_tokens(VARIANTS[variant], seed)
        terms = run.run(model, tokens).loss_terms
        (plain, share), (refined, rest) = terms
        assert share == pytest.approx(1 / (run.subsets + 1))
        assert rest == pytest.approx(run.subsets / (run.subsets + 1))
        (_, nothing, states, _), *subsets = model.calls
        assert nothing is None
        assert torch.equal(plain, states)
        assert len(subsets) == run.subsets
        visited = []
        for number, (inputs, _, states, _) in enumerate(subsets):
            index = inputs.index
            assert bool((index[0] % run.subsets == number).all())
            assert torch.equal(refined[:, index[0]], states)
            visited += index[0].tolist()
        assert sorted(visited) == list(range(LENGTH))


@pytest.mark.parametrize("subsets", [1, 2, 3, 4, 5, 11])
def test_interleaved_loss_is_the_mean_over_passes(subsets):
    """Where subsets are alike in size; else that in which every position weighs the same."""
    run = solver("interleaved", subsets=subsets)
    for seed in SEEDS:
        model, tokens = make_model(LRT, PLAIN, seed), make_tokens(PLAIN, seed, length=LENGTH + 1)
        # The last token is only predicted.
        (plain, _), (refined, _) = run.run(model, tokens).loss_terms
        parts = [token_loss(model, refined, tokens, slice(number, None, subsets)) for number in range(subsets)]
        counts = [len(range(number, LENGTH, subsets)) for number in range(subsets)]
        whole = sum(count * part for count, part in zip(counts, parts, strict=True)) / LENGTH
        expected = (token_loss(model, plain, tokens) + subsets * whole) / (1 + subsets)
        if LENGTH % subsets == 0:
            assert_close((token_loss(model, plain, tokens) + sum(parts)) / (1 + subsets), expected)
        assert_close(objective(model, run, tokens), expected, "loss")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("run", INTERLEAVED.values(), ids=INTERLEAVED)
@torch.no_grad()
def test_no_token_writes_to_an_earlier_place_of_the_buffer(variant, run):
    """In no pass: keys and values there are the same to the last bit; the token's own are others."""
    config = VARIANTS[variant]
    tokens = make_tokens(config)

    def buffers(tokens):
        model = watched(LRT, config)
        run.run(model, tokens)
        kept = [memory for *_, memory in model.calls]
        return [
            (f"{name} of block {layer} after pass {number}", tensor)
            for number, memory in enumerate(kept)
            for name, each in memory.items()
            for kind in (each.keys, each.values)
            for layer, tensor in enumerate(kind)
        ]

    before = buffers(tokens)
    assert len(before) >= 2 * config.layers * (1 + run.subsets)
    for position in range(0, LENGTH, 2):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % config.vocab_size
        for (what, old), (_, new) in zip(before, buffers(changed), strict=True):
            assert torch.equal(old[:, :, :position], new[:, :, :position]), f"token {position} changed {what} before it"
            constant = what.startswith("gates") and not config.memory_gates
            assert constant or not torch.equal(old[:, :, position], new[:, :, position]), f"token {position}: {what}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("run", INTERLEAVED.values(), ids=INTERLEAVED)
def test_no_gradient_reaches_a_later_token(variant, run):
    """Exactly zero, whichever way through the buffer; the state's own token and the one before have some."""
    config = VARIANTS[variant]
    for seed in SEEDS[:1]:
        model = make_model(LRT, config, seed)
        tokens = torch.randperm(config.vocab_size, generator=random(seed))[None, :LENGTH]  # each token once
        states = run.run(model, tokens).states
        tables = [model.embedding, *(model.value_embeddings or [])]
        for position in range(LENGTH):
            found = torch.autograd.grad(
                states[0, position].sum(), [table.weight for table in tables], retain_graph=True, allow_unused=True
            )
            reached = sum(gradient.abs().sum(dim=1) for gradient in found if gradient is not None)[tokens[0]]
            assert not bool(reached[position + 1 :].any()), f"state {position} depends on a later token"
            assert bool((reached[max(0, position - 1) : position + 1] > 0).all())


# ---------------------------------------------------------------- gradients of what feeds the memory in


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("run", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("muted", [False, True], ids=["drawn", "muted"])
def test_gradients_reach_the_projection_and_the_scales(variant, run, muted):
    """With weights as first drawn, and after muting, where both are zero; the gates' too where both are not."""
    config = VARIANTS[variant]
    model, tokens = LRT(config).double(), make_tokens(config)
    model.init_weights(random(0))
    if muted:
        model.mute_feedback()
    loss_of(model.readout(run.run(model, tokens).states), 0).backward()
    kv_heads = config.kv_heads or config.heads
    for layer, block in enumerate(model.lrt_blocks()):
        assert float(block.memory_scale.grad.abs()) > 0, layer
        if block.memory_gate is not None:
            own, recurrent = block.memory_gate.weight.grad.split(kv_heads)
            assert bool((own != 0).any()), layer
            assert bool((recurrent != 0).any()) is not muted, layer
    for projection in model.recurrent:
        for part in projection.weight.grad.chunk(2):  # keys, values
            assert bool((part != 0).all())
    model.zero_grad()
    loss_of(model.readout(PARALLEL.run(model, tokens).states), 0).backward()
    assert all(parameter.grad is None for parameter in model.dormant_parameters())


# ---------------------------------------------------------------- sizes

# A nanochat of depth 20, with value embeddings in every block.
D20 = {
    "vocab_size": 32_768,
    "width": 1280,
    "heads": 10,
    "layers": 20,
    "norm": "rms_unlearned",
    "ffn": "relu2",
    "tied_head": False,
    "logit_softcap": 15.0,
    "embedding_norm": True,
    "value_embeddings": True,
    "residual_scalars": True,
}


def on_meta(config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def test_the_memory_adds_as_many_parameters_as_published():
    """0.3 % with one projection for all blocks, 5 % with one each."""
    d, layers, heads = D20["width"], D20["layers"], D20["heads"]
    own = layers * (2 * heads * d + 1)  # gates and scales
    for norm, source_norm in (("rms_unlearned", 0), ("rms", d)):
        settings = {**D20, "norm": norm}
        plain = on_meta(TransformerConfig(architecture="transformer", **settings))
        assert plain == pytest.approx(1.316e9, rel=1e-3)
        for kind, projections, share in (("shared", 1, 0.003), ("layerwise", layers, 0.05)):
            added = on_meta(LRTConfig(architecture="lrt", recurrent_projection=kind, **settings)) - plain
            assert added == projections * 2 * d * d + own + source_norm
            assert added / plain == pytest.approx(share, rel=0.05)
