"""The plain transformer inside every architecture with feedback: its single pass, and what it carries on."""

import pytest
import torch

from pipeline.models import CRT, FBT, LRT
from tests.models.cases import (
    EXACT,
    PARALLEL,
    ROWS,
    SEEDS,
    make_starts,
    model_and_tokens,
    own_names,
    plain_of,
    solver,
)
from tests.models.contract import loss_of


def each_variant(*classes):
    """Run a test for every variant of these architectures."""
    cases = [(cls, variant) for cls in classes for variant in cls.variants()]
    return pytest.mark.parametrize(("cls", "variant"), cases, ids=[f"{cls.__name__}-{name}" for cls, name in cases])


@each_variant(CRT, FBT)
def test_one_pass_is_the_plain_transformer(cls, variant):
    """To the last bit: states (FBT's are normed), logits and gradients; what feeds back has no gradient.

    LRT is only that where its gates are one: see its own tests.
    """
    own = {CRT: "correction.", FBT: "fusion."}[cls]
    runs = (solver("unrolled", passes=1), solver("unrolled", passes=1, prefix=1.0), PARALLEL)
    for seed in SEEDS:
        model, tokens = model_and_tokens(cls, seed, variant)
        plain = plain_of(model)
        assert own_names(model) == {name for name in model.state_dict() if name.startswith(own)}
        for starts in (None, make_starts(seed)):
            reference = PARALLEL.run(plain, tokens, starts).states
            loss_of(plain.readout(reference), seed).backward()
            for run in runs:
                states = run.run(model, tokens, starts).states
                assert torch.equal(states, plain.readout_layer.norm(reference) if cls is FBT else reference)
                assert torch.equal(model.readout(states), plain.readout(reference))
                loss_of(model.readout(states), seed).backward()
                for name, parameter in model.named_parameters():
                    if name.startswith(own):
                        assert parameter.grad is None, name
                    else:
                        assert torch.equal(parameter.grad, plain.get_parameter(name).grad), name
                model.zero_grad()
            plain.zero_grad()


@each_variant(CRT, LRT, FBT)
@torch.no_grad()
def test_what_is_carried_is_one_state_and_the_plain_transformers_keys_and_values(cls, variant):
    model, tokens = model_and_tokens(cls, 0, variant)
    plain = plain_of(model)
    reference = PARALLEL.run(plain, tokens, carry=PARALLEL.new_carry(plain, ROWS)).carry
    runs = [EXACT, *(solver("unrolled", passes=passes) for passes in (1, 2))]
    runs.append(solver("interleaved", subsets=2))
    if cls is LRT:
        runs.append(solver("interleaved", subsets=3, refresh_keys_values=True))
    for run in runs:
        carry = run.run(model, tokens, carry=run.new_carry(model, ROWS)).carry
        assert carry.register.states.shape == (ROWS, 1, model.config.width)
        assert carry.memory.keys() == reference.memory.keys() == {"blocks"}
        for kind in ("keys", "values"):
            kept, expected = (getattr(each.memory["blocks"], kind) for each in (carry, reference))
            assert [each.shape for each in kept] == [each.shape for each in expected]
