"""Subsets of positions in turn over shared keys and values: what they hold, see and train, and keys made anew."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.models import CRT, FBT, LRT, RLT, subset_memory
from pipeline.models.inputs import Inputs
from pipeline.solvers import Interleaved
from pipeline.solvers.interleaved import split
from pipeline.solvers.schedules import Mixture
from tests.models import oracles
from tests.models.cases import (
    LENGTH,
    PARALLEL,
    ROWS,
    SEEDS,
    assert_close,
    make_solver,
    make_starts,
    make_tokens,
    model_and_tokens,
    random,
    solver,
    solver_config,
    starts_of,
    watched,
)
from tests.models.contract import loss_of
from tests.solvers.cases import FEEDING, each_feeding, refused

REFRESHED = {"refresh_keys_values": True}
ORDERS = [(cls, subsets, {}) for cls in FEEDING for subsets in (2, 3, 5)] + [
    (LRT, subsets, REFRESHED) for subsets in (3, 4)
]
each_order = pytest.mark.parametrize(
    ("cls", "subsets", "changes"),
    ORDERS,
    ids=[f"{cls.__name__}-{subsets}{'-refreshed' if changes else ''}" for cls, subsets, changes in ORDERS],
)


def interleaved(subsets, **changes) -> Interleaved:
    return solver("interleaved", subsets=subsets, **changes)


# ---------------------------------------------------------------- subsets


@st.composite
def rows_at_hand(draw):
    """Positions of some rows, with documents at any place, at multiples of S, or without."""
    offset, length, subsets = draw(st.integers(0, 7)), draw(st.integers(1, 12)), draw(st.integers(1, 15))
    end, starts, rows = offset + length, None, draw(st.integers(1, 3))
    unit = draw(st.sampled_from([None, 1, subsets]))
    if unit is not None:
        borders = [draw(st.sets(st.integers(0, end // unit), max_size=4)) for _ in range(rows)]
        starts = torch.stack([starts_of([0, *(unit * each for each in sorted(row))], end)[offset:] for row in borders])
    index = torch.arange(offset, end)[None]
    values = {"index": index.expand(rows, -1), "one": index}
    return Inputs(index, starts, end, values), rows, offset, subsets


def slots_of(subset, row):
    """Return the slots of a row that hold a position."""
    count = subset.where.shape[-1]
    return [slot for slot in range(count) if subset.valid is None or bool(subset.valid[row, slot])]


@settings(max_examples=200)
@given(rows_at_hand())
def test_subsets_are_disjoint_and_leave_nothing_out(scene):
    """Subset i holds t mod S = i, counted from the document's start; they come in order, each row's ascending."""
    inputs, rows, offset, subsets = scene
    starts = torch.zeros(rows, inputs.length, dtype=torch.int64) if inputs.starts is None else inputs.starts
    found, before = [[] for _ in range(rows)], -1
    for subset in split(inputs, subsets, offset):
        numbers = set()
        for row in range(rows):
            places = subset.where.expand(rows, -1)[row].tolist()
            places = [places[slot] for slot in slots_of(subset, row)]
            assert places == sorted(places)
            numbers |= {(offset + place - int(starts[row, place])) % subsets for place in places}
            found[row] += places
        assert len(numbers) == 1, "a subset has one number, and at least one position"
        assert max(numbers) > before
        before = max(numbers)
    for row in range(rows):
        assert sorted(found[row]) == list(range(inputs.length))


@settings(max_examples=200)
@given(rows_at_hand())
def test_a_subset_has_its_own_inputs(scene):
    inputs, rows, offset, subsets = scene
    for subset in split(inputs, subsets, offset):
        part = subset.inputs
        assert part.length == subset.where.shape[-1]
        assert (part.valid is None) == (subset.valid is None)
        for row in range(rows):
            slots = slots_of(subset, row)
            where = subset.where.expand(rows, -1)[row, slots]
            index = (where + offset).tolist()
            for name in ("index", "one"):
                assert part.values[name].expand(rows, -1)[row, slots].tolist() == index
            assert part.index.expand(rows, -1)[row, slots].tolist() == index
            assert max(index, default=-1) < part.stop <= inputs.stop
            if inputs.starts is not None:
                assert torch.equal(part.starts[row, slots], inputs.starts[row, where])


@settings(max_examples=100)
@given(rows_at_hand())
def test_values_go_into_a_subset_and_out_of_it(scene):
    inputs, rows, offset, subsets = scene
    values = torch.randn(rows, inputs.length, 2, generator=random(0), dtype=torch.float64)
    rebuilt, covered = torch.zeros_like(values), torch.zeros(rows, inputs.length, dtype=torch.int64)
    for subset in split(inputs, subsets, offset):
        chosen = subset.mask(rows, inputs.length)
        covered += chosen
        taken = subset.of(values)
        assert taken.shape == (rows, subset.where.shape[-1], 2)
        for row in range(rows):
            slots = slots_of(subset, row)
            assert torch.equal(taken[row, slots], values[row, subset.where.expand(rows, -1)[row, slots]])
        replaced = subset.into(values, -taken)
        assert torch.equal(replaced, torch.where(chosen[..., None], -values, values))
        rebuilt = subset.into(rebuilt, taken)
    assert bool((covered == 1).all())
    assert torch.equal(rebuilt, values)


# ---------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("cls", "variant"), [(cls, variant) for cls in FEEDING for variant in cls.variants()], ids=lambda each: str(each)
)
@torch.no_grad()
def test_one_subset_is_two_passes(cls, variant):
    """To the last bit, whatever lies in the memory beside them."""
    model, tokens = model_and_tokens(cls, variant=variant)
    for starts in (None, make_starts(0)):
        found = interleaved(1).run(model, tokens, starts).states
        assert torch.equal(found, solver("unrolled", passes=2).run(model, tokens, starts).states)


@pytest.mark.parametrize(
    ("cls", "variant"), [(cls, variant) for cls in FEEDING for variant in cls.variants()], ids=lambda each: str(each)
)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_attention_subset_by_subset_changes_nothing(monkeypatch, cls, variant, packed):
    """Over long rows attention goes by parts; documents, windows and dropout go on with a mask."""
    model, tokens = model_and_tokens(cls, variant=variant)
    starts = starts_of([0, 6], LENGTH).expand(ROWS, -1) if packed else None
    found = {}
    for long in (1, LENGTH):
        monkeypatch.setattr(subset_memory, "LONG", long)
        model.zero_grad()
        states = interleaved(2).run(model, tokens, starts).states
        (states * torch.randn(states.shape, generator=random(1), dtype=states.dtype)).mean().backward()
        found[long] = {"states": states.detach(), **{name: each.grad for name, each in model.named_parameters()}}
    for name, expected in found[LENGTH].items():
        assert (expected is None) == (found[1][name] is None)
        if expected is not None:
            assert_close(found[1][name], expected, name)


@each_order
@torch.no_grad()
def test_terms(cls, subsets, changes):
    """The plain pass, to the last bit, counts as one of S + 1, the refined states as the others."""
    model, tokens = model_and_tokens(cls)
    for starts in (None, make_starts(0)):
        for run in (interleaved(subsets, **changes), interleaved(1), interleaved(5 * LENGTH)):
            solution = run.run(model, tokens, starts)
            first, refined = solution.terms
            assert torch.equal(first[0], PARALLEL.run(model, tokens, starts).states)
            assert refined[0] is solution.states
            assert first[1] == pytest.approx(1 / (run.subsets + 1))
            assert refined[1] == pytest.approx(run.subsets / (run.subsets + 1))
            assert solution.penalty is None


@pytest.mark.parametrize("subsets", [1, 2, 3, 5, LENGTH, 50])
@torch.no_grad()
def test_subsets_are_fed_the_latest_states(subsets):
    """Of a position in an earlier subset that is its final one, of others the plain pass's."""
    model, tokens = watched(CRT, CRT.variants()["plain"]), make_tokens(CRT.variants()["plain"])
    solution = interleaved(subsets).run(model, tokens)
    plain, final = solution.terms[0][0], solution.states
    fed_calls = [(inputs.index[0].tolist(), fed.states) for inputs, fed, *_ in model.calls if fed is not None]
    assert [index for index, _ in fed_calls] == [
        list(range(number, LENGTH, subsets)) for number in range(min(subsets, LENGTH))
    ]
    for number, (index, fed) in enumerate(fed_calls):
        for slot, position in enumerate(index):
            if position == 0:
                expected = torch.zeros_like(final[:, 0])
            else:
                expected = (final if (position - 1) % subsets < number else plain)[:, position - 1]
            assert torch.equal(fed[:, slot], expected), f"position {position}"


