"""What is CRT's own: the plain transformer inside it, the first token's correction, and what K passes leave out."""

import math
from dataclasses import fields, replace
from itertools import pairwise
from statistics import median

import pytest
import torch

from pipeline.models import CRT, Architecture, Transformer
from pipeline.models.base import build
from pipeline.models.crt import CRTConfig
from pipeline.models.transformer import TransformerConfig
from pipeline.solvers import Solver
from tests.models.cases import (
    LENGTH,
    ROWS,
    SEEDS,
    assert_close,
    make_model,
    make_solver,
    make_starts,
    make_tokens,
    random,
    solver_config,
    starts_of,
    tolerance,
)
from tests.models.contract import loss_of

VARIANTS = CRT.variants()
PLAIN = VARIANTS["plain"]


def solver(name: str, **settings) -> Solver:
    return make_solver(solver_config(name, **settings))


EXACT, PARALLEL = solver("chunked", interval=1), solver("parallel")
FEEDING = {
    "chunked1": EXACT,
    "chunked3": solver("chunked", interval=3),
    "unrolled3": solver("unrolled", passes=3, loss="mean", convergence_weight=0.1),
    "unrolled13": solver("unrolled", passes=LENGTH + 1, loss="mean"),
    "interleaved2": solver("interleaved", subsets=2),
    "interleaved12": solver("interleaved", subsets=LENGTH),
}


def plain_of(model: Architecture) -> Transformer:
    """Return the plain transformer with the same settings and weights."""
    settings = {field.name: getattr(model.config, field.name) for field in fields(TransformerConfig)}
    plain = Transformer(TransformerConfig(**{**settings, "architecture": "transformer"})).double()
    weights = model.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    return plain.eval()


def own_names(model: Architecture) -> set[str]:
    """Return the names of the weights that a plain transformer of the same settings does not have."""
    return model.state_dict().keys() - plain_of(model).state_dict().keys()


def passes_of(model, tokens, passes, starts=None):
    """Return the states of every pass."""
    terms = solver("unrolled", passes=passes, loss="mean").run(model, tokens, starts).loss_terms
    assert len(terms) == passes
    return [states for states, _ in terms]


