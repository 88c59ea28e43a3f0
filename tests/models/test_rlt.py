"""What is RLT's own: the merge, the register, the window, tied stacks."""

from dataclasses import replace

import pytest
import torch

from pipeline.models import RLT, Feedback
from pipeline.solvers import Solver, SolverConfig
from tests.models import oracles
from tests.models.cases import (
    LENGTH,
    PARALLEL,
    ROWS,
    SEEDS,
    assert_close,
    gradient_vector,
    make_model,
    make_solver,
    make_tokens,
    model_and_tokens,
    prepared,
    relative,
    solver_config,
    watched,
)
from tests.models.contract import assert_gradients_close, loss_of

PLAIN = RLT.variants()["plain"]
VARIANTS = RLT.variants()


def chunks(interval: int) -> SolverConfig:
    return solver_config("chunked", interval=interval)


def chunked(interval: int) -> Solver:
    return make_solver(chunks(interval))


# ---------------------------------------------------------------- RLT-0, RLT-1, RLT-2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_interval_1_is_the_recurrence(variant, seed):
    """RLT-2 with B = 1 is RLT-1: every position is fed the state of the one before it."""
    model, tokens = model_and_tokens(RLT, seed, variant)
    found = chunked(1).run(model, tokens).states
    inputs, memory, feedback = prepared(model, tokens), model.new_memory(), model.initial_feedback(ROWS)
    for position in range(LENGTH):
        state, memory = model.advance(inputs.cut(position, position + 1, position + 1), feedback, memory)
        feedback = Feedback(state)
        assert_close(found[:, position : position + 1], state)
    assert_close(found, oracles.states(model.state_dict(), VARIANTS[variant], tokens, chunks(1)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("interval", [1, 3, 50])
@torch.no_grad()
def test_alpha_0_is_rlt_0(variant, interval):
    config = replace(VARIANTS[variant], alpha=0.0)
    for seed in SEEDS:
        model, tokens = make_model(RLT, config, seed), make_tokens(config, seed)
        assert_close(chunked(interval).run(model, tokens).states, PARALLEL.run(model, tokens).states)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_interval_beyond_the_row_is_not_rlt_0(variant):
    """The initial state is still merged, into every position."""
    for seed in SEEDS:
        model, tokens = model_and_tokens(RLT, seed, variant)
        found, without = chunked(LENGTH + 1).run(model, tokens).states, PARALLEL.run(model, tokens).states
        assert bool(((found - without).abs().amax(dim=-1) > 1e-3).all())
        merged, _ = model.advance(prepared(model, tokens), model.initial_feedback(ROWS))
        assert_close(found, merged)
        assert_close(found, chunked(10 * LENGTH).run(model, tokens).states)


@torch.no_grad()
def test_intervals_differ():
    model, tokens = model_and_tokens(RLT)
    found = [chunked(interval).run(model, tokens).states for interval in (1, 2, 3, 4, 5, 50)]
    found.append(PARALLEL.run(model, tokens).states)
    for number, one in enumerate(found):
        for other in found[:number]:
            assert float((one - other).abs().max()) > 1e-3


# ---------------------------------------------------------------- the register


def fed_of(calls):
    """Return which state each position was fed, {position: state}."""
    found = {}
    for inputs, feedback, *_ in calls:
        for place, position in enumerate(inputs.index[0].tolist()):
            states = feedback.states
            found[position] = states[:, min(place, states.shape[1] - 1)]
    return found


@torch.no_grad()
def test_the_example_of_the_report():
    """B = 4, a prompt of 6 tokens (2.7): tokens 5 to 8 use y_4; y_6 predicts token 7, and no register ever holds it."""
    model, tokens = watched(RLT, PLAIN), make_tokens(PLAIN)[:, :9]
    run = chunked(4)
    prompt = run.run(model, tokens[:, :6], carry=run.new_carry(model, ROWS))
    states, carry = [prompt.states], prompt.carry
    registers = {6: carry.register.states}
    for position in range(6, 9):
        solution = run.run(model, tokens[:, position : position + 1], carry=carry)
        carry = solution.carry
        states.append(solution.states)
        registers[position + 1] = carry.register.states
    fed = fed_of(model.calls)
    y = {number + 1: state for number, state in enumerate(torch.cat(states, dim=1).unbind(dim=1))}  # as in the report
    for token in (1, 2, 3, 4):
        assert torch.equal(fed[token - 1], model.initial.expand(ROWS, -1))
    for token in (5, 6, 7, 8):
        assert torch.equal(fed[token - 1], y[4])
    assert torch.equal(fed[8], y[8])
    for length, expected in ((6, 4), (7, 4), (8, 8), (9, 8)):
        assert torch.equal(registers[length][:, 0], y[expected])
    reference = oracles.states(model.state_dict(), PLAIN, tokens, chunks(4))
    assert_close(model.readout(y[6]), oracles.logits(model.state_dict(), PLAIN, reference)[:, 5], "token 7's logits")


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 50])
@torch.no_grad()
def test_only_complete_chunks_set_the_register(interval):
    model, tokens = model_and_tokens(RLT)
    run = chunked(interval)
    states = run.run(model, tokens).states
    for cut in range(1, LENGTH + 1):
        carry = run.run(model, tokens[:, :cut], carry=run.new_carry(model, ROWS)).carry
        complete = cut // interval * interval
        expected = states[:, complete - 1 : complete] if complete else model.initial_feedback(ROWS).states
        assert_close(carry.register.states, expected, f"register after {cut}")


