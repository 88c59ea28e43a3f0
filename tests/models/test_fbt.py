"""What is FBT's own: the plain first position, plain prefixes, jitter, no way past the state, modes of decoding."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pipeline.models import FBT, Feedback
from pipeline.models.inputs import pick
from pipeline.solvers.base import shifted
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
    passes_of,
    plain_of,
    prepared,
    random,
    relative,
    solver,
    starts_of,
    token_loss,
    tolerance,
    watched,
)
from tests.models.contract import loss_of

VARIANTS = FBT.variants()
PLAIN = VARIANTS["plain"]


def watched_fusion(config, seed):
    """Return a model that also notes what enters its first block, and what is fused."""
    model = watched(FBT, config, seed)
    model.entered, model.fused = [], []
    model.blocks[0].register_forward_pre_hook(lambda block, args: model.entered.append(args[0]))
    model.fusion.value.register_forward_pre_hook(lambda layer, args: model.fused.append(args[0]))
    return model


def begins(starts):
    """Return which positions are their document's first, bool [rows, n]."""
    index = torch.arange(LENGTH)
    return (index == 0).expand(ROWS, -1) if starts is None else starts == index


def fed_pass(model, inputs, states, plain_prefix=1):
    """Return the states of a pass after that of ``states``, whose first positions stay plain."""
    feedback = shifted(model, states, model.initial_feedback(len(states)), inputs)
    return model.advance(inputs, feedback.only(inputs.index >= plain_prefix))[0]


def steps(model, tokens, plain_prefix=1):
    """Return the states of the recurrence, one position after the other, whose first positions stay plain."""
    inputs, memory, found = prepared(model, tokens), model.new_memory(), []
    for position in range(tokens.shape[1]):
        feedback = Feedback(found[-1]) if position >= plain_prefix else None
        state, memory = model.advance(inputs.cut(position, position + 1, position + 1), feedback, memory)
        found.append(state)
    return torch.cat(found, dim=1)


# ---------------------------------------------------------------- how a fusion begins


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_muting_leaves_the_plain_pass_and_gives_fused_vectors_the_size_of_embeddings(variant):
    """That is all it can do: there is no way around the state."""
    config = replace(VARIANTS[variant], embedding_std=0.02)
    for seed in SEEDS:
        model, tokens = FBT(config).double().eval(), make_tokens(config, seed)
        model.init_weights(random(seed))
        before = PARALLEL.run(model, tokens).states
        assert mute(model).keys() == {
            "fusion.value.weight",
            *(() if config.embedding_norm else ("fusion.norm.weight",)),
        }
        assert torch.equal(PARALLEL.run(model, tokens).states, before)
        inputs = prepared(model, tokens)
        feedback = shifted(model, before, model.initial_feedback(ROWS), inputs)
        plain, fused = inputs.values["x"], model.fed_input(inputs, feedback)[:, 1:]
        table = model.embedding.weight if model.input_norm is None else model.input_norm(model.embedding.weight)
        size = float(table.square().mean().sqrt())
        limit = 1e-4 if model.input_norm is None else 0.02  # the norm's eps, which a norm on embeddings so small feels
        assert float((fused.square().mean(dim=-1).sqrt() / size - 1).abs().max()) < limit
        gated = before[:, :-1] * inputs.values["gate"][:, 1:]  # the state is let through as it is
        assert_close(fused, (model.fusion.norm or model.input_norm)(gated), "fused vectors")
        assert float(plain.square().mean().sqrt()) == pytest.approx(size, rel=0.2)


# ---------------------------------------------------------------- first positions and plain prefixes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("run", FEEDING_SOLVERS.values(), ids=FEEDING_SOLVERS)
@torch.no_grad()
def test_a_documents_first_position_is_never_fused(variant, run):
    """In every pass its embedding enters the stack, and at no other position (of a first chunk, at all)."""
    for seed in SEEDS[:2]:
        model, tokens = watched_fusion(VARIANTS[variant], seed), make_tokens(VARIANTS[variant], seed)
        for starts in (None, make_starts(seed)):
            model.calls.clear()
            model.entered.clear()
            states = run.run(model, tokens, starts).states
            plain, first = prepared(model, tokens, starts).values["x"], begins(starts)
            calls, entries = list(model.calls), list(model.entered)
            assert_close(states[first], PARALLEL.run(model, tokens, starts).states[first])
            within = (torch.arange(LENGTH) - (0 if starts is None else starts)).expand(ROWS, -1)
            fused = within >= getattr(run, "interval", 1)
            for (inputs, feedback, *_), entered in zip(calls, entries, strict=True):
                index = inputs.index.expand(ROWS, -1)
                alike = (entered == pick(plain, index)).all(dim=-1)
                expected = torch.ones_like(alike) if feedback is None else ~pick(fused, index)
                valid = torch.ones_like(alike) if inputs.valid is None else inputs.valid
                assert torch.equal(alike[valid], expected[valid])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prefix", [1, 2, 4, 7])
