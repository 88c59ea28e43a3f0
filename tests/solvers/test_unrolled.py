"""Whole passes: which of them are trained, what stops gradients and passes, prefixes, what is left out as finished."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.errors import ConfigError
from pipeline.models import CRT, FBT, LRT, RLT, Feedback
from pipeline.solvers import Unrolled
from pipeline.solvers.schedules import Mixture
from tests.models import oracles
from tests.models.cases import (
    LENGTH,
    ROWS,
    SEEDS,
    assert_close,
    make_model,
    make_starts,
    make_tokens,
    model_and_tokens,
    prepared,
    solver,
    solver_config,
    starts_of,
    tolerance,
)
from tests.models.contract import assert_gradients_close, exact_prefix, loss_of
from tests.solvers.cases import FEEDING, each_feeding, refused

PLAIN = CRT.variants()["plain"]
unrolled = partial(solver, "unrolled")


def objective(model, solution, seed=0):
    """Return what is trained: the weighted losses of all terms, and the penalty."""
    total = sum(weight * loss_of(model.readout(states), seed) for states, weight in solution.loss_terms)
    return total if solution.penalty is None else total + solution.penalty


def gradients_of(model, value):
    """Return the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    value.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def leave_nothing_out(monkeypatch):
    """Let finished positions never be worth leaving out."""
    monkeypatch.setattr("pipeline.solvers.unrolled.FREEZE_SHARE", math.inf)


def within(value, expected, deviations=5):
    """Return whether a count is as near its binomial expectation as so many standard deviations: (number, share)."""
    number, share = expected
    return abs(value - number * share) <= deviations * (number * share * (1 - share)) ** 0.5


def is_uniform(counts):
    """Return whether counts fit equal probabilities: chi-square no more than six deviations above its mean."""
    counts = torch.tensor(counts, dtype=torch.float64).flatten()
    expected, freedom = counts.mean(), len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()) <= freedom + 6 * (2 * freedom) ** 0.5


# ---------------------------------------------------------------- which passes are trained

WEIGHTS = [
    ({"passes": 1}, [1]),
    ({"passes": 3}, [0, 0, 1]),
    ({"passes": 1, "loss": "mean"}, [1]),
    ({"passes": 4, "loss": "mean"}, [1 / 4] * 4),
    ({"passes": 3, "loss": "weighted", "loss_weights": [1, 0, 3]}, [1 / 4, 0, 3 / 4]),
    ({"passes": 2, "loss": "weighted", "loss_weights": [0.0, 0.1]}, [0, 1]),
    ({"passes": 1, "loss": "plain_and_fed", "fed_loss_weight": 0.6}, [1]),
    ({"passes": 2, "loss": "plain_and_fed"}, [1, 1]),
    ({"passes": 4, "loss": "plain_and_fed", "fed_loss_weight": 0.6}, [1, 0.2, 0.2, 0.2]),
]


@pytest.mark.parametrize(("settings", "expected"), WEIGHTS, ids=str)
def test_weights_of_the_passes(settings, expected):
    """Where fewer passes are run, the last of them stands for all that were left out."""
    solver, passes = unrolled(**settings), settings["passes"]
    assert solver.weights(passes) == pytest.approx(expected)
    for run in range(1, passes + 1):
        assert solver.weights(run) == pytest.approx([*expected[: run - 1], sum(expected[run - 1 :])])


@pytest.mark.parametrize(("settings", "expected"), WEIGHTS, ids=str)
@torch.no_grad()
def test_terms_are_the_passes(settings, expected):
    """Of the passes before the last, only those with a weight are kept."""
    model, tokens = model_and_tokens(CRT)
    solution = unrolled(**settings).run(model, tokens)
    trained = [(number, weight) for number, weight in enumerate(expected, start=1) if weight]
    assert len(solution.loss_terms) == len(trained)
    for (states, weight), (number, share) in zip(solution.loss_terms, trained, strict=True):
        assert weight == pytest.approx(share)
        assert_close(states, unrolled(passes=number).run(model, tokens).states, f"pass {number}")
    assert solution.loss_terms[-1][0] is solution.states