def shifted(states: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Return the state of the position before, zero at a document's first."""
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
    if starts is None:
        return before
    return torch.where((starts == torch.arange(starts.shape[1]))[..., None], 0.0, before)


def prepared(model, tokens, starts=None):
    return model.prepare_feedback(model.prepare(tokens, torch.arange(tokens.shape[1])[None], starts)[0])


def gradient_vector(model, loss, *, keep: bool = False) -> torch.Tensor:
    """Return the gradients of ``loss`` for all parameters, zero where there is none; ``keep`` the graph for more."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
    )


def relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


# ---------------------------------------------------------------- the plain transformer inside


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_pass_is_the_plain_transformer(variant):
    """To the last bit: states, logits and gradients; the correction has no gradient."""
    for seed in SEEDS:
        model, tokens = make_model(CRT, VARIANTS[variant], seed), make_tokens(VARIANTS[variant], seed)
        plain = plain_of(model)
        assert own_names(model) == {name for name in model.state_dict() if name.startswith("correction.")}
        for starts in (None, make_starts(seed)):
            reference = PARALLEL.run(plain, tokens, starts).states
            loss_of(plain.readout(reference), seed).backward()
            for run in (solver("unrolled", passes=1), PARALLEL):
                states = run.run(model, tokens, starts).states
                assert torch.equal(states, reference)
                assert torch.equal(model.readout(states), plain.readout(reference))
                loss_of(model.readout(states), seed).backward()
                for name, parameter in model.named_parameters():
                    if name.startswith("correction."):
                        assert parameter.grad is None, name
                    else:
                        assert torch.equal(parameter.grad, plain.get_parameter(name).grad), name
                model.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_zero_correction_is_the_plain_transformer_in_every_order(variant):
    """So a pretrained transformer becomes a CRT that begins exactly where it was."""
    for seed in SEEDS:
        model, tokens = make_model(CRT, VARIANTS[variant], seed), make_tokens(VARIANTS[variant], seed)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        model.mute_feedback()
        changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
        assert changed == {"correction.down.weight", "correction.down.bias"}
        for starts in (None, make_starts(seed)):
            reference = PARALLEL.run(plain_of(model), tokens, starts).states
            for name, run in FEEDING.items():
                for states, _ in run.run(model, tokens, starts).loss_terms:
                    assert_close(states, reference, name)
                    assert name != "unrolled3" or torch.equal(states, reference)


@pytest.mark.parametrize("run", FEEDING.values(), ids=FEEDING)
def test_a_zero_correction_learns(run):
    """Its last layer has a gradient, which is what ends the silence."""
    model, tokens = make_model(CRT, PLAIN), make_tokens(PLAIN)
    model.mute_feedback()
    loss_of(model.readout(run.run(model, tokens).states), 0).backward()
    for name in ("weight", "bias"):
        assert bool((model.correction.down.get_parameter(name).grad != 0).all())


@torch.no_grad()
def test_what_is_carried_is_one_state_and_the_plain_transformers_keys_and_values():
    for variant, config in VARIANTS.items():
        model, tokens = make_model(CRT, config), make_tokens(config)
        plain = plain_of(model)
        for run in (EXACT, solver("unrolled", passes=2), solver("interleaved", subsets=2)):
            carry = run.run(model, tokens, carry=run.new_carry(model, ROWS)).carry
            reference = PARALLEL.run(plain, tokens, carry=PARALLEL.new_carry(plain, ROWS)).carry
            assert carry.register.states.shape == (ROWS, 1, config.width), variant
            assert carry.memory.keys() == reference.memory.keys() == {"blocks"}
            for kind in ("keys", "values"):
                kept, expected = (getattr(each.memory["blocks"], kind) for each in (carry, reference))
                assert [each.shape for each in kept] == [each.shape for each in expected], variant


# ---------------------------------------------------------------- K passes and the recurrence


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_row_of_t_takes_t_plus_1_passes(variant):
    """After K passes K - 1 states are exact, since the first pass corrects not even the first token: K = T is short."""
    config = VARIANTS[variant]
    for length in (1, 2, 3, 6):  # the error of K = T falls with K, to rounding in longer rows
        for seed in SEEDS:
            model, tokens = make_model(CRT, config, seed), make_tokens(config, seed, length=length)
            exact = EXACT.run(model, tokens).states
            for passes in (length + 1, length + 2, length + 9):
                assert_close(solver("unrolled", passes=passes).run(model, tokens).states, exact, f"{passes} passes")
            error = (solver("unrolled", passes=length).run(model, tokens).states - exact).abs().amax(dim=(0, 2))
            assert float(error[: length - 1].max() if length > 1 else 0) <= tolerance(exact)
            assert float(error[-1]) > 100 * tolerance(exact), "K = T is exact"


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_packed_documents_take_as_many_passes_as_the_longest(variant):
    starts = torch.stack([starts_of(row, LENGTH) for row in ([0, 3, 8], [0, 6, 7], [0, 1, 2, 7])])
    within, longest = torch.arange(LENGTH) - starts, 6
    for seed in SEEDS:
        model, tokens = make_model(CRT, VARIANTS[variant], seed), make_tokens(VARIANTS[variant], seed)
        exact = EXACT.run(model, tokens, starts).states
        assert_close(solver("unrolled", passes=longest + 1).run(model, tokens, starts).states, exact)
        error = (solver("unrolled", passes=longest).run(model, tokens, starts).states - exact).abs().amax(dim=-1)
        assert float(error[within < longest - 1].max()) <= tolerance(exact)
        assert bool((error[within == longest - 1] > 100 * tolerance(exact)).all())


class Uncorrected(CRT):
    """Leaves the first token as it is, like the author's older sequential loop."""

    def initial_feedback(self, rows):
        return replace(super().initial_feedback(rows), fed=torch.zeros(1, 1, 1, dtype=torch.bool))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_first_token_is_corrected(variant):
    """A recurrence that leaves it as it is matches no number of passes, not even in the limit."""
    config = VARIANTS[variant]
    for seed in SEEDS:
        model, tokens = make_model(CRT, config, seed), make_tokens(config, seed)
        older = make_model(Uncorrected, config, seed)
        reference = EXACT.run(older, tokens).states
        assert_close(reference[:, :1], PARALLEL.run(plain_of(model), tokens).states[:, :1])
        for passes in (1, 2, 3, 6, LENGTH, LENGTH + 1):
            error = (solver("unrolled", passes=passes).run(model, tokens).states - reference).abs().amax(dim=(1, 2))
            assert bool((error > 1e-2).all()), f"{passes} passes match to {float(error.min()):.2g}"


@pytest.mark.parametrize("variant", [name for name, config in VARIANTS.items() if not config.embedding_norm])
@torch.no_grad()
def test_the_first_state_by_hand(variant):
    """It is that of a plain transformer whose embeddings have been corrected with z = 0."""
    config = VARIANTS[variant]
    for seed in SEEDS:
        model, tokens = make_model(CRT, config, seed), make_tokens(config, seed)
        net, plain = model.correction, plain_of(model)
        table = model.embedding.weight
        hidden = net.norm(table) @ net.up.weight.T + net.up.bias
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        plain.embedding.weight.copy_(table + hidden @ net.down.weight.T + net.down.bias)
        reference = PARALLEL.run(plain, tokens).states[:, :1]
        for run in (EXACT, solver("unrolled", passes=2), solver("interleaved", subsets=2)):
            assert_close(run.run(model, tokens).states[:, :1], reference)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_every_pass_begins_from_the_embedding(variant):
    """The correction is not cumulative: pass k takes in e + c(z + e), whatever pass k - 1 took in."""
    config, passes = VARIANTS[variant], 5
    for seed in SEEDS:
        model, tokens = make_model(CRT, config, seed), make_tokens(config, seed)
        for starts in (None, make_starts(seed)):
            inputs, states = prepared(model, tokens, starts), passes_of(model, tokens, passes, starts)
            e = cumulative = inputs.values["x"]
            for before, after in pairwise(states):
                correction = model.correction(shifted(before, starts) + e)
                found, _ = model.advance(inputs.with_values(x=e + correction), None)
                assert_close(after, found)
                cumulative = cumulative + correction
                if before is not states[0]:  # in the second pass there is nothing to accumulate yet
                    other, _ = model.advance(inputs.with_values(x=cumulative), None)
                    assert float((after - other).abs().max()) > 1e-2


# ---------------------------------------------------------------- gradients


LOSSES = {
    "sum": lambda model, states, seed: states.sum(),
    "logits": lambda model, states, seed: loss_of(model.readout(states), seed),
    "last state": lambda model, states, seed: states[:, -1].square().sum(),
    "one number": lambda model, states, seed: states[0, -1, 3],
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_enough_passes_have_the_gradients_of_the_recurrence(variant, loss):
    """Whatever the loss on the last states, and for every parameter; K = T has not."""
    config, length = VARIANTS[variant], 6
    for seed in SEEDS:
        model, tokens = make_model(CRT, config, seed), make_tokens(config, seed, length=length)
        exact = gradient_vector(model, loss(model, EXACT.run(model, tokens).states, seed))
        for passes in (length, length + 1, length + 4):
            states = solver("unrolled", passes=passes).run(model, tokens).states
            error = relative(gradient_vector(model, loss(model, states, seed)), exact)
            assert (error <= 1e-13) == (passes > length), f"{passes} passes: off by {error:.2g}"


# A published table: in a toy model (float64, the paper's layers, 9 tokens) with loss = sum of all states, so far is the
# gradient of K passes from that of full backpropagation through time, relative to its norm.
PUBLISHED_GRADIENT_ERRORS = {1: 0.49, 2: 7e-2, 3: 9e-3, 5: 1.6e-4, 9: 3e-8}
PUBLISHED_STATE_ERRORS = {9: 5e-8, 10: 9e-16}
PUBLISHED_DIFFERENCE_OF_AN_UNCORRECTED_FIRST_TOKEN = 0.52
TOY = replace(
    VARIANTS["layernorm"], qk_norm=False, embedding_std=1.0, hidden_init="uniform", hidden_std_factor=1 / math.sqrt(3)
)


def toy(seed: int) -> CRT:
    """Return a CRT that starts as PyTorch's own layers do: uniform in +-1/sqrt(fan_in), biases too."""
    model = CRT(TOY).double().eval()
    generator = random(seed)
    model.init_weights(generator)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            bound = module.in_features**-0.5
            torch.nn.init.uniform_(module.bias, -bound, bound, generator=generator)
    return model


def test_truncating_the_passes_errs_as_published():
    """The median over models is within a factor of two of every number, and each model's errors fall with K."""
    gradients: dict[int, list[float]] = {passes: [] for passes in (*PUBLISHED_GRADIENT_ERRORS, 10)}
    states: dict[int, list[float]] = {passes: [] for passes in gradients}
    uncorrected = []
    for seed in range(15):
        model, tokens = toy(seed), make_tokens(TOY, seed, length=9)
        exact = EXACT.run(model, tokens).states
        reference = gradient_vector(model, exact.sum())
        for passes in gradients:
            found = solver("unrolled", passes=passes).run(model, tokens).states
            gradients[passes].append(relative(gradient_vector(model, found.sum()), reference))
            states[passes].append((found - exact).abs().max().item())
        older = Uncorrected(TOY).double()
        older.load_state_dict(model.state_dict())
        uncorrected.append((EXACT.run(older, tokens).states - exact).abs().max().item())
    for errors in (gradients, states):
        for before, after in pairwise(errors.values()):
            assert all(later < earlier for earlier, later in zip(before, after, strict=True))
    for errors, published in ((gradients, PUBLISHED_GRADIENT_ERRORS), (states, PUBLISHED_STATE_ERRORS)):
        for passes, number in published.items():
            assert number / 2 < median(errors[passes]) < 2 * number, f"{passes} passes: {errors[passes]}"
    assert max(gradients[10]) < 1e-15
    number = PUBLISHED_DIFFERENCE_OF_AN_UNCORRECTED_FIRST_TOKEN
    assert number / 2 < median(uncorrected) < 2 * number


# ---------------------------------------------------------------- the convergence loss


@pytest.mark.parametrize("passes", [2, 3, 5])
def test_the_convergence_loss_by_hand(passes):
    """The mean square of what one more pass would change in the input; its target is held fixed."""
    for seed in SEEDS:
        for variant in ("plain", "layernorm", "nanochat"):
            model, tokens = make_model(CRT, VARIANTS[variant], seed), make_tokens(VARIANTS[variant], seed)
            starts = make_starts(seed) if seed else None
            penalty = solver("unrolled", passes=passes, convergence_weight=0.1).run(model, tokens, starts).penalty
            e = prepared(model, tokens, starts).values["x"]
            next_last, last = passes_of(model, tokens, passes, starts)[-2:]
            taken, following = (e + model.correction(shifted(states, starts) + e) for states in (next_last, last))
            reference = 0.1 * (following - taken.detach()).square().mean()
            assert penalty.item() == pytest.approx(reference.item(), rel=1e-12)
            found, expected = gradient_vector(model, penalty), gradient_vector(model, reference)
            assert relative(found, expected) <= 1e-12


class Watched(CRT):
    """Notes what every pass is fed."""

    def advance(self, inputs, feedback, memory=None):
        self.fed.append(feedback)
        return super().advance(inputs, feedback, memory)


def test_positions_that_stayed_plain_pay_no_convergence_loss():
    """With drawn prefixes it compares with what the last pass took in, under that pass's draw."""
    for seed in SEEDS:
        model, tokens = make_model(Watched, PLAIN, seed).train(), make_tokens(PLAIN, seed)
        model.fed = []
        solution = solver("unrolled", passes=3, convergence_weight=0.1, prefix=1.0).run(model, tokens)
        assert len(model.fed) == 3
        feedback = model.fed[-1]
        assert 0 < int(feedback.fed.sum()) < ROWS * LENGTH
        e = prepared(model, tokens).values["x"]
        taken, following = (e + model.correction(states + e) for states in (feedback.states, shifted(solution.states)))
        expected = 0.1 * ((following - taken.detach()) * feedback.fed).square().mean()
        assert solution.penalty.item() == pytest.approx(expected.item(), rel=1e-12)
        gradients = (gradient_vector(model, loss, keep=True) for loss in (solution.penalty, expected))
        assert relative(*gradients) <= 1e-12


def test_one_pass_has_no_convergence_loss():
    model, tokens = make_model(CRT, PLAIN), make_tokens(PLAIN)
    assert solver("unrolled", passes=1, convergence_weight=0.1).run(model, tokens).penalty is None
    assert solver("unrolled", passes=3).run(model, tokens).penalty is None


@torch.no_grad()
def test_the_recurrence_has_converged():
    """What the exact recurrence takes in is what it would take in again: enough passes have nothing to pay."""
    for seed in SEEDS:
        model, tokens = make_model(CRT, PLAIN, seed), make_tokens(PLAIN, seed)
        found = []
        with torch.enable_grad():
            for passes in (2, 3, 5, LENGTH + 1, LENGTH + 2):
                run = solver("unrolled", passes=passes, convergence_weight=1.0)
                found.append(run.run(model, tokens).penalty.item())
        assert found == sorted(found, reverse=True)
        assert found[-1] < 1e-25


# ---------------------------------------------------------------- sizes

# Published counts of parameters, by (blocks, width), of CRTs and of plain transformers with a vocabulary of 32,000.
CRT_COUNTS = {(5, 1120): 157_094_080, (1, 2048): 215_035_136, (6, 1024): 149_543_168}
TRANSFORMER_COUNTS = {(12, 768): 134_240_000, (6, 1088): 154_980_608}
PAPER = {
    "vocab_size": 32_000,
    "heads": 16,
    "norm": "layer",
    "ffn": "gelu",
    "linear_bias": True,
    "qk_norm": False,
    "tied_head": False,
    "head_bias": True,
}


@pytest.mark.parametrize(("size", "expected"), [*CRT_COUNTS.items(), *TRANSFORMER_COUNTS.items()], ids=str)
def test_published_counts(size, expected):
    kind, name = (CRTConfig, "crt") if size in CRT_COUNTS else (TransformerConfig, "transformer")
    layers, width = size
    with torch.device("meta"):
        model = build(kind(architecture=name, layers=layers, width=width, **PAPER))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize(("layers", "width"), CRT_COUNTS)
def test_a_token_costs_12_d_plus_8_squared_widths(layers, width):
    """Multiplications of decoding, attention and logits apart."""
    with torch.device("meta"):
        model = build(CRTConfig(architecture="crt", layers=layers, width=width, **PAPER))
    flops = model.flops(1)
    attention = 4 * width * layers  # one key
    assert flops.advance + flops.fed_position + flops.fed_state - attention == 2 * (12 * layers + 8) * width**2