@each_feeding
@torch.no_grad()
def test_residual(cls):
    """How far all subsets together moved what is fed back."""
    model, tokens = model_and_tokens(cls)
    for starts in (None, make_starts(0)):
        solution = interleaved(3).run(model, tokens, starts)
        before, after = (model.fed_back(states) for states, _ in solution.terms)
        expected = ((after - before).square().mean() / after.square().mean()).sqrt()
        assert (solution.residuals.shape, solution.residuals.dtype) == ((1,), torch.float64)
        # The sum of so many squares is off by no more than their number of units in the last place.
        assert float(solution.residuals) == pytest.approx(float(expected), rel=after.numel() * 2**-52)


# ---------------------------------------------------------------- who sees whom


def attention_to_embeddings(model, run, tokens, starts):
    """Return for both terms which embeddings [t, u] reach the state of position t, in some row, by their gradients."""
    embedded = []
    hook = model.embedding.register_forward_hook(lambda module, arguments, output: embedded.append(output))
    terms = run.run(model, tokens, starts).terms
    hook.remove()
    (embedding,) = embedded
    found = []
    for states, _ in terms:
        reached = []
        for position in range(LENGTH):
            gradient = torch.autograd.grad(states[:, position].sum(), embedding, retain_graph=True)[0]
            reached.append(gradient.abs().amax(dim=-1) > 0)
        found.append(torch.stack(reached, dim=1))
    return found