@torch.no_grad()
def test_a_plain_prefix_of_p_makes_p_plus_k_minus_1_states_exact(variant, prefix):
    """Those of the recurrence with the same plain prefix; so a row of T takes T - p + 1 passes, and no fewer."""
    length = prefix + 5
    for seed in SEEDS:
        model, tokens = model_and_tokens(FBT, seed, variant, length)
        exact, inputs = steps(model, tokens, prefix), prepared(model, tokens)
        if prefix == 1:
            assert_close(exact, EXACT.run(model, tokens).states)
        states = PARALLEL.run(model, tokens).states
        for passes in range(1, length + 2):
            error = (states - exact).abs().amax(dim=(0, 2))
            right = min(length, prefix + passes - 1)
            assert float(error[:right].max()) <= tolerance(exact), f"{right} states after {passes} passes"
            assert right == length or float(error[right]) > 100 * tolerance(exact), f"state {right} after {passes}"
            assert (passes >= length - prefix + 1) == (right == length)
            states = fed_pass(model, inputs, states, prefix)


def plain_prefixes(model, run, tokens, starts):
    """Return for each pass with feedback which positions stayed plain, [passes, rows, n]."""
    model.calls.clear()
    run.run(model, tokens, starts)
    return torch.stack([~feedback.fed.expand(ROWS, LENGTH, 1)[..., 0] for _, feedback, *_ in model.calls[1:]])