@each_feeding
@pytest.mark.parametrize(("settings", "expected"), WEIGHTS[3:], ids=str)
def test_a_short_row_has_the_objective_of_all_passes(cls, settings, expected, monkeypatch):
    """Passes that would change nothing are not run; loss and gradients are as if they were."""
    model, tokens = model_and_tokens(cls)
    solver = unrolled(**settings)
    for length in (1, 2, 3):
        solution = solver.run(model, tokens[:, :length])
        assert sum(weight for _, weight in solution.loss_terms) == pytest.approx(sum(expected))
        found = objective(model, solution)
        with monkeypatch.context() as patch:
            leave_nothing_out(patch)
            whole = solver.run(model, tokens[:, :length])
        assert len(whole.loss_terms) == sum(weight > 0 for weight in expected)
        reference = objective(model, whole)
        assert_close(found, reference, "objective")
        assert_gradients_close(gradients_of(model, found), gradients_of(model, reference))


def test_passes_that_change_nothing_are_not_run():
    model, tokens = model_and_tokens(CRT)
    calls = count_calls(model)
    for length in (2, 3, LENGTH):
        del calls[:]
        solution = unrolled(passes=100, loss="mean").run(model, tokens[:, :length])
        assert len(calls) == len(solution.terms) == length + 1
        assert len(solution.residuals) == length
        assert [weight for _, weight in solution.terms] == pytest.approx([0.01] * length + [1 - 0.01 * length])


def count_calls(model):
    """Note in the list returned how many positions each ``advance`` of the model computes."""
    calls, advance = [], model.advance

    def counted(inputs, feedback, memory=None):
        calls.append(inputs.length)
        return advance(inputs, feedback, memory)

    model.advance = counted
    return calls


# ---------------------------------------------------------------- gradients between passes


@each_feeding
@pytest.mark.parametrize("seed", SEEDS)
def test_detached_passes_are_fed_constants(cls, seed):
    """The last pass alone has gradients, and every parameter still gets one."""
    model, tokens = model_and_tokens(cls, seed)
    solution = unrolled(passes=3, detach_passes=True).run(model, tokens)
    whole = unrolled(passes=3).run(model, tokens)
    assert torch.equal(solution.states, whole.states)
    found = gradients_of(model, loss_of(model.readout(solution.states), seed))
    for name, parameter in model.named_parameters():
        assert name in found, f"{name} has no gradient"
        assert bool(found[name].any()), name
        assert parameter.grad.isfinite().all()

    before = unrolled(passes=2).run(model, tokens).states.detach()
    inputs = prepared(model, tokens)
    first = model.initial_feedback(ROWS)
    fed = torch.cat([first.states, model.fed_back(before[:, :-1])], dim=1)
    mask = None
    if first.fed is not None:
        mask = torch.cat([first.fed, torch.ones(1, LENGTH - 1, 1, dtype=torch.bool)], dim=1)
    states, _ = model.advance(inputs, Feedback(fed, mask))
    assert_gradients_close(found, gradients_of(model, loss_of(model.readout(states), seed)))
    through = gradients_of(model, loss_of(model.readout(whole.states), seed))
    apart = max(float((found[name] - through[name]).norm() / through[name].norm()) for name in found)
    assert apart > 1e-3, "without detaching there is more to the gradient"


@each_feeding
@pytest.mark.parametrize("detached", [True, False])
def test_detaching_cuts_every_pass_from_the_one_before(cls, detached, monkeypatch):
    leave_nothing_out(monkeypatch)  # a finished position's state is that of the pass before
    model, tokens = model_and_tokens(cls)
    terms = unrolled(passes=5, loss="mean", detach_passes=detached).run(model, tokens).terms
    for (before, _), (after, _) in pairwise(terms):
        through = torch.autograd.grad(after.sum(), before, retain_graph=True, allow_unused=True)[0]
        assert (through is None or not through.any()) == detached


# ---------------------------------------------------------------- prefixes that stay plain