@each_order
@pytest.mark.parametrize("packed", [False, True])
def test_nobody_sees_what_lies_ahead(cls, subsets, changes, packed):
    """Keys of later positions lie in the same buffer; exactly those of the document so far are read."""
    model, tokens = model_and_tokens(cls)
    starts = make_starts(0) if packed else None
    begins = torch.zeros(ROWS, LENGTH, dtype=torch.int64) if starts is None else starts
    here = torch.arange(LENGTH)
    allowed = (here[None, None] <= here[None, :, None]) & (here[None, None] >= begins[..., None])
    for reached in attention_to_embeddings(model, interleaved(subsets, **changes), tokens, starts):
        assert not bool((reached & ~allowed).any()), "a state depends on what it must not see"
        assert bool(reached[allowed].all()), "a state depends on all of its document so far"


@each_order
@torch.no_grad()
def test_a_token_changes_nothing_before_it(cls, subsets, changes):
    """To the last bit: not through the buffers either, in which its keys take the place of others'."""
    model, tokens, run = *model_and_tokens(cls), interleaved(subsets, **changes)
    for starts in (None, make_starts(1)):
        before = run.run(model, tokens, starts)
        for position in (1, 4, 7, LENGTH - 1):
            changed = tokens.clone()
            changed[:, position] = (changed[:, position] + 1) % model.config.vocab_size
            after = run.run(model, changed, starts)
            for (one, _), (other, _) in zip(before.terms, after.terms, strict=True):
                assert torch.equal(one[:, :position], other[:, :position])
                assert bool(((one - other)[:, position].abs().amax(dim=-1) > 1e-6).all())


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("variant", LRT.variants())
@pytest.mark.parametrize(("subsets", "changes"), [(1, {}), (2, {}), (3, {}), (3, REFRESHED)], ids=str)
@pytest.mark.parametrize("which", ["refined", "all"])
def test_gradients_reach_what_the_state_enters_through(variant, subsets, changes, which):
    model, tokens = model_and_tokens(LRT, variant=variant)
    solution = interleaved(subsets, **changes).run(model, tokens)
    terms = solution.terms if which == "all" else solution.terms[1:]
    sum(weight * loss_of(model.readout(states), 0) for states, weight in terms).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        if name.startswith(("recurrent.", "source_norm.")) or "memory_" in name:
            assert float(parameter.grad.abs().max()) > 1e-9, name
    recurrent = [name for name, _ in model.named_parameters() if name.startswith("recurrent.")]
    assert len(recurrent) == (model.config.layers if model.config.recurrent_projection == "layerwise" else 1)


@each_feeding
def test_every_parameter_gets_a_gradient(cls):
    for seed in SEEDS:
        model, tokens = model_and_tokens(cls, seed)
        for starts in (None, make_starts(seed)):
            model.zero_grad(set_to_none=True)
            loss_of(model.readout(interleaved(2).run(model, tokens, starts).states), seed).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                assert bool(parameter.grad.any()), name


# ---------------------------------------------------------------- keys and values made anew


