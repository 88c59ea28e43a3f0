"""What is drawn anew in training: dropout everywhere, FBT's jitter, the prefixes of passes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pipeline.models import ARCHITECTURES, FBT, Architecture, Transformer
from pipeline.solvers import Solver, SolverConfig
from tests.models.cases import (
    LENGTH,
    SEEDS,
    Case,
    make_model,
    make_solver,
    make_starts,
    make_tokens,
    solver_config,
    tolerance,
)
from tests.models.contract import loss_of

DROPOUT = 0.3
SOLVERS = {
    "rlt": ["parallel", "chunked"],
    "transformer": ["parallel"],
    **{name: ["parallel", "chunked", "unrolled", "interleaved"] for name in ("crt", "lrt", "fbt")},
}
SETTINGS = {
    "chunked": {"interval": 2},
    "unrolled": {"passes": 3, "loss": "mean", "convergence_weight": 0.1, "prefix": 1.0},
    "interleaved": {"subsets": 3},
}


def cases() -> Iterator[Case]:
    """Yield every variant under every kind of solver that fits it."""
    for architecture, solvers in SOLVERS.items():
        for variant in ARCHITECTURES[architecture].variants():
            for name in solvers:
                yield Case(architecture, variant, solver_config(name, **SETTINGS.get(name, {})))


REFRESHED = Case("lrt", "plain", solver_config("interleaved", subsets=3, refresh_keys_values=True))
CASES = [*cases(), REFRESHED]
each_case = pytest.mark.parametrize(("seed", "case"), list(enumerate(CASES)), ids=[str(case) for case in CASES])


def test_every_architecture_is_covered():
    assert SOLVERS.keys() == set(ARCHITECTURES)


def jittering(config):
    return replace(config, jitter=0.5) if hasattr(config, "jitter") else config


def model_of(case: Case, seed: int = 0, dropout: float = DROPOUT) -> Architecture:
    """Return a model in training that drops, and jitters if it can."""
    return make_model(case.cls, replace(jittering(case.config), dropout=dropout), seed).train()


def run_seeded(model: Architecture, run: Solver, tokens: Tensor, starts: Tensor | None = None, seed: int = 0):
    """Return a solution of which all draws come from ``seed``."""
    torch.manual_seed(seed)
    return run.run(model, tokens, starts)


def everything(model: Architecture, run: Solver, tokens: Tensor, starts: Tensor | None, seed: int):
    """Return the states of every loss term and the gradients of the objective, all draws from ``seed``."""
    model.zero_grad(set_to_none=True)
    solution = run_seeded(model, run, tokens, starts, seed)
    loss = sum(weight * loss_of(model.readout(states), seed) for states, weight in solution.loss_terms)
    if solution.penalty is not None:
        loss = loss + solution.penalty
    loss.backward()
    found = {f"states {number}": states.detach() for number, (states, _) in enumerate(solution.loss_terms)}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found


@each_case
@torch.no_grad()
def test_nothing_is_drawn_outside_training(seed: int, case: Case):
    """States are those of the same model without dropout and jitter, and the generator stays where it was."""
    run, tokens = make_solver(case.solver), make_tokens(case.config, seed)
    model = model_of(case, seed).eval()
    calm = make_model(case.cls, replace(case.config, dropout=0.0, **({"jitter": 0.0} if case.cls is FBT else {})), seed)
    for starts in (None, make_starts(seed)):
        state = torch.get_rng_state()
        found = run.run(model, tokens, starts).states
        assert torch.equal(found, run.run(calm.eval(), tokens, starts).states)
        if not getattr(run, "prefix", 0.0):
            assert torch.equal(found, run.run(calm.train(), tokens, starts).states)
        assert torch.equal(torch.get_rng_state(), state)


@each_case
@torch.no_grad()
def test_draws_in_training_differ_and_repeat_with_the_seed(seed: int, case: Case):
    model, run, tokens = model_of(case, seed), make_solver(case.solver), make_tokens(case.config, seed)
    assert model.draws
    one, again, other = (run_seeded(model, run, tokens, seed=number) for number in (seed, seed, seed + 100))
    following = run.run(model, tokens)
    for (first, _), (second, _), (third, _), (fourth, _) in zip(
        one.loss_terms, again.loss_terms, other.loss_terms, following.loss_terms, strict=True
    ):
        assert torch.equal(first, second)
        for different in (third, fourth):
            assert bool(((first - different).abs().amax(dim=-1) > 1e-6).all())
    calm = run.run(model.eval(), tokens).states
    assert bool(((one.states - calm).abs().amax(dim=-1) > 1e-6).all())


@torch.no_grad()
def test_rows_draw_for_themselves():
    for name, cls in ARCHITECTURES.items():
        case = Case(name, "plain", solver_config(SOLVERS[name][-1]))
        model, tokens = model_of(case), make_tokens(case.config, rows=1).expand(3, -1)
        states = make_solver(case.solver).run(model, tokens).states
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert float((states[one] - states[other]).abs().amax(dim=-1).min()) > 1e-6, cls.__name__


def checkpointed(config: SolverConfig) -> Iterator[Solver]:
    """Yield the solver with activation checkpointing, in segments of two lengths if it works in such."""
    for segments in ({"segment_length": 1}, {"segment_length": 5}) if config.name == "chunked" else ({},):
        yield make_solver(config, activation_checkpointing=True, **segments)


@each_case
def test_activation_checkpointing_draws_the_same_again(seed: int, case: Case):
    """Gradients and states are equal to the last bit under dropout, jitter and drawn prefixes.

    The fast loop takes the sums of its gradients over other groups of positions: they agree to rounding.
    """
    model, run, tokens = model_of(case, seed), make_solver(case.solver), make_tokens(case.config, seed)
    exact = getattr(case.solver, "loop", "autograd") == "autograd"
    starts = make_starts(seed) if seed % 2 else None
    run.adapt(model)
    expected = everything(model, run, tokens, starts, seed)
    largest = max(expected.values(), key=lambda each: float(each.abs().max()))
    for again in checkpointed(case.solver):
        again.adapt(model)
        found = everything(model, again, tokens, starts, seed)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]) or not exact, name
            assert float((value - expected[name]).abs().max()) <= tolerance(largest), name
    other = everything(model, run, tokens, starts, seed + 1)
    assert not torch.equal(other["embedding.weight"], expected["embedding.weight"])


# ---------------------------------------------------------------- what is dropped


def shares_dropped(seen: list[Tensor], dropped: list[Tensor], share: float) -> None:
    """Raise unless numbers are zero with that frequency, and the others are scaled up by what keeps their mean."""
    zeros = torch.cat([each.eq(0).flatten() for each in dropped]).double()
    assert abs(float(zeros.mean()) - share) < 5 * (share * (1 - share) / len(zeros)) ** 0.5
    for before, after in zip(seen, dropped, strict=True):
        torch.testing.assert_close(after, torch.where(after == 0, 0.0, before / (1 - share)))


@pytest.mark.parametrize("share", [0.1, 0.5])
@torch.no_grad()
def test_embedding_and_branches_are_dropped_and_the_rest_scaled_up(share):
    """What a block adds to the stream is what is left of its two branches."""
    for seed in SEEDS:
        config = replace(Transformer.variants()["plain"], dropout=share, width=32)
        model = make_model(Transformer, config, seed).train()
        tokens = make_tokens(config, seed, rows=20)
        entered, outputs, branches = [], [], []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda block, args, entered=entered: entered.append(args[0]))
            block.register_forward_hook(lambda block, args, output, outputs=outputs: outputs.append(output))
            for branch in (block.attention.output, block.ffn):
                branch.register_forward_hook(lambda layer, args, output, kept=branches: kept.append(output))
            block.ffn_norm.register_forward_pre_hook(lambda norm, args, outputs=outputs: outputs.append(args[0]))
        torch.manual_seed(seed)
        make_solver(solver_config("parallel")).run(model, tokens)
        shares_dropped([model.embedding(tokens)], entered[:1], share)
        stream = [entered[0], *outputs]
        # A branch that is zero where it is dropped leaves the stream as it was, to the last bit.
        added = [after - before for before, after in pairwise(stream)]
        assert len(added) == len(branches) == 4
        shares_dropped(branches, added, share)


@torch.no_grad()
def test_attention_weights_are_dropped():
    """Where one key is seen, the head's output is dropped as one: all of it, or none."""
    config = replace(Transformer.variants()["plain"], dropout=0.4, attention_window=1, heads=8)
    model, tokens = make_model(Transformer, config).train(), make_tokens(config, rows=50)
    read = []
    model.blocks[0].attention.output.register_forward_pre_hook(lambda layer, args: read.append(args[0]))
    make_solver(solver_config("parallel")).run(model, tokens)
    heads = read[0].unflatten(-1, (8, -1)) == 0
    assert torch.equal(heads.any(dim=-1), heads.all(dim=-1))
    dropped = heads.all(dim=-1).double()
    assert abs(float(dropped.mean()) - 0.4) < 5 * (0.24 / dropped.numel()) ** 0.5