class Watched(CRT):
    """Notes which positions are fed in every pass after the first."""

    def advance(self, inputs, feedback, memory=None):
        if feedback is not None:
            shape = (feedback.states.shape[0], inputs.length)
            fed = torch.ones(shape, dtype=torch.bool) if feedback.fed is None else feedback.fed[..., 0].expand(shape)
            self.fed.append(fed)
        return super().advance(inputs, feedback, memory)


def watched(**changes):
    model = make_model(Watched, replace(PLAIN, **changes))
    model.fed = []
    return model.train()


def documents_of(starts):
    """Yield row, begin and end of every document."""
    for row, begins in enumerate(starts.tolist()):
        for begin, end in oracles.document_borders(begins):
            yield row, begin, end


def boundaries(fed, starts):
    """Return of each document how many positions stay plain, which must be its first, as {(row, begin): number}."""
    found = {}
    for row, begin, end in documents_of(starts):
        plain = (~fed[row, begin:end]).tolist()
        count = sum(plain)
        assert plain == [True] * count + [False] * (end - begin - count), f"plain positions are scattered: {plain}"
        found[row, begin] = count
    return found


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.01])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_a_prefix_of_every_document_stays_plain(share, packed):
    """From one position up to the share of it, rounded up; in each pass anew."""
    model = watched()
    solver = unrolled(passes=4, prefix=share)
    for seed in range(10):
        starts = make_starts(seed) if packed else torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        del model.fed[:]
        solver.run(model, make_tokens(PLAIN, seed), starts if packed else None)
        assert len(model.fed) == 3
        for fed in model.fed:
            found = boundaries(fed, starts)
            for row, begin, end in documents_of(starts):
                assert 1 <= found[row, begin] <= max(1, -(-(end - begin) * share // 1))
                if share == 0.5:
                    assert found[row, begin] <= (end - begin) / 2 + 1


@torch.no_grad()
def test_boundaries_are_drawn_for_every_pass_and_row():
    model, rows = watched(), 64
    unrolled(passes=4, prefix=1.0).run(model, make_tokens(PLAIN, rows=rows))
    draws = [fed.sum(dim=1).tolist() for fed in model.fed]
    assert all(len(set(each)) > LENGTH / 2 for each in draws), "rows have boundaries of their own"
    for one in range(3):
        for other in range(one):
            same = sum(a == b for a, b in zip(draws[one], draws[other], strict=True))
            assert within(same, (rows, 1 / LENGTH)), "passes have boundaries of their own"


@pytest.mark.parametrize(("share", "most"), [(1.0, 6), (0.5, 3), (0.34, 3), (0.2, 2)])
@torch.no_grad()
def test_boundaries_are_uniform(share, most):
    model, rows = watched(layers=1), 3000
    unrolled(passes=2, prefix=share).run(model, make_tokens(PLAIN, rows=rows, length=6))
    plain = 6 - model.fed[0].sum(dim=1)
    counts = [int((plain == number).sum()) for number in range(1, most + 1)]
    assert sum(counts) == rows
    assert is_uniform(counts), counts


@torch.no_grad()
def test_documents_of_a_row_have_boundaries_of_their_own():
    model, rows = watched(layers=1), 3000
    starts = starts_of([0, 3, 4], 7).expand(rows, -1)
    unrolled(passes=2, prefix=1.0).run(model, make_tokens(PLAIN, rows=rows, length=7), starts)
    fed = model.fed[0]
    assert not fed[:, 3].any(), "a document of one position stays plain"
    first, last = 3 - fed[:, :3].sum(dim=1), 3 - fed[:, 4:].sum(dim=1)
    counts = [[int(((first == a) & (last == b)).sum()) for b in (1, 2, 3)] for a in (1, 2, 3)]
    assert sum(map(sum, counts)) == rows
    assert is_uniform(counts), counts


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_positions_of_the_prefix_are_those_of_the_plain_pass(packed):
    model, tokens, starts = watched(), make_tokens(PLAIN), make_starts(0) if packed else None
    solution = unrolled(passes=3, prefix=0.7, loss="mean").run(model, tokens, starts)
    plain = solution.terms[0][0]
    fed_all = unrolled(passes=2).run(model, tokens, starts).states
    for fed, (states, _) in zip(model.fed, solution.terms[1:], strict=False):
        assert_close(states[~fed], plain[~fed])
        moved = (states - plain).abs().amax(dim=-1)
        assert bool((moved[fed] > 1e-6).all()), "the others are fed something"
    first, states = model.fed[0], solution.terms[1][0]
    differs = first & ((~first).cumsum(dim=1) > 0)  # some position that it sees stayed plain
    assert float((states - fed_all)[differs].abs().amax()) > 1e-6


@each_feeding
@torch.no_grad()
def test_only_training_has_prefixes(cls):
    model, tokens = model_and_tokens(cls)
    for starts in (None, make_starts(0)):
        mixed, whole = unrolled(passes=3, prefix=1.0), unrolled(passes=3)
        assert torch.equal(mixed.run(model.eval(), tokens, starts).states, whole.run(model, tokens, starts).states)
        apart = mixed.run(model.train(), tokens, starts).states - whole.run(model.eval(), tokens, starts).states
        assert float(apart.abs().max()) > 1e-6


@torch.no_grad()
def test_the_same_seed_draws_the_same():
    model, tokens, solver = watched(), make_tokens(PLAIN), unrolled(passes=3, prefix=1.0)
    found = []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        found.append((solver.run(model, tokens).states, torch.stack(model.fed[-2:])))
    assert torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[0][1], found[2][1])
    assert not torch.equal(found[0][1], found[1][1])


def test_no_share_draws_nothing():
    model, tokens = watched(), make_tokens(PLAIN)
    before = torch.get_rng_state()
    unrolled(passes=3).run(model, tokens)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(fed.all() for fed in model.fed)


# ---------------------------------------------------------------- stopping early

MANY = 8


def direct_residuals(model, tokens, passes, starts=None):
    """Return of each pass after the first how far it moved what is fed back, and the root mean square of that."""
    fed = [model.fed_back(unrolled(passes=k).run(model, tokens, starts).states) for k in range(1, passes + 1)]
    sizes = [each.square().mean().sqrt() for each in fed[1:]]
    changes = [(after - before).square().mean().sqrt() for before, after in pairwise(fed)]
    return torch.stack([change / size for change, size in zip(changes, sizes, strict=True)]), torch.stack(sizes)


def residual_precision(expected):
    """Return how far a residual may be off: where n squares add up to n eps at the worst."""
    return ROWS * LENGTH * PLAIN.width * torch.finfo(torch.float64).eps * expected + torch.finfo(torch.float64).eps


@each_feeding
@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_residuals(cls, seed):
    model, tokens = model_and_tokens(cls, seed)
    for starts in (None, make_starts(seed)):
        found = unrolled(passes=MANY).run(model, tokens, starts).residuals
        expected, _ = direct_residuals(model, tokens, MANY, starts)
        assert (found.shape, found.dtype) == ((MANY - 1,), torch.float64)
        assert bool(((found - expected).abs() <= residual_precision(expected)).all()), (found, expected)
    assert unrolled(passes=1).run(model, tokens).residuals is None


@each_feeding
def test_residuals_need_no_gradient(cls):
    model, tokens = model_and_tokens(cls)
    assert not unrolled(passes=3).run(model, tokens).residuals.requires_grad


@each_feeding
@torch.no_grad()
def test_residuals_are_zero_once_all_is_exact(cls):
    """Documents of three positions are exact after three passes, or four where the first position takes one more."""
    model, tokens = model_and_tokens(cls)
    starts = starts_of([0, 3, 6, 9], LENGTH).expand(ROWS, -1)
    residuals = unrolled(passes=7).run(model, tokens, starts).residuals.tolist()
    exact = 3 if cls.begins_plain else 4
    assert [each == 0 for each in residuals] == [number > exact for number in range(2, 8)]


@each_feeding
@torch.no_grad()
def test_tolerance_stops_the_passes(cls):
    """After the first pass that moves less; what is fed back is off by no more than later passes would move it."""
    model, tokens = model_and_tokens(cls)
    whole = unrolled(passes=MANY, loss="mean").run(model, tokens)
    expected, sizes = direct_residuals(model, tokens, MANY)
    smallest, stops = math.inf, 0
    for passes, residual in enumerate(whole.residuals.tolist()[:-1], start=2):
        if residual >= smallest:
            continue
        limit, smallest = min(residual * 1.1, (residual + smallest) / 2), residual
        found = unrolled(passes=MANY, loss="mean", tolerance=limit).run(model, tokens)
        assert len(found.residuals) == passes - 1
        assert_close(found.states, unrolled(passes=passes).run(model, tokens).states, f"states of pass {passes}")
        assert len(found.terms) == passes
        assert sum(weight for _, weight in found.terms) == pytest.approx(1)
        reach = float((expected * sizes)[passes - 1 :].sum())  # the triangle inequality over the passes left out
        error = (model.fed_back(found.states) - model.fed_back(whole.states)).square().mean().sqrt()
        assert float(error) <= reach * (1 + 1e-9)
        stops += 1
    assert stops > 1


@torch.no_grad()
def test_tolerance_bounds_what_is_returned():
    """Where every pass moves less than the one before, those left out move no more than the tolerance each."""
    for seed in SEEDS:
        model, tokens = model_and_tokens(CRT, seed)
        whole = unrolled(passes=MANY).run(model, tokens)
        assert bool((whole.residuals.diff() < 0).all())
        _, sizes = direct_residuals(model, tokens, MANY)
        for limit in (0.3, 0.1, 0.03):
            found = unrolled(passes=MANY, tolerance=limit).run(model, tokens)
            error = (found.states - whole.states).square().mean().sqrt()
            assert 0 < float(error) <= limit * float(sizes[len(found.residuals) :].sum())


@each_feeding
def test_training_runs_all_passes(cls):
    model, tokens = model_and_tokens(cls)
    for mode in (model.train, model.eval):
        mode()
        assert len(unrolled(passes=MANY, tolerance=0.999).run(model, tokens).residuals) == MANY - 1
    with torch.no_grad():
        assert len(unrolled(passes=MANY, tolerance=0.0).run(model, tokens).residuals) == MANY - 1
        large = unrolled(passes=MANY, tolerance=1e9).run(model, tokens)
    assert len(large.residuals) == 1
    assert_close(large.states, unrolled(passes=2).run(model, tokens).states)


# ---------------------------------------------------------------- finished positions

VARIANTS = [
    (cls, name) for cls in FEEDING for name in ("plain", "grouped", "nanochat", "memoryless") if name in cls.variants()
]


@pytest.mark.parametrize(("cls", "variant"), VARIANTS, ids=lambda each: getattr(each, "__name__", each))
@pytest.mark.parametrize(
    "settings",
    [
        {"passes": 5, "loss": "mean", "convergence_weight": 0.5},
        {"passes": LENGTH + 1, "loss": "mean"},
        {"passes": 6, "loss": "mean", "detach_passes": True},
    ],
    ids=["5", "all", "detached"],
)
def test_finished_positions_may_be_left_out(cls, variant, settings, monkeypatch):
    """States, objective and gradients are those of whole passes."""
    model, tokens = model_and_tokens(cls, variant=variant)
    solver, calls = unrolled(**settings), count_calls(model)
    frozen = solver.run(model, tokens)
    assert calls[0] == LENGTH
    done = [exact_prefix(cls, replace(solver.config, passes=number)) for number in range(1, len(calls))]
    assert calls[1:] == [LENGTH - each if each >= LENGTH / 8 else LENGTH for each in done]
    del calls[:]
    leave_nothing_out(monkeypatch)
    whole = solver.run(model, tokens)
    assert calls == [LENGTH] * settings["passes"]
    for (found, _), (expected, _) in zip(frozen.terms, whole.terms, strict=False):
        assert_close(found, expected, "states of a pass")
    assert_close(frozen.states, whole.states)
    found, expected = objective(model, frozen), objective(model, whole)
    assert_close(found, expected, "objective")
    assert_gradients_close(gradients_of(model, found), gradients_of(model, expected))


@each_feeding
@pytest.mark.parametrize("passes", [4, LENGTH + 1])
@torch.no_grad()
def test_leaving_out_costs_less(cls, passes, monkeypatch):
    """And as much less as is claimed."""
    model, tokens = model_and_tokens(cls)
    model.requires_grad_(False)
    solver = unrolled(passes=passes)

    def measured():
        with FlopCounterMode(display=False) as counter:
            solver.run(model, tokens)
        counts = counter.get_flop_counts()["Global"]
        return sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm)) / ROWS

    frozen, claimed = measured(), solver.flops_per_token(model, LENGTH) * LENGTH
    leave_nothing_out(monkeypatch)
    whole, claimed_whole = measured(), solver.flops_per_token(model, LENGTH) * LENGTH
    assert frozen < whole
    assert claimed < claimed_whole
    if passes == 4:  # attention is not measured, but left out all the same
        done = [exact_prefix(cls, replace(solver.config, passes=number)) for number in (1, 2, 3)]
        done = [each for each in done if each >= LENGTH / 8]
        flops = oracles.linear_flops(model.state_dict(), model.config)
        each = flops["advance"] + flops["fed_position"] + flops["fed_state"]
        assert whole - frozen == sum(done) * each
        attention = sum(oracles.attention_flops(model.config, each)[1] for each in done)
        assert claimed_whole - claimed == pytest.approx(whole - frozen + attention, rel=1e-12)


