"""Every registered architecture, in every variant, under every solver that fits it, keeps the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pipeline.models import ARCHITECTURES, CRT, FBT, LRT, RLT, Transformer
from pipeline.models.feedback import Feedback
from pipeline.models.inputs import Inputs
from pipeline.solvers import SOLVERS
from tests.models import contract, oracles
from tests.models.cases import SEEDS, SETTINGS, Case, all_cases, solver_config
from tests.models.contract import CHECKS, Check

# Checks that cost most, and variants after an architecture's first, see one seed in each case; different cases still
# see different models.
SLOW = {contract.check_decoding, contract.check_documents, contract.check_activation_checkpointing}
SLOW |= {contract.check_gradients, contract.check_gradient_hooks, contract.check_left_padding}
SLOW |= {contract.check_oracle_on_documents, contract.check_finite_differences, contract.check_bfloat16}

CASES = all_cases()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case, check: Check):
    first = case.variant == next(iter(case.cls.variants()))
    for seed in SEEDS if first and check not in SLOW else SEEDS[:1]:
        check(case.cls, case.config, case.solver, seed)


def test_everything_registered_is_covered():
    assert set(SETTINGS) == set(SOLVERS)
    assert set(oracles.ORACLES) == set(ARCHITECTURES)
    for name, cls in ARCHITECTURES.items():
        assert any(case.architecture == name for case in CASES)
        for config in cls.variants().values():
            assert config.architecture == name
            config.check()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_build_makes_what_is_named(case: Case):
    with torch.device("meta"):
        assert type(ARCHITECTURES[case.config.architecture](case.config)) is case.cls


# ---------------------------------------------------------------- broken on purpose: each check must catch its fault


def with_values(inputs: Inputs, **values) -> Inputs:
    return replace(inputs, values={**inputs.values, **values})


class Peeking(RLT):
    """Adds a little of the next position's entry, where one is at hand."""

    def advance(self, inputs, feedback, memory=None):
        entry = inputs.values["entry"]
        following = torch.cat([entry[:, 1:], torch.zeros_like(entry[:, :1])], dim=1)
        return super().advance(with_values(inputs, entry=entry + 1e-3 * following), feedback, memory)


class PeekingEncoder(RLT):
    """Lets the encoder's memory of the whole row leak into every position."""

    def prepare(self, tokens, index, starts, memory=None):
        inputs, memory = super().prepare(tokens, index, starts, memory)
        entry = inputs.values["entry"]
        return with_values(inputs, entry=entry + 1e-6 * entry.mean(dim=1, keepdim=True)), memory


class Deaf(Transformer):
    """Does not see its own token, only those before."""

    def prepare(self, tokens, index, starts, memory=None):
        inputs, memory = super().prepare(tokens, index, starts, memory)
        x = inputs.values["x"]
        return with_values(inputs, x=torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)), memory


class OtherDecoder(RLT):
    """Computes single positions in another way than chunks."""

    def advance(self, inputs, feedback, memory=None):
        if inputs.length == 1:
            inputs = with_values(inputs, entry=1.001 * inputs.values["entry"])
        return super().advance(inputs, feedback, memory)


class ShortWindow(RLT):
    """Forgets the oldest position that its window should still reach."""

    def new_memory(self, capacity=None):
        memory = super().new_memory(capacity)
        memory["decoder"].window = self.settings.window - 1
        return memory


class Wordless(RLT):
    """Decodes without the encoder's memory of earlier calls."""

    def prepare(self, tokens, index, starts, memory=None):
        inputs, after = super().prepare(tokens, index, starts, memory)
        if memory is None or memory["shared"].length == 0:
            return inputs, after
        old = memory["shared"].length
        shared = tuple(
            replace(each, key=torch.cat([0 * each.key[:, :, :old], each.key[:, :, old:]], dim=2))
            for each in inputs.shared
        )
        return replace(inputs, shared=shared), after


class Mixing(RLT):
    """Lets rows see each other."""

    def advance(self, inputs, feedback, memory=None):
        entry = inputs.values["entry"]
        entry = entry + 1e-4 * entry.mean(dim=0, keepdim=True)
        return super().advance(with_values(inputs, entry=entry), feedback, memory)


class Leaking(RLT):
    """Ignores where documents begin."""

    def prepare(self, tokens, index, starts, memory=None):
        return super().prepare(tokens, index, None, memory)


