"""The schema's own checks: schedules and their draws, and settings that contradict each other or have no use."""

import re

import pytest

from pipeline.errors import ConfigError
from pipeline.solvers.schedules import Mixture
from tests.support import run_config

UNROLLED = ("solver.name=unrolled",)


def config(tmp_path, *overrides, architecture="crt"):
    return run_config(tmp_path, tmp_path / "data", *overrides, architecture=architecture)


def test_stages_are_values_or_mixtures(tmp_path):
    draw = (
        "schedules.passes=[{at: 0, value: 1}, {at: 0.5, draw: [2, 5, 3], weights: [3, 0, 1]}, {at: 0.9, draw: [2, 4]}]"
    )
    stages = config(tmp_path, *UNROLLED, draw).stages["passes"]
    assert stages == [(0, 1), (0.5, Mixture((2, 3), (3, 1))), (0.9, Mixture((2, 4), (1, 1)))]


def test_an_empty_list_takes_a_schedule_away(tmp_path):
    found = config(
        tmp_path, *UNROLLED, "schedules.passes=[{at: 0, value: 2}]", "schedules.passes=[]", "solver.passes=4"
    )
    assert found.stages == {}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["schedules.passes=[{at: 0}]"], "the stage at 0.0 has neither a value nor a draw"),
        (["schedules.passes=[{at: 0, value: 2, draw: [2]}]"], "the stage at 0.0 has both a value and a draw"),
        (["schedules.passes=[{at: 0, value: 2, weights: [1]}]"], "weights belong to a draw"),
        (["schedules.passes=[{at: 0, draw: [2, 3], weights: [1]}]"], "there must be one for each"),
        (["schedules.passes=[{at: 0, draw: [2, 3], weights: [1, -1]}]"], "none below 0"),
        (["schedules.passes=[{at: 0, draw: [2, 3], weights: [0, 0]}]"], "not all 0"),
        (["schedules.passes=[{at: 0, draw: [2, 3], weights: [1.0e+308, 1.0e+308]}]"], "a finite sum"),
        (["schedules.passes=[{at: 0, draw: [2, 0]}]"], "schedules.passes: value is 0"),
        (["schedules.passes=[{at: 0, draw: [2, 1000001]}]"], "schedules.passes: value is 1000001; it must be at most"),
        (
            ["schedules.passes=[{at: 0, value: 2}]", "solver.passes=5"],
            "is 5, but schedules.passes gives it",
        ),
        (["solver.passes=1000000000000"], "must be at most 1000000"),
        (["solver.passes=1", "solver.convergence_weight=0.1"], "has no use with solver.passes=1"),
        (["solver.passes=99999999999999999999"], "an integer of 64 bits"),
        (["training.tokens=99999999999999999999999"], "an integer of 64 bits"),
        (["model.vocab_size=100000000000000000"], "model.vocab_size"),
        (["model.layers=1000000000"], "model.layers"),
        (["model.correction_width=100000000000000"], "model.correction_width"),
        (["model.rope=integer", "model.rope_base=50.0"], "has no use with model.rope=integer"),
        (["optimizer.name=muon", "optimizer.head_peak=0.1"], "model.tied_head is true"),
    ],
    ids=str,
)
def test_mistakes(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        config(tmp_path, *UNROLLED, *overrides)
    assert "\n" not in str(caught.value)