def test_nothing_is_left_out_where_passes_differ():
    """Where rows hold documents, or a prefix, dropout or jitter is drawn anew in every pass."""
    for cls, changes, settings, starts in (
        (CRT, {}, {}, make_starts(0)),
        (CRT, {}, {"prefix": 0.1}, None),
        (CRT, {"dropout": 0.1}, {}, None),
        (FBT, {"jitter": 0.1}, {}, None),
    ):
        config = replace(cls.variants()["plain"], **changes)
        model = make_model(cls, config)
        calls = count_calls(model)
        unrolled(passes=6, **settings).run(model.train(), make_tokens(config), starts)
        assert calls == [LENGTH] * 6
        if starts is None:
            del calls[:]
            unrolled(passes=6, **settings).run(model.eval(), make_tokens(config))
            assert sum(calls) < 6 * LENGTH, "evaluation draws nothing"


# ---------------------------------------------------------------- convergence


def inputs_of_the_recurrent_part(machine, states):
    """Return what the recurrent part takes in at every position, fed by the states of the positions before."""
    found = []
    for position in range(len(machine.tokens)):
        fed = machine.fed_back(states[position - 1]) if position else machine.initial()
        if isinstance(machine, oracles.RLT):
            found.append(machine.merged(machine.entries[position], fed))
        elif isinstance(machine, oracles.LRT):  # the state enters beside the embedding: it is itself what is taken in
            found.append(fed)
        else:
            found.append(machine.entry(position, fed))
    return torch.stack(found)