@torch.no_grad()
def test_interval_may_change_between_calls():
    model, tokens = model_and_tokens(RLT)
    run = chunked(1)
    for interval in (3, 1, 50, 2):
        run.interval = interval
        assert torch.equal(run.run(model, tokens).states, chunked(interval).run(model, tokens).states)


# ---------------------------------------------------------------- memories


@pytest.mark.parametrize("window", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("capacity", [None, LENGTH])
@torch.no_grad()
def test_memory_holds_what_the_window_still_reaches(window, capacity):
    config = replace(PLAIN, window=window)
    model, tokens = make_model(RLT, config), make_tokens(config)
    for run in (chunked(1), chunked(3), PARALLEL):
        for step in (1, 2, 5):
            carry = run.new_carry(model, ROWS, capacity=capacity)
            assert carry.memory["decoder"].length == 0
            for begin in range(0, LENGTH, step):
                carry = run.run(model, tokens[:, begin : begin + step], carry=carry).carry
                seen, kept = carry.length, min(carry.length, window - 1)
                assert carry.memory["decoder"].length == kept
                assert carry.memory["encoder"].length == carry.memory["shared"].length == seen
                if kept:
                    assert carry.memory["decoder"].index.tolist() == [list(range(seen - kept, seen))]
                    keys = carry.memory["decoder"].keys
                    assert [key.shape[2] for key in keys] == [kept] * config.decoder_layers


@pytest.mark.parametrize("run", [chunked(1), chunked(4), PARALLEL], ids=["chunked1", "chunked4", "parallel"])
@torch.no_grad()
def test_a_window_as_long_as_the_row_is_full_attention(run):
    for seed in SEEDS:
        tokens = make_tokens(PLAIN, seed)
        full = make_model(RLT, replace(PLAIN, window=10_000), seed)
        reference = run.run(full, tokens).states
        for window in (LENGTH, LENGTH + 1, 50):
            assert_close(run.run(make_model(RLT, replace(PLAIN, window=window), seed), tokens).states, reference)
        shorter = run.run(make_model(RLT, replace(PLAIN, window=LENGTH - 1), seed), tokens).states
        assert_close(shorter[:, :-1], reference[:, :-1])
        assert bool(((shorter - reference)[:, -1].abs().amax(dim=-1) > 1e-6).all())


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5])
@torch.no_grad()
def test_memory_groups(groups):
    """Block l reads memory l G / L_D, rounded down: all are read, in order, by as even numbers as can be."""
    config = replace(PLAIN, decoder_layers=5, memory_groups=groups)
    model, tokens = make_model(RLT, config), make_tokens(config)
    assert_close(chunked(2).run(model, tokens).states, oracles.states(model.state_dict(), config, tokens, chunks(2)))
    before = PARALLEL.run(model, tokens).states
    for group in range(groups):
        weight = model.memory.key_value[group].weight
        weight.mul_(2)
        assert float((PARALLEL.run(model, tokens).states - before).abs().max()) > 1e-3, f"nobody reads memory {group}"
        weight.div_(2)