@torch.no_grad()
def test_drawn_prefixes_are_contiguous_and_begin_with_each_document():
    model = watched_fusion(PLAIN, 0).train()
    for seed in range(20):
        tokens, starts = make_tokens(PLAIN, seed), make_starts(seed) if seed % 4 else None
        first = begins(starts)
        document = first.long().cumsum(dim=1)
        for share in (0.3, 1.0):
            drawn = plain_prefixes(model, solver("unrolled", passes=4, prefix=share), tokens, starts)
            assert bool(drawn[:, first].all()), "a document's first position is fused"
            # Behind a fused position all of its document is fused.
            assert not bool((drawn[..., 1:] & ~drawn[..., :-1] & ~first[:, 1:]).any())
            for row in range(ROWS):
                for number in document[row].unique():
                    length = int((document[row] == number).sum())
                    plain = drawn[:, row, document[row] == number].sum(dim=1)
                    assert int(plain.max()) <= -(-length * share // 1)


@torch.no_grad()
def test_prefixes_are_drawn_evenly_for_every_document_row_and_pass():
    """Each length from 1 on is as frequent, up to four standard deviations of the count; no two share a draw."""
    model, tokens = watched_fusion(PLAIN, 0).train(), make_tokens(PLAIN)
    packed = starts_of([0, 4], LENGTH).expand(ROWS, -1)
    for share, starts, borders in ((1.0, None, [0, LENGTH]), (0.5, None, [0, LENGTH]), (1.0, packed, [0, 4, LENGTH])):
        run = solver("unrolled", passes=3, prefix=share)
        plain = torch.stack([plain_prefixes(model, run, tokens, starts) for _ in range(80)])
        documents = [plain[..., begin:end].sum(dim=-1) for begin, end in pairwise(borders)]
        for lengths, (begin, end) in zip(documents, pairwise(borders), strict=True):
            counts = lengths.flatten().bincount()[1:]
            assert len(counts) == share * (end - begin)
            expected = lengths.numel() / len(counts)
            assert bool(((counts - expected).abs() < 4 * expected**0.5).all()), counts
            for one, other in ((lengths[:, 0], lengths[:, 1]), (lengths[..., 0], lengths[..., 1])):
                assert float((one == other).double().mean()) < 3 / len(counts), "drawn together"
        if len(documents) > 1:
            assert abs(float(torch.corrcoef(torch.stack(documents).flatten(1).double())[0, 1])) < 0.2


@torch.no_grad()
def test_prefixes_are_for_training_alone():
    model, tokens = make_model(FBT, replace(PLAIN, jitter=0.0)), make_tokens(PLAIN)
    mixing, all_fed = (solver("unrolled", passes=3, prefix=share) for share in (1.0, 0.0))
    assert torch.equal(mixing.run(model, tokens).states, all_fed.run(model, tokens).states)
    model.train()
    assert not torch.equal(mixing.run(model, tokens).states, all_fed.run(model, tokens).states)


# ---------------------------------------------------------------- losses and gradients


@pytest.mark.parametrize("strength", [1.0, 0.3])
@pytest.mark.parametrize("passes", [1, 2, 3, 5, LENGTH + 2])
def test_the_loss_is_that_of_the_plain_pass_and_the_mean_of_the_fed(passes, strength):
    """L1; L1 + L2; L1 + (L2 + L3) / 2; lambda weighs what is behind the plus."""
    for seed in SEEDS:
        model, tokens = model_and_tokens(FBT, seed)
        run = solver("unrolled", passes=passes, loss="plain_and_fed", fed_loss_weight=strength)
        found = sum(weight * token_loss(model, states, tokens) for states, weight in run.run(model, tokens).loss_terms)
        inputs = prepared(model, tokens)
        states = [model.advance(inputs, None)[0]]
        for _ in range(passes - 1):
            states.append(fed_pass(model, inputs, states[-1]))
        first, *others = (token_loss(model, each, tokens) for each in states)
        expected = first + strength * (sum(others) / len(others) if others else 0)
        assert_close(found, expected, "loss")
        assert relative(gradient_vector(model, found), gradient_vector(model, expected)) < 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_pass_is_reached_through_the_feedback_edge_alone(variant):
    """From the second pass's states, at all positions that have a next in their document; not where it is cut."""
    for seed in SEEDS:
        model, tokens = watched_fusion(VARIANTS[variant], seed), make_tokens(VARIANTS[variant], seed)
        for starts in (None, make_starts(seed)):
            has_next = torch.cat([~begins(starts)[:, 1:], torch.zeros(ROWS, 1, dtype=torch.bool)], dim=1)
            for detach in (False, True):
                model.calls.clear()
                states = solver("unrolled", passes=2, detach_passes=detach).run(model, tokens, starts).states
                first = model.calls[0][2]
                (found,) = torch.autograd.grad(loss_of(model.readout(states), seed), first, allow_unused=True)
                if detach:
                    assert found is None
                else:
                    assert torch.equal((found != 0).any(dim=-1), has_next)
            # The same edge, cut by hand.
            inputs = prepared(model, tokens, starts)
            held = model.advance(inputs, None)[0].detach().requires_grad_()
            feedback = shifted(model, held, model.initial_feedback(ROWS), inputs)
            by_hand = loss_of(model.readout(model.advance(inputs, feedback)[0]), seed)
            cut = gradient_vector(model, by_hand)
            assert relative(gradient_vector(model, loss_of(model.readout(states), seed)), cut) < 1e-13


# ---------------------------------------------------------------- jitter

JITTERED = {
    name: run for name, run in FEEDING_SOLVERS.items() if name in ("chunked1", "chunked3", "unrolled3", "interleaved2")
}


def noise_of(model, run, tokens):
    """Return what was added to the states on their way to the fusion, one row for each call."""
    model.fused.clear()
    model.calls.clear()
    run.run(model, tokens)
    fed = [feedback.states for _, feedback, *_ in model.calls if feedback is not None]
    return [(seen - states).flatten() for seen, states in zip(model.fused, fed, strict=True)]


@pytest.mark.parametrize("run", JITTERED.values(), ids=JITTERED)
@pytest.mark.parametrize("size", [0.02, 0.5])
@torch.no_grad()
def test_jitter_is_in_training_alone_and_even_within_its_size(run, size):
    for seed in SEEDS:
        model, tokens = watched_fusion(replace(PLAIN, jitter=size), seed), make_tokens(PLAIN, seed, rows=20)
        assert model.draws
        assert not any(bool(noise.any()) for noise in noise_of(model, run, tokens))
        model.train()
        noises = noise_of(model, run, tokens)
        assert len(noises) >= 2
        noise = torch.cat(noises) / size
        assert float(noise.abs().max()) <= 1 + 1e-12
        # Uniform on -1 .. 1: mean 0, mean square 1/3 with variance 4/45, up to five standard deviations.
        assert abs(float(noise.mean())) < 5 * (1 / 3 / len(noise)) ** 0.5
        assert abs(float(noise.square().mean()) - 1 / 3) < 5 * (4 / 45 / len(noise)) ** 0.5
        for one, other in pairwise(noises):
            shortest = min(len(one), len(other))
            assert float((one[:shortest] - other[:shortest]).abs().max()) > 0.5 * size, "two passes share a draw"
        again = torch.cat(noise_of(model, run, tokens)) / size
        assert float((again - noise).abs().max()) > 0.5, "two calls share a draw"


@pytest.mark.parametrize("run", JITTERED.values(), ids=JITTERED)
@torch.no_grad()
def test_without_jitter_training_is_evaluation(run):
    model, tokens = watched_fusion(replace(PLAIN, jitter=0.0), 0), make_tokens(PLAIN)
    assert not model.draws
    expected = run.run(model, tokens).states
    assert torch.equal(run.run(model.train(), tokens).states, expected)


@torch.no_grad()
def test_jitter_leaves_the_plain_pass_and_first_positions_alone():
    for seed in SEEDS:
        model, tokens = make_model(FBT, replace(PLAIN, jitter=0.5), seed), make_tokens(PLAIN, seed)
        starts = make_starts(seed)
        reference = PARALLEL.run(model, tokens, starts).states
        model.train()
        assert torch.equal(PARALLEL.run(model, tokens, starts).states, reference)
        first, second = passes_of(model, tokens, 2, starts)
        assert torch.equal(first, reference)
        moved = (second - solver("unrolled", passes=2).run(model.eval(), tokens, starts).states).abs().amax(dim=-1) > 0
        assert torch.equal(moved, ~begins(starts))


# ---------------------------------------------------------------- no way past the state

TOKENLESS = [
    name
    for name, config in VARIANTS.items()
    if not (config.residual_scalars or config.value_embeddings or config.norm == "layer")
]


def others_of(tokens, position):
    """Return the tokens with another at one position."""
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % PLAIN.vocab_size
    return changed


@pytest.mark.parametrize("variant", TOKENLESS)
@torch.no_grad()
def test_a_zero_value_path_leaves_nothing_of_the_token(variant):
    """Zero enters the stack; only the first token makes a difference."""
    for seed in SEEDS[:2]:
        model, tokens = watched_fusion(VARIANTS[variant], seed), make_tokens(VARIANTS[variant], seed)
        model.fusion.value.weight.zero_()
        for run in (EXACT, solver("unrolled", passes=2), solver("interleaved", subsets=LENGTH)):
            model.calls.clear()
            model.entered.clear()
            states = run.run(model, tokens).states
            zeros = 0
            for (inputs, feedback, *_), entered in zip(model.calls, model.entered, strict=True):
                if feedback is not None:
                    fed = inputs.index[0] > 0
                    assert not bool(entered[:, fed].any())
                    zeros += int(fed.sum())
            assert zeros == LENGTH - 1
            for position in (0, 1, 5, LENGTH - 1):
                changed = run.run(model, others_of(tokens, position)).states
                assert torch.equal(changed, states) is (position > 0), position


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_token_is_a_gate_alone(variant):
    """With equal gates its identity is lost, unless embeddings enter the blocks by another way."""
    config = VARIANTS[variant]
    bypass = config.residual_scalars or config.value_embeddings
    for seed in SEEDS[:2]:
        model, tokens = model_and_tokens(FBT, seed, variant)
        model.fusion.gate.weight.zero_()
        states = EXACT.run(model, tokens).states
        fed = solver("unrolled", passes=2).run(model, tokens).states
        for position in (0, 1, 5, LENGTH - 1):
            changed = others_of(tokens, position)
            assert torch.equal(EXACT.run(model, changed).states, states) is (position > 0 and not bypass)
            # A pass is fed what the one before made of the tokens, so that the states behind know of it.
            alike = solver("unrolled", passes=2).run(model, changed).states == fed
            assert bool(alike[:, position].all()) is (position > 0 and not bypass)
            assert position + 1 == LENGTH or not bool(alike[:, position + 1].all())


# ---------------------------------------------------------------- modes of decoding


def decode(run, model, tokens, prompt):
    """Return the states of a prompt computed in one call, and of what follows token by token."""
    carry, found = run.new_carry(model, ROWS), []
    for part in (tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)):
        solution = run.run(model, part, carry=carry)
        carry = solution.carry
        found.append(solution.states)
    return torch.cat(found, dim=1)