def penalty_by_definition(weights, config, tokens, passes, starts=None):
    """Return the mean square between what one more pass would take in and, held constant, what the last took in."""
    found = []
    for number in (passes - 1, passes):
        states = oracles.states(weights, config, tokens, solver_config("unrolled", passes=number), starts)
        each_document = []
        begins = torch.zeros_like(tokens) if starts is None else starts
        for row, begin, end in documents_of(begins):
            machine = oracles.ORACLES[config.architecture](weights, config, tokens[row, begin:end].tolist())
            each_document.append(inputs_of_the_recurrent_part(machine, states[row, begin:end]))
        found.append(torch.cat(each_document))
    taken, further = found
    return (further - taken.detach()).square().mean()


@each_feeding
@pytest.mark.parametrize(("passes", "packed"), [(2, False), (2, True), (5, False)])
def test_penalty(cls, passes, packed):
    """Its value and its gradients, which reach what the state enters through."""
    model, tokens = model_and_tokens(cls)
    tokens, starts = tokens[:2], make_starts(0, rows=2) if packed else None
    found = unrolled(passes=passes, convergence_weight=0.3).run(model, tokens, starts).penalty
    leaves = {name: value.clone().requires_grad_() for name, value in model.state_dict().items()}
    expected = 0.3 * penalty_by_definition(leaves, model.config, tokens, passes, starts)
    size = (float(expected.detach()) / 0.3) ** 0.5  # of the change, itself a difference of inputs of size about 1
    assert size > 1e-3
    assert float((found - expected).detach().abs()) <= 0.3 * 2 * size * tolerance(torch.ones(1, dtype=torch.float64))
    expected.backward()
    gradients = gradients_of(model, found)
    assert_gradients_close(gradients, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
    owners = {CRT: "correction", FBT: "fusion", LRT: "recurrent", RLT: "merge"}
    entrances = [name for name, _ in model.named_parameters() if name.startswith(f"{owners[cls]}.")]
    assert entrances
    assert all(gradients[name].any() for name in entrances)


def test_penalty_of_detached_passes_reaches_the_correction_alone():
    """With what is fed held constant, only the further pass's correction is left to be trained."""
    model, tokens = model_and_tokens(CRT)
    penalty = unrolled(passes=2, convergence_weight=1.0, detach_passes=True).run(model, tokens).penalty
    reached = {name for name, gradient in gradients_of(model, penalty).items() if gradient.any()}
    assert reached == {"embedding.weight", *(f"correction.{name}" for name, _ in model.correction.named_parameters())}


def test_penalty_where_there_is_one():
    model, tokens = model_and_tokens(CRT)
    assert unrolled(passes=1, convergence_weight=1.0).run(model, tokens).penalty is None
    assert unrolled(passes=3).run(model, tokens).penalty is None
    with torch.no_grad():
        assert unrolled(passes=3, convergence_weight=1.0).run(model, tokens).penalty is None
    one, two = (unrolled(passes=3, convergence_weight=weight).run(model, tokens).penalty for weight in (1.0, 2.0))
    assert two.item() == pytest.approx(2 * one.item())
    assert one.shape == ()


def test_a_recurrence_that_has_converged_has_no_penalty():
    model, tokens = model_and_tokens(CRT)
    found = unrolled(passes=LENGTH + 1, convergence_weight=1.0).run(model, tokens).penalty
    assert found.item() <= 1e-25  # the last position's state is fed to nobody
    assert all(float(gradient.norm()) <= 1e-12 for gradient in gradients_of(model, found).values())


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"passes": 0}, "solver.passes is 0; a number of passes is a whole number from 1 on"),
        ({"passes": -1}, "solver.passes is -1"),
        ({"passes": 2.5}, "solver.passes is 2.5"),
        ({"passes": True}, "solver.passes is True"),
        ({"prefix": -0.1}, "solver.prefix is -0.1; a prefix is a share of a document, from 0 to 1"),
        ({"prefix": 1.5}, "solver.prefix is 1.5"),
        ({"prefix": True}, "solver.prefix is True"),
        ({"prefix": "half"}, "solver.prefix is 'half'"),
        ({"prefix": float("nan")}, "solver.prefix is nan"),
        ({"loss": "plain_and_fed", "fed_loss_weight": -1.0}, "solver.fed_loss_weight is -1.0; it must be at least 0"),
        ({"convergence_weight": -0.5}, "solver.convergence_weight is -0.5; it must be at least 0"),
        ({"tolerance": -1e-3}, "solver.tolerance is -0.001; it must be at least 0"),
        ({"loss": "weighted"}, "solver.loss is weighted; it needs solver.loss_weights"),
        (
            {"loss": "mean", "loss_weights": [1.0, 1.0, 1.0]},
            "solver.loss_weights is set; it has no use with solver.loss=mean",
        ),
        ({"loss": "weighted", "loss_weights": [-1.0, 1.0, 1.0]}, "solver.loss_weights is [-1.0, 1.0, 1.0]"),
        ({"loss": "weighted", "loss_weights": [1.0, 1.0, 0.0]}, "they must be at least 0, the last above it"),
        ({"loss": "weighted", "loss_weights": [1.0, 1.0]}, "solver.loss_weights has 2 weights"),
        ({"loss": "weighted", "loss_weights": [1.0] * 4}, "one for each of solver.passes=3"),
        ({"fed_loss_weight": 0.5}, "solver.fed_loss_weight is set; it has no use with solver.loss=last"),
        ({"loss": "mean", "fed_loss_weight": 0.5}, "it has no use with solver.loss=mean"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(changes, words):
    with refused(words):
        solver_config("unrolled", **changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"passes": 1, "prefix": 0, "tolerance": 0.0},
        {"passes": 100, "prefix": 1, "convergence_weight": 3.0, "detach_passes": True},
        {"passes": 2, "loss": "weighted", "loss_weights": [0.0, 2.0]},
        {"loss": "plain_and_fed", "fed_loss_weight": 0.0, "tolerance": 0.1},
    ],
    ids=str,
)
def test_good_settings_pass(changes):
    solver_config("unrolled", **changes).check()