class Unreset(RLT):
    """Feeds the last state of the document before to the first position of the next."""

    def initial_feedback(self, rows):
        return super().initial_feedback(rows) if not hasattr(self, "begun") else Feedback(self.begun)

    def advance(self, inputs, feedback, memory=None):
        states, memory = super().advance(inputs, feedback, memory)
        self.begun = states[:, -1:].detach()
        return states, memory


class Impure(RLT):
    """Counts its calls into its result, so that computing again gives something else."""

    calls = 0

    def advance(self, inputs, feedback, memory=None):
        type(self).calls += 1
        entry = inputs.values["entry"] * (1 + 1e-3 * self.calls)
        return super().advance(with_values(inputs, entry=entry), feedback, memory)


class Detached(RLT):
    """Stops the gradient through the register."""

    def advance(self, inputs, feedback, memory=None):
        return super().advance(inputs, None if feedback is None else Feedback(feedback.states.detach()), memory)


class Reentrant(Transformer):
    """Uses a layer twice, in two blocks with a backward of their own each."""

    def __init__(self, config):
        super().__init__(config)
        self.blocks[1].ffn = self.blocks[0].ffn

    def run_block(self, block, *args, parallel):
        return checkpoint(block, *args, use_reentrant=True)


class Sleepless(RLT):
    """Calls nothing dormant."""

    def dormant_parameters(self):
        yield from ()


class Cheap(RLT):
    """Forgets to count the merge."""

    def flops(self, length):
        return replace(super().flops(length), fed_state=0)


class CheapWindow(RLT):
    """Counts the window as if it were always full."""

    def flops(self, length):
        config, flops = self.settings, super().flops(length)
        full = 4.0 * config.heads * config.head_width * config.decoder_layers * config.window
        windowed = sum(min(config.window, position + 1) for position in range(length)) / length
        return replace(flops, advance=flops.advance + full * (1 - windowed / config.window))


class Twice(RLT):
    """Runs the encoder twice."""

    def prepare(self, tokens, index, starts, memory=None):
        super().prepare(tokens, index, starts, None)
        return super().prepare(tokens, index, starts, memory)


class Halved(RLT):
    """Lists a part too few."""

    def parts(self):
        return {name: number for name, number in super().parts().items() if name != "merge"}


class Undrawn(RLT):
    """Leaves the initial state undrawn."""

    def init_weights(self, generator=None):
        before = self.initial.detach().clone()
        super().init_weights(generator)
        with torch.no_grad():
            self.initial.copy_(before)


class HalfPrecisionTables(RLT):
    """Makes rotation tables in the autocast dtype."""

    def prepare(self, tokens, index, starts, memory=None):
        inputs, memory = super().prepare(tokens, index, starts, memory)
        if not torch.is_autocast_enabled("cpu"):
            return inputs, memory
        cos, sin = (inputs.values[name].bfloat16() for name in ("cos", "sin"))
        return with_values(inputs, cos=cos, sin=sin), memory


class Coarse(RLT):
    """Rounds to bfloat16 where the model is in single precision."""

    def advance(self, inputs, feedback, memory=None):
        entry = inputs.values["entry"]
        if entry.dtype == torch.float32:
            entry = entry.bfloat16().float()
        return super().advance(with_values(inputs, entry=entry), feedback, memory)


class Overclaiming(CRT):
    """Claims that a first position needs no feedback, though the correction applies there."""

    begins_plain = True


class Underclaiming(FBT):
    """Claims that a first position is fed something."""

    begins_plain = False


class Fused(FBT):
    """Fuses the first position too."""

    def initial_feedback(self, rows):
        return replace(super().initial_feedback(rows), fed=None)


class Unmoved(CRT):
    """Corrects with the state of the pass at hand's own position: no shift."""

    def fed_input(self, inputs, feedback):
        if feedback is not None and feedback.states.shape[1] > 1:
            feedback = replace(feedback, states=feedback.states.roll(-1, dims=1))
        return super().fed_input(inputs, feedback)


class Forgetful(LRT):
    """Makes keys and values anew without the blocks' own part."""

    def refresh(self, inputs, feedback, memory, where):
        local = memory["local"]
        emptied = replace(local, keys=[0 * key for key in local.keys])
        refreshed = super().refresh(inputs, feedback, {**memory, "local": emptied}, where)
        return {**refreshed, "local": local}


class Cumulative(CRT):
    """Corrects the state instead of the embedding, as the papers warn not to."""

    def fed_input(self, inputs, feedback):
        x = super().fed_input(inputs, feedback)
        return x if feedback is None else x + 0.1 * feedback.states


class Windowless(LRT):
    """Lets the blocks whose attention is full keep to the window."""

    def new_memory(self, capacity=None):
        memory = super().new_memory(capacity)
        memory["blocks"].window = self.settings.attention_window
        return memory


