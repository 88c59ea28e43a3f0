"""The guard by itself: against an obvious twin, and what it does to optimisers."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline.config import GuardsConfig
from pipeline.errors import ConfigError
from pipeline.training.guards import Judgement, StepGuard, leave_out
from pipeline.training.muon import MuonWithAdamW
from tests.support import run_config

values = st.one_of(st.floats(0.5, 2.0, width=32), st.sampled_from([50.0, 1e4, math.nan, math.inf]))


class Twin:
    """The rule, written down on the host."""

    def __init__(self, config):
        self.config = config
        self.good = []

    def limits(self):
        window = self.good[-self.config.spike_window :]
        if not self.config.spike_deviations or len(window) < self.config.spike_window // 2:
            return [math.inf, math.inf]
        return [
            statistics.fmean(each) + self.config.spike_deviations * statistics.stdev(each)
            for each in zip(*window, strict=True)
        ]

    def judge(self, loss, norm):
        limits = self.limits()
        good = all(math.isfinite(value) and value <= limit for value, limit in zip((loss, norm), limits, strict=True))
        if good:
            self.good.append((loss, norm))
        return not good, limits


def judge(guard, loss, norm):
    guard.loss = torch.tensor(loss)
    verdict = guard.judge(torch.tensor(norm))
    assert verdict.dtype == torch.float32
    assert verdict.shape == ()
    found = guard.judgement.tolist()
    assert bool(verdict) == bool(found[0])
    return Judgement(bool(found[0]), *found[1:])


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(values, values), max_size=40),
    window=st.integers(4, 12),
    deviations=st.sampled_from([0.0, 1.0, 3.0, 6.0]),
    stop=st.integers(0, 40),
)
def test_it_follows_the_rule_also_after_a_resume(steps, window, deviations, stop):
    config = GuardsConfig(spike_deviations=deviations, spike_window=window)
    twin, guard, whole = Twin(config), StepGuard(config), StepGuard(config)
    for number, (loss, norm) in enumerate(steps):
        if number == stop:
            state = guard.state_dict()
            guard = StepGuard(config)
            guard.load_state_dict(state)
        found, expected = judge(guard, loss, norm), judge(whole, loss, norm)
        assert str(found) == str(expected)  # to the last bit, and NaN is NaN
        left_out, limits = twin.judge(loss, norm)
        assert found[3:] == pytest.approx(limits, rel=1e-12)
        near = any(value == pytest.approx(limit, rel=1e-12) for value, limit in zip((loss, norm), limits, strict=True))
        assert found.left_out == left_out or near


def test_a_window_of_another_size_keeps_the_newest():
    steps = [(1 + 0.1 * math.sin(3 * i), 2 + 0.1 * math.cos(5 * i)) for i in range(23)]
    large = StepGuard(GuardsConfig(spike_deviations=6, spike_window=16))
    for loss, norm in steps:
        judge(large, loss, norm)
    for size in (4, 8, 15, 17, 64):
        config = GuardsConfig(spike_deviations=6, spike_window=size)
        guard, twin = StepGuard(config), Twin(config)
        guard.load_state_dict(large.state_dict())
        twin.good = [tuple(torch.tensor(each, dtype=torch.float32).double().tolist()) for each in steps[-16:]]
        for loss, norm in [(1.0, 2.0), (1.05, 2.01), (1.1, 1.9)]:
            limits = twin.judge(loss, norm)[1]
            assert judge(guard, loss, norm)[3:] == pytest.approx(limits, rel=1e-6)


def test_nothing_is_judged_by_what_was_before_it_forgot():
    guard = StepGuard(GuardsConfig(spike_deviations=6, spike_window=4))
    guard.forget()
    for _ in range(2):
        for loss in (1.0, 1.1, 1.0, 1.1):
            assert not judge(guard, loss, 1.0).left_out
        assert judge(guard, 5.0, 1.0).left_out
        guard.forget()
        assert not judge(guard, 5.0, 1.0).left_out
        guard.forget()


def test_words_name_what_is_wrong():
    assert Judgement(True, 9.0, 2.0, 4.0, 3.0).words() == "loss 9 is above 4, gradient norm 2 is within 3"
    assert Judgement(True, math.nan, 2.0, math.inf, math.inf).words() == "loss nan is not finite, gradient norm 2"
    assert not Judgement(True, 1.0, math.inf, 4.0, 3.0).finite


def make(kind):
    """Return parameters, one of them without a gradient at times, and an optimiser over them."""
    draw = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(6, 4, generator=draw)) for _ in range(3)]
    vectors = [nn.Parameter(torch.randn(4, generator=draw)) for _ in range(2)]
    adamw = {"lr": 0.1, "weight_decay": 0.5}
    if kind == "muon":
        optimizer = MuonWithAdamW(
            torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(vectors, fused=True, **adamw), {matrices[0]: (4, 2)}
        )
    elif kind == "sgd":
        optimizer = torch.optim.SGD([*matrices, *vectors], lr=0.1, momentum=0.9, weight_decay=0.5)
    else:
        optimizer = torch.optim.AdamW([*matrices, *vectors], fused=kind == "fused", **adamw)
    return [*matrices, *vectors], optimizer


def tensors(parameters, optimizer):
    """Return the bytes of every weight and state."""
    found = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        found.append(
            [parameter.detach().numpy().tobytes(), {key: value.numpy().tobytes() for key, value in state.items()}]
        )
    return found


@pytest.mark.parametrize("kind", ["fused", "plain", "muon", "sgd"])
@pytest.mark.parametrize("spoiled", [1e6, math.inf, math.nan])
def test_a_step_that_is_left_out_touches_nothing(kind, spoiled):
    """Weights and states are the same to the last bit, negative zeros too; steps after it are as if it never was."""
    with_it, guarded = make(kind)
    without, plain = make(kind)
    draw = torch.Generator().manual_seed(1)
    for step in range(6):
        gradients = [torch.randn(each.shape, generator=draw) for each in with_it]
        if step == 0:
            gradients = [-0.0 * each.abs() for each in gradients]
        for parameter, gradient in zip(with_it, gradients, strict=True):
            parameter.grad = spoiled * gradient if step == 3 else gradient.clone()
        with_it[1].grad = None if step in (0, 3) else with_it[1].grad  # one that sleeps
        before = tensors(with_it, guarded)
        leave_out(guarded, torch.tensor(float(step == 3)))
        guarded.step()
        if step == 3:
            assert tensors(with_it, guarded) == before
            continue
        for parameter, gradient in zip(without, gradients, strict=True):
            parameter.grad = gradient.clone()
        without[1].grad = None if step == 0 else without[1].grad
        plain.step()
        assert tensors(with_it, guarded) == tensors(without, plain)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("guards.spike_deviations=-1", "must be at least 0"),
        ("guards.spike_window=3", "must be at least 4"),
        ("guards.nonfinite_limit=-1", "must be at least 0"),
        ("guards.spike_span=10", "it must be above spike_limit=10"),
    ],
)
def test_one_line_for_each_mistake(tmp_path, setting, words):
    with pytest.raises(ConfigError) as caught:
        run_config(tmp_path, tmp_path, setting)
    assert str(caught.value).startswith(setting.partition("=")[0])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