@torch.no_grad()
def test_passes_and_prefix_may_change_between_calls():
    model, tokens = model_and_tokens(CRT)
    solver = unrolled(passes=3, loss="plain_and_fed")
    for passes in (1, 5, 2):
        solver.passes = passes
        found, expected = solver.run(model, tokens), unrolled(passes=passes, loss="plain_and_fed").run(model, tokens)
        assert solver.feeding == (passes > 1)
        assert torch.equal(found.states, expected.states)
        assert [weight for _, weight in found.terms] == [weight for _, weight in expected.terms]
    model, solver.prefix = watched(), 1.0
    solver.run(model, tokens)
    assert not model.fed[0].all()


def test_schedules_of_passes_and_prefix_pass():
    config = solver_config("unrolled", loss="plain_and_fed")
    Unrolled.check_schedules(config, {"passes": [(0, 1), (0.1, Mixture((1, 2, 3), (0.2, 0.5, 0.3)))]})
    Unrolled.check_schedules(config, {"prefix": [(0.0, 0.0), (0.5, Mixture((0.0, 1), (1.0, 1.0)))], "passes": [(0, 2)]})
    weighted = solver_config("unrolled", loss="weighted", loss_weights=[1.0, 1.0, 1.0])
    Unrolled.check_schedules(weighted, {"prefix": [(0, 0.5)]})