PARALLEL = solver_config("parallel")
EXACT, THIRDS = solver_config("chunked", interval=1), solver_config("chunked", interval=3)
TWO, THREE = solver_config("unrolled", passes=2), solver_config("unrolled", passes=3)
HALVES = solver_config("interleaved", subsets=2)
REFRESHED = solver_config("interleaved", subsets=3, refresh_keys_values=True)

BROKEN = [
    (Peeking, "plain", PARALLEL, contract.check_oracle),
    (Peeking, "plain", PARALLEL, contract.check_causality),
    (Peeking, "plain", THIRDS, contract.check_causality),
    (Peeking, "plain", THIRDS, contract.check_appending),
    (PeekingEncoder, "plain", EXACT, contract.check_causality),
    (PeekingEncoder, "plain", EXACT, contract.check_appending),
    (PeekingEncoder, "plain", EXACT, contract.check_decoding),
    (Deaf, "plain", PARALLEL, contract.check_causality),
    (OtherDecoder, "plain", PARALLEL, contract.check_decoding),
    (OtherDecoder, "plain", THIRDS, contract.check_decoding),
    (OtherDecoder, "plain", THIRDS, contract.check_left_padding),
    (ShortWindow, "plain", EXACT, contract.check_oracle),
    (ShortWindow, "plain", THIRDS, contract.check_decoding),
    (ShortWindow, "plain", PARALLEL, contract.check_decoding),
    (Wordless, "plain", EXACT, contract.check_decoding),
    (Mixing, "plain", EXACT, contract.check_batch),
    (Leaking, "plain", PARALLEL, contract.check_documents),
    (Leaking, "plain", EXACT, contract.check_documents),
    (Leaking, "plain", THIRDS, contract.check_left_padding),
    (Leaking, "plain", EXACT, contract.check_oracle_on_documents),
    (Unreset, "plain", EXACT, contract.check_documents),
    (Impure, "plain", EXACT, contract.check_activation_checkpointing),
    (Detached, "plain", EXACT, contract.check_gradients),
    (Detached, "plain", EXACT, contract.check_finite_differences),
    (Reentrant, "plain", PARALLEL, contract.check_gradient_hooks),
    (Sleepless, "plain", PARALLEL, contract.check_dormant),
    (Cheap, "plain", EXACT, contract.check_flops),
    (Cheap, "plain", EXACT, contract.check_flops_run),
    (CheapWindow, "plain", EXACT, contract.check_flops),
    (Twice, "plain", EXACT, contract.check_flops_run),
    (Halved, "plain", EXACT, contract.check_parts),
    (Undrawn, "plain", EXACT, contract.check_init),
    (Coarse, "plain", EXACT, contract.check_float32),
    (HalfPrecisionTables, "plain", EXACT, contract.check_bfloat16),
    (Peeking, "plain", HALVES, contract.check_causality),
    (Mixing, "plain", THREE, contract.check_batch),
    (Leaking, "plain", HALVES, contract.check_documents),
    (Leaking, "plain", THREE, contract.check_documents),
    (OtherDecoder, "plain", TWO, contract.check_decoding),
    (Detached, "plain", THREE, contract.check_gradients),
    (Impure, "plain", HALVES, contract.check_activation_checkpointing),
    (Cheap, "plain", HALVES, contract.check_flops_run),
    (Overclaiming, "plain", THREE, contract.check_exact_prefix),
    (Underclaiming, "plain", THREE, contract.check_exact_prefix),
    (Fused, "plain", EXACT, contract.check_oracle),
    (Fused, "plain", HALVES, contract.check_oracle),
    (Unmoved, "plain", TWO, contract.check_exact_prefix),
    (Forgetful, "plain", REFRESHED, contract.check_oracle),
    (Cumulative, "plain", EXACT, contract.check_oracle),
    (Windowless, "nanochat", EXACT, contract.check_oracle),
]


@pytest.mark.parametrize(
    ("cls", "variant", "solver", "check"),
    [
        pytest.param(*each, id=f"{each[0].__name__}-{each[2].name}-{each[3].__name__}-{n}")
        for n, each in enumerate(BROKEN)
    ],
)
def test_broken_architectures_are_caught(cls, variant, solver, check):
    """``test_contract`` shows that the same check passes for the architecture from which the broken one was made."""
    with pytest.raises(AssertionError):
        check(cls, cls.variants()[variant], solver, 0)


def test_every_check_catches_something():
    assert {check for *_, check in BROKEN} == set(CHECKS)
