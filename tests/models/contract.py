"""The contract of an architecture under a solver, as checks that raise AssertionError where it is broken.

Each takes (architecture class, settings, solver settings, seed), so that it can be applied to what is registered, and
to deliberately broken architectures, which it must catch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.models import Architecture, ArchitectureConfig
from pipeline.solvers import Solver, SolverConfig, Unrolled, sequential
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.unrolled import FREEZE_SHARE
from tests.models import oracles
from tests.models.cases import (
    LENGTH,
    ROWS,
    assert_close,
    interval_of,
    make_model,
    make_solver,
    make_starts,
    make_tokens,
    random,
    random_cuts,
    splits,
    tolerance,
)

Check = Callable[[type[Architecture], ArchitectureConfig, SolverConfig, int], None]

CHECKS: list[Check] = []

GRADIENT_TOLERANCE = 1e-10  # relative, in float64


def exact_prefix(cls: type[Architecture], solver: SolverConfig) -> int:
    """Return how many states of a document are those of the exact recurrence (architectures and solvers say why)."""
    if solver.name == "unrolled":
        return solver.passes - (0 if cls.begins_plain else 1)
    if solver.name == "interleaved":
        return max(solver.subsets, 2 if cls.begins_plain else 1)
    return LENGTH if solver.name == "parallel" or solver.interval == 1 else 1


def expected_weights(solver: SolverConfig) -> list[float]:
    """Return the weight in the loss of each pass that can be told from the one before, in a row of LENGTH."""
    if solver.name == "interleaved":
        return [1 / (1 + solver.subsets), solver.subsets / (1 + solver.subsets)]
    if solver.name != "unrolled":
        return [1.0]
    if solver.loss == "mean":
        return [1 / solver.passes] * solver.passes
    if solver.loss == "plain_and_fed" and solver.passes > 1:
        return [1.0, *[solver.fed_loss_weight / (solver.passes - 1)] * (solver.passes - 1)]
    return [0.0] * (solver.passes - 1) + [1.0]


def contract(check: Check) -> Check:
    """File a check among those that every case must pass."""
    CHECKS.append(check)
    return check


def setup(
    cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int, **changes: object
) -> tuple[Architecture, Solver, Tensor]:
    return make_model(cls, config, seed), make_solver(solver, **changes), make_tokens(config, seed)


def unit_of(solver: SolverConfig) -> int:
    """Return a multiple at which document starts are aligned with the solver, if a row has room for one."""
    interval = interval_of(solver)
    return interval if interval < LENGTH else 4


def starts_to_try(solver: SolverConfig, seed: int) -> Iterator[Tensor]:
    """Yield document starts: anywhere; aligned with the interval; some rows aligned, others not."""
    anywhere, aligned = make_starts(seed), make_starts(seed, unit=unit_of(solver))
    yield anywhere
    yield aligned
    yield torch.cat([aligned[:1], anywhere[1:2], torch.zeros_like(aligned[:1])])


def run_in_calls(
    model: Architecture,
    solver: Solver,
    tokens: Tensor,
    cuts: list[int],
    starts: Tensor | None = None,
    capacity: int | None = None,
) -> Tensor:
    """Return the states of a sequence that is computed in one call between each two of ``cuts``."""
    carry = solver.new_carry(model, tokens.shape[0], capacity=capacity)
    states = []
    for begin, end in pairwise(cuts):
        part = None if starts is None else starts[:, begin:end]
        solution = solver.run(model, tokens[:, begin:end], part, carry)
        assert solution.carry is not None, "a carry was given, none came back"
        carry = solution.carry
        assert carry.length == end, f"the carry counts {carry.length} positions after {end}"
        states.append(solution.states)
    return torch.cat(states, dim=1)


# ---------------------------------------------------------------- states


@contract
@torch.no_grad()
def check_oracle(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """States and logits are those of the equations."""
    model, run, tokens = setup(cls, config, solver, seed)
    references = oracles.pass_states(model.state_dict(), config, tokens, solver)
    solution = run.run(model, tokens)
    assert solution.carry is None
    assert_close(solution.states, references[-1])
    assert_close(model.readout(solution.states), oracles.logits(model.state_dict(), config, references[-1]), "logits")
    weights = expected_weights(solver)
    assert sum(weight for weight in weights if weight) == pytest.approx(
        sum(weight for _, weight in solution.loss_terms)
    )
    trained = [(reference, weight) for reference, weight in zip(references, weights, strict=True) if weight]
    for (found, weight), (reference, expected) in zip(solution.loss_terms, trained, strict=True):
        assert weight == pytest.approx(expected)
        assert_close(found, reference, "states that are trained")


@contract
@torch.no_grad()
def check_oracle_on_documents(
    cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int
) -> None:
    """In a row of documents each has the states that the equations give it alone."""
    model, run, tokens = setup(cls, config, solver, seed)
    starts = make_starts(seed)
    reference = oracles.states(model.state_dict(), config, tokens, solver, starts)
    assert_close(run.run(model, tokens, starts).states, reference)


@contract
@torch.no_grad()
def check_exact_prefix(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """As many states are those of the exact recurrence as the solver and the architecture promise, and no more."""
    model, run, tokens = setup(cls, config, solver, seed)
    exact = sequential(run).run(model, tokens).states
    error = (run.run(model, tokens).states - exact).abs().amax(dim=-1)
    promised = min(LENGTH, exact_prefix(cls, solver))
    assert float(error[:, :promised].max() if promised else 0) <= tolerance(exact), f"{promised} states are promised"
    if promised < LENGTH:
        assert bool((error[:, promised] > 1e-9).all()), f"state {promised} is exact, which is not promised"


@contract
@torch.no_grad()
def check_causality(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """A token changes its own state and none before, to the last bit."""
    model, run, tokens = setup(cls, config, solver, seed)
    before = run.run(model, tokens).states
    for position in range(LENGTH):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % config.vocab_size
        after = run.run(model, changed).states
        assert torch.equal(after[:, :position], before[:, :position]), f"token {position} changed a state before it"
        differs = (after[:, position] - before[:, position]).abs().amax(dim=-1)
        assert bool((differs > 1e-6).all()), f"token {position} did not change its own state"
        if position + 1 < LENGTH:
            later = (after[:, position + 1 :] - before[:, position + 1 :]).abs().amax(dim=(1, 2))
            assert bool((later > 1e-9).all()), f"token {position} changed no later state"


@contract
@torch.no_grad()
def check_appending(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Tokens appended to a sequence leave its states as they are."""
    model, run, tokens = setup(cls, config, solver, seed)
    whole = run.run(model, tokens).states
    for length in range(1, LENGTH):
        assert_close(run.run(model, tokens[:, :length]).states, whole[:, :length], f"first {length} states")