@pytest.mark.parametrize(
    ("schedules", "words"),
    [
        ({"passes": [(0, 2.5)]}, "schedules.passes: value is 2.5; a number of passes is a whole number from 1 on"),
        ({"passes": [(0, Mixture((1, 0), (1.0, 1.0)))]}, "schedules.passes: value is 0"),
        ({"passes": [(0, 1), (0.5, Mixture((2, True), (1.0, 1.0)))]}, "schedules.passes: value is True"),
        ({"prefix": [(0, Mixture((0.5, 1.5), (1.0, 1.0)))]}, "schedules.prefix: value is 1.5; a prefix is a share"),
        ({"prefix": [(0, None)]}, "schedules.prefix: value is None"),
        ({"passes": [(0.5, 2)]}, "schedules.passes begins its stages at [0.5]"),
        (
            {"tolerance": [(0, 0.1)]},
            "schedules.tolerance: solver 'unrolled' has no such setting to change; it has: pas",
        ),
    ],
    ids=str,
)
def test_bad_schedules_are_refused(schedules, words):
    with refused(words):
        Unrolled.check_schedules(solver_config("unrolled"), schedules)


def test_weights_for_a_fixed_number_of_passes_refuse_a_schedule_of_them():
    config = solver_config("unrolled", loss="weighted", loss_weights=[1.0, 1.0, 1.0])
    for stages in ([(0, 3)], [(0, Mixture((2, 3), (1.0, 1.0)))]):
        with pytest.raises(ConfigError, match=r"schedules\.passes changes.*solver\.loss_weights are for a fixed one"):
            Unrolled.check_schedules(config, {"passes": stages})