@pytest.mark.parametrize("name", ["crt", "lrt", "fbt"])
@torch.no_grad()
def test_passes_share_the_draw_of_the_embedding_and_no_other(name):
    """Tokens are embedded once. A first token enters every pass alike, if the correction is mute, and leaves it not."""
    case = Case(name, "plain", solver_config("unrolled", passes=4, loss="mean"))
    for seed in SEEDS:
        model, tokens = model_of(case, seed), make_tokens(case.config, seed)
        model.mute_feedback()
        entered = []
        model.blocks[0].register_forward_pre_hook(lambda block, args, entered=entered: entered.append(args[0][:, 0]))
        states = [each[:, 0] for each, _ in make_solver(case.solver).run(model, tokens).loss_terms]
        assert len(entered) == len(states) == 4
        for number in range(1, 4):
            assert torch.equal(entered[number], entered[0])
            assert bool(((states[number] - states[number - 1]).abs().amax(dim=-1) > 1e-6).all())


@pytest.mark.parametrize("name", ["crt", "lrt", "fbt"])
@torch.no_grad()
def test_no_position_is_finished_where_passes_draw(name):
    """Passes go on to the last: under dropout a position's states differ from pass to pass for ever."""
    passes = LENGTH + 4
    case = Case(name, "plain", solver_config("unrolled", passes=passes, loss="mean"))
    model, tokens = model_of(case), make_tokens(case.config)
    solution = make_solver(case.solver).run(model, tokens)
    assert len(solution.loss_terms) == len(solution.residuals) + 1 == passes
    for (before, _), (after, _) in pairwise(solution.loss_terms):
        assert float((after - before).abs().amax(dim=-1).min()) > 1e-6
    model.eval()
    assert len(make_solver(case.solver).run(model, tokens).loss_terms) <= LENGTH + 1


@torch.no_grad()
def test_jitter_alone_draws():
    """It is a draw like dropout: it differs, repeats, and keeps positions from being finished."""
    case = Case("fbt", "plain", solver_config("unrolled", passes=LENGTH + 4, loss="mean"))
    model, tokens = model_of(case, dropout=0.0), make_tokens(case.config)
    assert model.draws
    run = make_solver(case.solver)
    one, again, other = (run_seeded(model, run, tokens, seed=number) for number in (0, 0, 1))
    assert torch.equal(one.states, again.states)
    assert not torch.equal(one.states, other.states)
    assert len(one.loss_terms) == LENGTH + 4
    assert not make_model(FBT, replace(case.config, jitter=0.0)).draws