@contract
@torch.no_grad()
def check_decoding(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Decoding gives the states of teacher forcing, wherever the sequence is cut into calls."""
    model, run, tokens = setup(cls, config, solver, seed)
    whole = run.run(model, tokens).states
    if not splits(solver):
        check_prefills(model, run, config, tokens, solver)
        whole = sequential(run).run(model, tokens).states
    cuts = [list(range(LENGTH + 1))]
    if splits(solver):
        cuts += [[0, cut, LENGTH] for cut in range(1, LENGTH)]
        cuts += [[0, LENGTH], *(random_cuts(31 * seed + draw) for draw in range(3))]
    for capacity in (None, LENGTH, LENGTH + 3):
        for cut in cuts if capacity != LENGTH else cuts[:1] + cuts[LENGTH:]:
            found = run_in_calls(model, run, tokens, cut, capacity=capacity)
            assert_close(found, whole, f"states of calls {cut} with capacity {capacity}")


def check_prefills(
    model: Architecture, run: Solver, config: ArchitectureConfig, tokens: Tensor, solver: SolverConfig
) -> None:
    """A prompt is computed in the solver's order, what follows it token by token in the exact recurrence."""
    for prefill in (2, 5, LENGTH):
        reference = oracles.decoded_states(model.state_dict(), config, tokens, solver, prefill)
        for capacity in (None, LENGTH):
            found = run_in_calls(model, run, tokens, [0, *range(prefill, LENGTH + 1)], capacity=capacity)
            assert_close(found, reference, f"states after a prompt of {prefill} with capacity {capacity}")


@contract
@torch.no_grad()
def check_batch(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """A row's states depend neither on the other rows nor on its place among them."""
    model, run, tokens = setup(cls, config, solver, seed)
    order = torch.randperm(ROWS, generator=random(seed))
    for starts in (None, make_starts(seed)):
        whole = run.run(model, tokens, starts).states
        for row in range(ROWS):
            where = slice(row, row + 1)
            alone = run.run(model, tokens[where], None if starts is None else starts[where]).states
            assert_close(alone, whole[where], f"row {row} alone")
        mixed = run.run(model, tokens[order], None if starts is None else starts[order]).states
        assert_close(mixed, whole[order], "rows in another order")


@contract
@torch.no_grad()
def check_documents(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Packed documents have the states that the same solver gives them alone, in one call or in several."""
    model, run, tokens = setup(cls, config, solver, seed)
    for starts in starts_to_try(solver, seed):
        alone = each_alone(model, run, tokens, starts)
        assert_close(run.run(model, tokens, starts).states, alone, f"documents at {starts.tolist()}")
        calls = [(list(range(LENGTH + 1)), LENGTH)]
        if splits(solver):
            calls += [(random_cuts(seed), None), (random_cuts(seed + 1), LENGTH)]
        else:
            alone = each_alone(model, sequential(run), tokens, starts)
        for cuts, capacity in calls:
            found = run_in_calls(model, run, tokens, cuts, starts, capacity)
            assert_close(found, alone, f"documents at {starts.tolist()} in calls {cuts}, capacity {capacity}")


def each_alone(model: Architecture, run: Solver, tokens: Tensor, starts: Tensor) -> Tensor:
    """Return the states of rows of documents, each document computed by itself."""
    alone = torch.zeros(*tokens.shape, model.state_width, dtype=torch.float64)
    for row in range(ROWS):
        for begin, end in oracles.document_borders(starts[row].tolist()):
            alone[row, begin:end] = run.run(model, tokens[row : row + 1, begin:end]).states[0]
    return alone


@contract
@torch.no_grad()
def check_left_padding(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Rows padded on the left have the states of the rows without padding."""
    model, run, tokens = setup(cls, config, solver, seed)
    padding = torch.tensor([0, 2, 5])
    every_token = list(range(LENGTH + 1))
    cuts = [[0, LENGTH], every_token]
    if splits(solver):
        cuts += [[0, *range(7, LENGTH + 1)], [0, 3, 4, LENGTH]]
    for capacity in (None, LENGTH):
        for cut in cuts:
            order = sequential(run) if cut == every_token and not splits(solver) else run
            alone = [order.run(model, tokens[row : row + 1, pad:]).states for row, pad in enumerate(padding.tolist())]
            carry = run.new_carry(model, ROWS, capacity=capacity, starts=padding)
            states = []
            for begin, end in pairwise(cut):
                solution = run.run(model, tokens[:, begin:end], carry=carry)
                states.append(solution.states)
                carry = solution.carry
            found = torch.cat(states, dim=1)
            assert bool(found.isfinite().all())
            for row, pad in enumerate(padding.tolist()):
                assert_close(found[row : row + 1, pad:], alone[row], f"row padded by {pad}, calls {cut}")


@contract
@torch.no_grad()
def check_float32(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Single precision is double precision up to its rounding."""
    model, run, tokens = setup(cls, config, solver, seed)
    exact = run.run(model, tokens).states
    single = run.run(model.float(), tokens).states
    assert single.dtype == torch.float32
    assert_close(single, exact, dtype=torch.float32)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the error over that of the exact values."""
    error = (found.detach().double() - exact.double()).square().mean().sqrt()
    return float(error / exact.double().square().mean().sqrt())


@contract
def check_bfloat16(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Under bfloat16 autocast forward and backward run, and stay close; rotation tables stay float32."""
    model, run, tokens = setup(cls, config, solver, seed)
    model = model.float()
    run.adapt(model)
    with torch.no_grad():
        exact = run.run(model, tokens).states
    index = torch.arange(LENGTH)[None]
    tables = [model.prepare(tokens, index, None)[0].values[name] for name in ("cos", "sin")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run.run(model, tokens).states
        values = model.prepare(tokens, index, None)[0].values
        loss = model.readout(found).float().logsumexp(dim=-1).sum()
    for name, table in zip(("cos", "sin"), tables, strict=True):
        assert values[name].dtype == torch.float32
        assert torch.equal(values[name], table)
    # Roundings are independent and relative to the values they strike: the root mean square counts, and grows with the
    # root of their number, for which the positions of the recurrence stand.
    limit = torch.finfo(torch.bfloat16).eps * LENGTH**0.5
    error = relative_error(found, exact)
    assert 0 < error <= limit, f"off by {error:.3g}, of which rounding explains {limit:.3g}"
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        if not splits(solver):
            exact = sequential(run).run(model, tokens).states
        cuts = [0, *range(5 if splits(solver) else 1, LENGTH + 1)]
        for capacity in (None, LENGTH):
            decoded = run_in_calls(model, run, tokens, cuts, capacity=capacity)
            error = relative_error(decoded, exact)
            assert error <= limit, f"decoding is off by {error:.3g}, of which rounding explains {limit:.3g}"
    loss.backward()
    asleep = set() if run.feeding else {id(parameter) for parameter in model.dormant_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in asleep:
            assert parameter.grad is not None, f"{name} has no gradient"
            assert bool(parameter.grad.isfinite().all()), name


# ---------------------------------------------------------------- gradients


def loss_of(logits: Tensor, seed: int) -> Tensor:
    """Return a loss in which every logit has a weight of its own."""
    weights = torch.randn(logits.shape, generator=random(seed + 99), dtype=torch.float64)
    return (logits * weights).mean() + logits.logsumexp(dim=-1).mean()


def gradients(model: Architecture, run: Solver, tokens: Tensor, starts: Tensor | None, seed: int) -> dict[str, Tensor]:
    """Return the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss_of(model.readout(run.run(model, tokens, starts).states), seed).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_gradients_close(found: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Raise AssertionError unless every gradient is equal to ``GRADIENT_TOLERANCE`` of its norm.

    A gradient that is zero by the equations (of queries that see one key alone) is compared with that of the whole.
    """
    for name in found.keys() ^ reference.keys():  # without a path to the parameter, or with one that carries zeros
        assert not bool({**found, **reference}[name].any()), f"only one side has a gradient of {name}"
    whole = float(torch.stack([gradient.norm() for gradient in reference.values()]).norm())
    for name in found.keys() & reference.keys():
        gradient = reference[name]
        error, limit = float((found[name] - gradient).norm()), GRADIENT_TOLERANCE * float(gradient.norm())
        limit += torch.finfo(torch.float64).eps * whole
        assert error <= limit, f"gradient of {name} off by {error:.3g}, allowed {limit:.3g}"


@contract
def check_gradients(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Gradients are those of plain autograd through the equations, for every parameter."""
    model, run, tokens = setup(cls, config, solver, seed)
    tokens = tokens[:2]
    for starts in (None, make_starts(seed, rows=2)):
        found = gradients(model, run, tokens, starts, seed)
        leaves = {name: value.clone().requires_grad_() for name, value in model.state_dict().items()}
        states = oracles.states(leaves, config, tokens, solver, starts)
        loss_of(oracles.logits(leaves, config, states), seed).backward()
        reference = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        assert_gradients_close(found, reference)


@contract
def check_finite_differences(
    cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int
) -> None:
    """Gradients are the slopes of the loss, along random directions in all parameters and in some alone."""
    model, run, tokens = setup(cls, config, solver, seed)
    found = gradients(model, run, tokens, None, seed)
    names = sorted(found)
    some = [names[int(torch.randint(len(names), (), generator=random(seed + draw)))] for draw in range(3)]
    parameters = dict(model.named_parameters())

    def loss() -> float:
        return float(loss_of(model.readout(run.run(model, tokens).states), seed))

    step = 1e-5
    with torch.no_grad():
        for number, chosen in enumerate([names, *([name] for name in some)]):
            generator = random(seed + 17 * number)
            direction = {
                name: torch.randn(parameters[name].shape, generator=generator, dtype=torch.float64) for name in chosen
            }
            size = float(torch.stack([each.norm() for each in direction.values()]).norm())
            slope = sum(float((found[name] * each).sum()) for name, each in direction.items()) / size
            values = []
            for sign in (step, -2 * step):
                for name, each in direction.items():
                    parameters[name].add_(each, alpha=sign / size)
                values.append(loss())
            for name, each in direction.items():
                parameters[name].add_(each, alpha=step / size)
            measured = (values[0] - values[1]) / (2 * step)
            # Rounding of the loss over the step, and the third derivative over its square.
            limit = 1e-10 + 1e-7 * sum(float(found[name].norm()) for name in chosen)
            assert abs(measured - slope) <= limit, f"{chosen}: slope {measured:.9g}, gradient says {slope:.9g}"


def segment_settings(solver: SolverConfig) -> list[dict[str, int]]:
    """Return settings of activation checkpointing to try."""
    return [{"segment_length": length} for length in (0, 1, 2, 3, 7, 100)] if solver.name == "chunked" else [{}]


@contract
def check_activation_checkpointing(
    cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int
) -> None:
    """Activation checkpointing changes neither states nor gradients, to the last bit.

    The fast loop takes the sums of its gradients over other groups of positions: they agree to rounding.
    """
    if isinstance(solver, ChunkedConfig) and solver.loop == "fast":
        check_activation_checkpointing(cls, config, replace(solver, loop="autograd"), seed)
    model, run, tokens = setup(cls, config, solver, seed)
    for starts in (None, make_starts(seed)):
        run.adapt(model)
        states = run.run(model, tokens, starts).states.detach()
        expected = gradients(model, run, tokens, starts, seed)
        for settings in segment_settings(solver)[:: 1 if starts is None else 3]:
            again = make_solver(solver, activation_checkpointing=True, **settings)
            again.adapt(model)
            assert torch.equal(again.run(model, tokens, starts).states.detach(), states), f"states at {settings}"
            found = gradients(model, again, tokens, starts, seed)
            assert found.keys() == expected.keys()
            for name, gradient in found.items():
                what = f"gradient of {name} at {settings}"
                if isinstance(solver, ChunkedConfig) and solver.loop == "fast":
                    largest = max(expected.values(), key=lambda each: float(each.abs().max()))
                    assert float((gradient - expected[name]).abs().max()) <= tolerance(largest), what
                else:
                    assert torch.equal(gradient, expected[name]), what


@contract
def check_gradient_hooks(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Every parameter in training gets its gradient once a backward, with activation checkpointing too."""
    checkpointing = [{"activation_checkpointing": True, **settings} for settings in segment_settings(solver)[::2]]
    for changes in [{}, *checkpointing]:
        model, run, tokens = setup(cls, config, solver, seed, **changes)
        run.adapt(model)
        asleep = set() if run.feeding else {id(parameter) for parameter in model.dormant_parameters()}
        counts = {
            name: 0
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in asleep
        }

        def count(name: str, parameter: Tensor, counts: dict[str, int] = counts) -> None:
            counts[name] += 1

        for name, parameter in model.named_parameters():
            if name in counts:
                parameter.register_post_accumulate_grad_hook(partial(count, name))
        for backward, starts in ((1, None), (2, make_starts(seed))):
            gradients(model, run, tokens, starts, seed)
            wrong = {name: number for name, number in counts.items() if number != backward}
            assert not wrong, f"gradients after backward {backward} with {changes}: {wrong}"


@contract
def check_dormant(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Without feedback, the parameters called dormant are exactly those that no gradient reaches; with it, none."""
    model, run, tokens = setup(cls, config, solver, seed)
    reached = gradients(model, run, tokens, None, seed).keys()
    dormant = {id(parameter) for parameter in model.dormant_parameters()}
    expected = dormant if not run.feeding else set()
    missed = {name for name, parameter in model.named_parameters() if name not in reached}
    assert missed == {name for name, parameter in model.named_parameters() if id(parameter) in expected}
    run.adapt(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    never = missed if not run.feeds_back else set()
    assert frozen == never, "adapt must freeze what is never fed anything, and nothing else"


# ---------------------------------------------------------------- bookkeeping


@contract
@torch.no_grad()
def check_flops(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """FLOPs a token are those of the shapes: 2 a weight and use, 4 head_dim a head and visible key."""
    model, run, _ = setup(cls, config, solver, seed)
    for length in (1, 2, 3, 7, LENGTH, 100):
        expected = sum(flops_of(model, solver, length)) / length
        found = run.flops_per_token(model, length)
        assert abs(found - expected) <= 1e-12 * expected, f"{found} FLOPs a token of {length}, not {expected}"


def flops_of(model: Architecture, solver: SolverConfig, length: int) -> tuple[float, float]:
    """Return the FLOPs of a row in weights and in attention, counted from shapes pass by pass."""
    config = model.config
    each = oracles.linear_flops(model.state_dict(), config)
    prepared, attention = oracles.attention_flops(config, length)
    once = each["prepare"] * length
    fed = each["fed_position"] + each["fed_state"]
    if solver.name == "parallel":
        return once + (each["advance"] + each["readout"]) * length, prepared + attention
    once += each["prepare_feedback"] * length
    if solver.name == "chunked":
        chunks = -(-length // solver.interval)
        total = once + (each["advance"] + each["fed_position"] + each["readout"]) * length + each["fed_state"] * chunks
        return total, prepared + attention
    if solver.name == "interleaved":
        if solver.refresh_keys_values:
            fed += each["fed_state"] * min(solver.subsets, length)
        return once + (2 * each["advance"] + 2 * each["readout"] + fed) * length, prepared + 2 * attention
    if solver.passes == 1:
        once -= each["prepare_feedback"] * length
    linear, seen, passes = once + each["advance"] * length, prepared + attention, 1
    for number in range(2, solver.passes + 1):
        done = exact_prefix(type(model), replace(solver, passes=number - 1))
        if done >= length:
            break
        passes = number
        if done < FREEZE_SHARE * length:
            done = 0
        linear += (each["advance"] + fed) * (length - done)
        seen += attention - (oracles.attention_flops(config, done)[1] if done else 0)
    logits = sum(weight > 0 for weight in Unrolled(solver).weights(passes))
    if solver.convergence_weight and passes > 1:
        linear += 2 * fed * length
    return linear + logits * each["readout"] * length, seen


@contract
@torch.no_grad()
def check_flops_run(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """The products with weights that run are those that are counted."""
    model, run, tokens = setup(cls, config, solver, seed)
    model.requires_grad_(False)  # the counter would look for gradient functions
    with FlopCounterMode(display=False) as counter:
        for states, _ in run.run(model, tokens).loss_terms:
            model.readout(states)
    counts = counter.get_flop_counts()["Global"]
    measured = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    claimed = run.flops_per_token(model, LENGTH) * LENGTH - flops_of(model, solver, LENGTH)[1]
    if getattr(solver, "convergence_weight", 0) and run.feeding:  # it is computed where there are gradients
        each = oracles.linear_flops(model.state_dict(), config)
        claimed -= 2 * (each["fed_position"] + each["fed_state"]) * LENGTH
    assert measured == round(claimed) * ROWS, f"{measured} FLOPs ran, {round(claimed) * ROWS} are claimed"


@contract
def check_parts(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """The parts' parameters add up, each counted once; all but embeddings and matrices go undecayed."""
    model = make_model(cls, config, seed)
    assert sum(model.parts().values()) == sum(parameter.numel() for parameter in model.parameters())
    undecayed = {id(parameter) for parameter in model.undecayed_parameters()}
    for name, parameter in model.named_parameters():
        vector = parameter.dim() == 1 or name.startswith(("embedding.", "value_embeddings."))
        assert (id(parameter) in undecayed) == vector, name


@contract
@torch.no_grad()
def check_init(cls: type[Architecture], config: ArchitectureConfig, solver: SolverConfig, seed: int) -> None:
    """Drawing weights fills every parameter, the same way from the same seed, with the spread that is asked for."""
    drawn = []
    for fill in (float("nan"), 7.0):
        model = cls(replace(config, embedding_std=0.5, hidden_std_factor=0.25))
        for parameter in model.parameters():
            parameter.fill_(fill)
        model.init_weights(random(seed))
        drawn.append(dict(model.named_parameters()))
    for name, parameter in drawn[0].items():
        assert torch.equal(parameter, drawn[1][name]), f"{name} is not drawn, or not from the generator"
        assert bool(parameter.isfinite().all()), name
    embedding = drawn[0]["embedding.weight"]
    assert abs(float(embedding.std()) / 0.5 - 1) < 5 / (2 * embedding.numel()) ** 0.5