def after_a_plain_prompt(model, tokens, prompt):
    """Yield what soft decoding must find: the recurrence with the prompt as its plain prefix."""
    plain = PARALLEL.run(model, tokens).states
    yield plain[:, :prompt]
    yield steps(model, tokens, prompt)
    inputs, states = prepared(model, tokens), plain
    for _ in range(LENGTH - prompt):
        states = fed_pass(model, inputs, states, prompt)
    yield states  # the passes' fixed point


def after_a_prompt_in_two_passes(model, tokens, prompt):
    """Yield what fused decoding must find."""
    inputs = prepared(model, tokens)
    start = inputs.cut(0, prompt, prompt)
    plain, _ = model.advance(start, None)
    feedback = shifted(model, plain, model.initial_feedback(ROWS), start)
    states, memory = model.advance(start, feedback, model.new_memory())
    expected = [states]
    for position in range(prompt, LENGTH):
        step = inputs.cut(position, position + 1, position + 1)
        state, memory = model.advance(step, Feedback(expected[-1][:, -1:]), memory)
        expected.append(state)
    yield torch.cat(expected, dim=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prompt", [2, 5, LENGTH - 1])
@pytest.mark.parametrize(
    ("passes", "by_hand"), [(1, after_a_plain_prompt), (2, after_a_prompt_in_two_passes)], ids=["soft", "fused"]
)
@torch.no_grad()
def test_decoding_is_a_prompt_in_some_passes_and_recurrent_steps(variant, prompt, passes, by_hand):
    for seed in SEEDS:
        model, tokens = model_and_tokens(FBT, seed, variant)
        found = decode(solver("unrolled", passes=passes), model, tokens, prompt)
        for expected in by_hand(model, tokens, prompt):
            assert_close(found[:, : expected.shape[1]], expected)
        other = decode(solver("unrolled", passes=3 - passes), model, tokens, prompt)
        assert bool(((found - other)[:, 1:].abs().amax(dim=-1) > 1e-6).all()), "the prompt's second pass does nothing"


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_standard_decoding_is_the_plain_transformers(variant):
    for seed in SEEDS:
        model, tokens = model_and_tokens(FBT, seed, variant)
        plain = plain_of(model)
        for prompt in (1, 5):
            found, expected = (decode(PARALLEL, each, tokens, prompt) for each in (model, plain))
            assert torch.equal(found, plain.readout_layer.norm(expected))
            assert torch.equal(model.readout(found), plain.readout(expected))


# ---------------------------------------------------------------- contraction


@torch.no_grad()
def test_thirty_passes_say_how_far_each_moved_the_states():
    length, passes = 40, 30
    for seed in SEEDS:
        model, tokens = model_and_tokens(FBT, seed, length=length)
        found = solver("unrolled", passes=passes).run(model, tokens).residuals
        assert found.shape == (passes - 1,)
        inputs, states = prepared(model, tokens), PARALLEL.run(model, tokens).states
        for residual in found.tolist():
            after = fed_pass(model, inputs, states)
            assert residual == pytest.approx(float((after - states).norm() / after.norm()), rel=1e-4, abs=1e-7)
            states = after


@torch.no_grad()
def test_passes_that_are_finished_leave_no_residual():
    for passes in (1, 2, LENGTH - 1, LENGTH, LENGTH + 1, 30):
        found = solver("unrolled", passes=passes).run(*model_and_tokens(FBT)).residuals
        assert (0 if found is None else len(found)) == min(passes, LENGTH) - 1


@torch.no_grad()
def test_where_little_is_fed_passes_contract():
    """Each moves the states less than the one before, down to rounding; a tolerance stops them on the way."""
    for seed in SEEDS:
        model, tokens = make_model(FBT, VARIANTS["layernorm"], seed), make_tokens(PLAIN, seed, length=40)
        model.fusion.norm.weight.mul_(0.1)  # its bias is the rest of what enters
        whole = solver("unrolled", passes=30).run(model, tokens).residuals
        assert float(whole[-1]) < 1e-6
        assert bool((whole[1:] < whole[:-1])[whole[1:] > 1e-5].all())
        early = solver("unrolled", passes=30, tolerance=1e-3).run(model, tokens).residuals
        assert len(early) == int((whole >= 1e-3).sum()) + 1
        assert torch.equal(early, whole[: len(early)])