@pytest.mark.parametrize("variant", LRT.variants())
@torch.no_grad()
def test_refreshing_matters_from_three_subsets_on(variant):
    """With two, all keys that were made anew are computed again before anybody reads them."""
    model, tokens = model_and_tokens(LRT, variant=variant)
    for starts in (None, make_starts(0)):
        for subsets in (1, 2):
            found = interleaved(subsets, **REFRESHED).run(model, tokens, starts).states
            assert_close(found, interleaved(subsets).run(model, tokens, starts).states)
    for subsets in (3, 4, 5):
        config = solver_config("interleaved", subsets=subsets, **REFRESHED)
        for starts in (None, make_starts(0)):
            found = make_solver(config).run(model, tokens, starts).states
            assert_close(found, oracles.states(model.state_dict(), model.config, tokens, config, starts))
        apart = (make_solver(config).run(model, tokens).states - interleaved(subsets).run(model, tokens).states).abs()
        # After the plain pass keys hold no state. The second subset is the first to read some that were made anew: its
        # second position sees the third subset's first. What is computed after that follows, the first subset is over.
        moved = [position > subsets and position % subsets != 0 for position in range(LENGTH)]
        assert (apart.amax(dim=(0, 2)) > 1e-9).tolist() == moved


@pytest.mark.parametrize("capacity", [None, LENGTH])
@torch.no_grad()
def test_what_is_carried_on_was_made_anew(capacity):
    """With two subsets the states are the same, and what decoding reads is not."""
    model, tokens = model_and_tokens(LRT)
    prompt = 7
    found = {}
    for changes in ({}, REFRESHED):
        run = interleaved(2, **changes)
        carry = run.new_carry(model, ROWS, capacity=capacity)
        solution = run.run(model, tokens[:, :prompt], carry=carry)
        states = [solution.states]
        for position in range(prompt, LENGTH):
            solution = run.run(model, tokens[:, position : position + 1], carry=solution.carry)
            states.append(solution.states)
        found[bool(changes)] = torch.cat(states, dim=1)
        expected = oracles.decoded_states(model.state_dict(), model.config, tokens, run.config, prompt)
        assert_close(found[bool(changes)], expected)
        assert solution.carry.memory.keys() == carry.memory.keys(), "what refreshing needs is not carried on"
    assert_close(found[True][:, :prompt], found[False][:, :prompt])
    assert bool(((found[True] - found[False])[:, prompt:].abs().amax(dim=(0, 2)) > 1e-9).all())


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"subsets": 0}, "solver.subsets is 0; a number of subsets is a whole number from 1 on"),
        ({"subsets": -3}, "solver.subsets is -3"),
        ({"subsets": 1.5}, "solver.subsets is 1.5"),
        ({"subsets": True}, "solver.subsets is True"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(changes, words):
    with refused(words):
        solver_config("interleaved", **changes).check()


def test_refreshing_needs_keys_with_a_part_of_the_state_in_them():
    config = solver_config("interleaved", **REFRESHED)
    Interleaved.check_fits(config, LRT)
    for cls in (CRT, FBT, RLT):
        with pytest.raises(ConfigError, match=r"refresh_keys_values is set.*no separate part of keys") as caught:
            Interleaved.check_fits(config, cls)
        assert "\n" not in str(caught.value)
        model, tokens = model_and_tokens(cls)
        with pytest.raises(NotImplementedError, match=f"{cls.__name__} cannot make keys and values anew"):
            make_solver(config).run(model, tokens)


def test_schedules():
    config = solver_config("interleaved")
    Interleaved.check_schedules(config, {"subsets": [(0, 2), (0.5, Mixture((2, 3, 4), (1.0, 1.0, 2.0)))]})
    for stages, words in (
        ([(0, Mixture((2, 0), (1.0, 1.0)))], "schedules.subsets: value is 0; a number of subsets"),
        ([(0, 2.0)], "schedules.subsets: value is 2.0"),
    ):
        with refused(words):
            Interleaved.check_schedules(config, {"subsets": stages})
    with pytest.raises(ConfigError, match=r"schedules\.refresh_keys_values.*it has: subsets"):
        Interleaved.check_schedules(config, {"refresh_keys_values": [(0, True)]})


@torch.no_grad()
def test_subsets_may_change_between_calls():
    model, tokens = model_and_tokens(CRT)
    solver = interleaved(2)
    for subsets in (3, 1, 50):
        solver.subsets = subsets
        found, expected = solver.run(model, tokens), interleaved(subsets).run(model, tokens)
        assert torch.equal(found.states, expected.states)
        assert [weight for _, weight in found.terms] == [weight for _, weight in expected.terms]
    assert solver.feeding


def test_settings_of_the_configuration_stay():
    solver = interleaved(2)
    solver.subsets = 5
    assert solver.settings() == {"subsets": 5}
    assert solver.config == solver_config("interleaved", subsets=2)
