"""What is CRT's own: a correction of zero, that of the first token, and what K passes leave out."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
import torch

from pipeline.models import CRT
from pipeline.models.base import build
from pipeline.models.crt import CRTConfig
from pipeline.models.transformer import TransformerConfig
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
    shifted,
    solver,
    starts_of,
    tolerance,
    watched,
)
from tests.models.contract import loss_of

VARIANTS = CRT.variants()
PLAIN = VARIANTS["plain"]


# ---------------------------------------------------------------- a correction of zero


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_zero_correction_is_the_plain_transformer_in_every_order(variant):
    """So a pretrained transformer becomes a CRT that begins exactly where it was."""
    for seed in SEEDS:
        model, tokens = model_and_tokens(CRT, seed, variant)
        assert mute(model).keys() == {"correction.down.weight", "correction.down.bias"}
        for starts in (None, make_starts(seed)):
            reference = PARALLEL.run(plain_of(model), tokens, starts).states
            for name, run in FEEDING_SOLVERS.items():
                for states, _ in run.run(model, tokens, starts).loss_terms:
                    assert_close(states, reference, name)
                    assert name != "unrolled3" or torch.equal(states, reference)


@pytest.mark.parametrize("run", FEEDING_SOLVERS.values(), ids=FEEDING_SOLVERS)
def test_a_zero_correction_learns(run):
    """Its last layer has a gradient, which is what ends the silence."""
    model, tokens = model_and_tokens(CRT)
    model.mute_feedback()
    loss_of(model.readout(run.run(model, tokens).states), 0).backward()
    for name in ("weight", "bias"):
        assert bool((model.correction.down.get_parameter(name).grad != 0).all())


# ---------------------------------------------------------------- K passes and the recurrence


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_row_of_t_takes_t_plus_1_passes(variant):
    """After K passes K - 1 states are exact, since the first pass corrects not even the first token: K = T is short."""
    for length in (1, 2, 3, 6):  # the error of K = T falls with K, to rounding in longer rows
        for seed in SEEDS:
            model, tokens = model_and_tokens(CRT, seed, variant, length)
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
        model, tokens = model_and_tokens(CRT, seed, variant)
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
        model, tokens = model_and_tokens(CRT, seed, variant)
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
    for seed in SEEDS:
        model, tokens = model_and_tokens(CRT, seed, variant)
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
            model, tokens = model_and_tokens(CRT, seed, variant)
            starts = make_starts(seed) if seed else None
            penalty = solver("unrolled", passes=passes, convergence_weight=0.1).run(model, tokens, starts).penalty
            e = prepared(model, tokens, starts).values["x"]
            next_last, last = passes_of(model, tokens, passes, starts)[-2:]
            taken, following = (e + model.correction(shifted(states, starts) + e) for states in (next_last, last))
            reference = 0.1 * (following - taken.detach()).square().mean()
            assert penalty.item() == pytest.approx(reference.item(), rel=1e-12)
            found, expected = gradient_vector(model, penalty), gradient_vector(model, reference)
            assert relative(found, expected) <= 1e-12


def test_positions_that_stayed_plain_pay_no_convergence_loss():
    """With drawn prefixes it compares with what the last pass took in, under that pass's draw."""
    for seed in SEEDS:
        model, tokens = watched(CRT, PLAIN, seed).train(), make_tokens(PLAIN, seed)
        solution = solver("unrolled", passes=3, convergence_weight=0.1, prefix=1.0).run(model, tokens)
        assert len(model.calls) == 3
        _, feedback, *_ = model.calls[-1]
        assert 0 < int(feedback.fed.sum()) < ROWS * LENGTH
        e = prepared(model, tokens).values["x"]
        taken, following = (e + model.correction(states + e) for states in (feedback.states, shifted(solution.states)))
        expected = 0.1 * ((following - taken.detach()) * feedback.fed).square().mean()
        assert solution.penalty.item() == pytest.approx(expected.item(), rel=1e-12)
        gradients = (gradient_vector(model, loss, keep=True) for loss in (solution.penalty, expected))
        assert relative(*gradients) <= 1e-12


def test_one_pass_has_no_convergence_loss():
    model, tokens = model_and_tokens(CRT)
    assert solver("unrolled", passes=1, convergence_weight=0.1).run(model, tokens).penalty is None
    assert solver("unrolled", passes=3).run(model, tokens).penalty is None


@torch.no_grad()
def test_the_recurrence_has_converged():
    """What the exact recurrence takes in is what it would take in again: enough passes have nothing to pay."""
    for seed in SEEDS:
        model, tokens = model_and_tokens(CRT, seed)
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