# ---------------------------------------------------------------- tied stacks


@pytest.mark.parametrize("run", [chunked(1), chunked(3), PARALLEL], ids=["chunked1", "chunked3", "parallel"])
def test_tied_stacks_are_untied_ones_with_equal_weights(run):
    """States are the same, and a shared weight's gradient is the sum of its two uses'."""
    config = VARIANTS["tied"]
    for seed in SEEDS:
        tied, tokens = make_model(RLT, config, seed), make_tokens(config, seed)
        untied = make_model(RLT, replace(config, tied_stacks=False), seed + 100)
        weights = dict(tied.state_dict())
        for name in untied.state_dict():
            if name not in weights:
                assert name.startswith("decoder.")
                weights[name] = weights[name.replace("decoder.", "encoder.")]
        untied.load_state_dict(weights)
        found = []
        for model in (tied, untied):
            states = run.run(model, tokens).states
            (loss_of(states, seed) + loss_of(model.readout(states), seed)).backward()
            found.append((states, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        assert_close(found[0][0], found[1][0])
        sums = {}
        for name, gradient in found[1][1].items():
            owner = name if name in found[0][1] else name.replace("decoder.", "encoder.")
            sums[owner] = sums.get(owner, 0) + gradient
        assert_gradients_close(found[0][1], sums)


# ---------------------------------------------------------------- truncated backpropagation


def segment_gradient(model, run, tokens, change):
    """Return states and gradients of a loss on the second half, the carry between the halves changed by ``change``."""
    half = LENGTH // 2
    first = run.run(model, tokens[:, :half], carry=run.new_carry(model, ROWS))
    second = run.run(model, tokens[:, half:], carry=change(first.carry))
    return second.states.detach(), gradient_vector(model, second.states.square().mean())


def without_register(carry):
    return replace(carry, register=Feedback(carry.register.states.detach()))


def without(*names):
    def change(carry):
        memory = {key: each.detached() if key in names else each for key, each in carry.memory.items()}
        return replace(carry, memory=memory)

    return change


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_detaching_parts_of_the_carry_truncates_different_gradients(interval):
    run = chunked(interval)
    changes = {
        "nothing": lambda carry: carry,
        "register": without_register,
        "window": without("decoder"),
        "register and window": lambda carry: without_register(without("decoder")(carry)),
        "encoder": without("encoder", "shared"),
        "all": lambda carry: without_register(without("decoder", "encoder", "shared")(carry)),
    }
    for seed in SEEDS:
        model, tokens = model_and_tokens(RLT, seed)
        found = {name: segment_gradient(model, run, tokens, change) for name, change in changes.items()}
        whole = gradient_vector(model, run.run(model, tokens).states[:, LENGTH // 2 :].square().mean())
        assert relative(found["nothing"][1], whole) < 1e-12, "cut into calls, not truncated"
        names = list(found)
        for number, name in enumerate(names):
            assert torch.equal(found[name][0], found["nothing"][0]), "detaching changed a value"
            for other in names[:number]:
                apart = float((found[name][1] - found[other][1]).norm() / whole.norm())
                assert apart > 1e-4, f"detaching {name} and {other} give the same gradient"
