"""Schedules of solver settings: values at any point, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.solvers import Chunked, Parallel
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.solvers.schedules import SolverSchedule

CONFIG = ChunkedConfig(name="chunked")


def test_values_at_the_borders():
    schedule = SolverSchedule({"interval": [(0, 16), (0.25, 4), (0.5, 1)]}, total_tokens=1000)
    expected = {0: 16, 1: 16, 249: 16, 250: 4, 251: 4, 499: 4, 500: 1, 999: 1, 1000: 1, 5000: 1}
    assert {tokens: schedule.values(tokens)["interval"] for tokens in expected} == expected


def test_values_of_several_settings():
    schedule = SolverSchedule({"interval": [(0, 8), (0.5, 2)], "passes": [(0.0, 1)]}, total_tokens=10)
    assert schedule.values(4) == {"interval": 8, "passes": 1}
    assert schedule.values(5) == {"interval": 2, "passes": 1}
    assert SolverSchedule({}, total_tokens=10).values(5) == {}


@given(
    st.sets(st.integers(1, 99), max_size=4).map(lambda found: [0, *sorted(found)]),
    st.integers(1, 10_000),
    st.integers(0, 12_000),
)
def test_the_stage_in_force_is_the_last_that_has_begun(percents, total, tokens):
    stages = [(percent / 100, number + 1) for number, percent in enumerate(percents)]
    Chunked.check_schedules(CONFIG, {"interval": stages})
    expected = max(value for at, value in stages if at <= tokens / total)
    schedule = SolverSchedule({"interval": stages}, total)
    assert schedule.values(tokens) == {"interval": expected}
    assert schedule.values(tokens) == schedule.values(tokens)  # it holds no state


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "schedules.interval is empty"),
        ([(0.1, 4)], "schedules.interval begins its stages at [0.1]"),
        ([(-0.1, 4)], "schedules.interval begins its stages at [-0.1]"),
        ([(0, 4), (0.5, 2), (0.2, 1)], "[0, 0.5, 0.2]"),
        ([(0, 4), (0.5, 2), (0.5, 1)], "[0, 0.5, 0.5]"),
        ([(0, 4), (0, 1)], "[0, 0]"),
        ([(0, 4), (1, 1)], "[0, 1]"),
        ([(0, 4), (2.5, 1)], "[0, 2.5]"),
        ([(0, 0)], "schedules.interval: value is 0"),
        ([(0, 4), (0.5, -3)], "schedules.interval: value is -3"),
        ([(0, 4), (0.5, 2.5)], "schedules.interval: value is 2.5"),
        ([(0, 4), (0.5, True)], "schedules.interval: value is True"),
        ([(0, "4")], "schedules.interval: value is '4'"),
        ([(0, None)], "schedules.interval: value is None"),
    ],
    ids=str,
)
def test_bad_schedules_name_key_and_value(stages, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Chunked.check_schedules(CONFIG, {"interval": stages})


def test_unknown_settings_name_the_choices():
    with pytest.raises(ConfigError, match=r"schedules\.passes.*'chunked'.*it has: interval"):
        Chunked.check_schedules(CONFIG, {"passes": [(0, 1)]})
    with pytest.raises(ConfigError, match=r"schedules\.segment_length.*it has: interval"):
        Chunked.check_schedules(CONFIG, {"segment_length": [(0, 1)]})
    with pytest.raises(ConfigError, match=r"schedules\.interval.*'parallel'.*it has: none"):
        Parallel.check_schedules(ParallelConfig(name="parallel"), {"interval": [(0, 1)]})


def test_good_schedules_pass():
    Chunked.check_schedules(CONFIG, {})
    Chunked.check_schedules(CONFIG, {"interval": [(0, 1)]})
    Chunked.check_schedules(CONFIG, {"interval": [(0.0, 64), (0.001, 8), (0.999, 1)]})
    Parallel.check_schedules(ParallelConfig(name="parallel"), {})
