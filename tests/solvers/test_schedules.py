"""Schedules of solver settings: values at any point, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.solvers import Chunked, Interleaved, Parallel, Unrolled
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.solvers.schedules import Mixture, SolverSchedule

CONFIG = ChunkedConfig(name="chunked")
UNROLLED = Unrolled.Config(name="unrolled")


def make_schedule(schedules, steps, seed=0, cls=Chunked):
    return SolverSchedule(schedules, steps=steps, seed=seed, closest=cls.closest)


def test_values_at_the_borders():
    schedule = make_schedule({"interval": [(0, 16), (0.25, 4), (0.5, 1)]}, steps=1000)
    expected = {0: 16, 1: 16, 249: 16, 250: 4, 251: 4, 499: 4, 500: 1, 999: 1, 1000: 1, 5000: 1}
    assert {step: schedule.values(step)["interval"] for step in expected} == expected
    assert {step: schedule.evaluation_values(step)["interval"] for step in expected} == expected


def test_values_of_several_settings():
    schedule = make_schedule({"interval": [(0, 8), (0.5, 2)], "passes": [(0.0, 1)]}, steps=10)
    assert schedule.values(4) == {"interval": 8, "passes": 1}
    assert schedule.values(5) == {"interval": 2, "passes": 1}
    assert make_schedule({}, steps=10).values(5) == {}


@given(
    st.sets(st.integers(1, 99), max_size=4).map(lambda found: [0, *sorted(found)]),
    st.integers(1, 10_000),
    st.integers(0, 12_000),
)
def test_the_stage_in_force_is_the_last_that_has_begun(percents, steps, step):
    stages = [(percent / 100, number + 1) for number, percent in enumerate(percents)]
    Chunked.check_schedules(CONFIG, {"interval": stages})
    expected = max(value for at, value in stages if at <= step / steps)
    schedule = make_schedule({"interval": stages}, steps)
    assert schedule.values(step) == schedule.evaluation_values(step) == {"interval": expected}
    assert schedule.values(step) == schedule.values(step)  # it holds no state


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
        ([(0, Mixture((4, 0), (1.0, 1.0)))], "schedules.interval: value is 0"),
        ([(0, 4), (0.5, Mixture((2, 2.5), (1.0, 0.0)))], "schedules.interval: value is 2.5"),
        ([(0.5, Mixture((4, 2), (1.0, 1.0)))], "schedules.interval begins its stages at [0.5]"),
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
    Chunked.check_schedules(CONFIG, {"interval": [(0, 64), (0.5, Mixture((1, 8), (0.5, 0.5)))]})
    Parallel.check_schedules(ParallelConfig(name="parallel"), {})


# ---------------------------------------------------------------- mixtures

THREE = Mixture((1, 2, 3), (0.2, 0.5, 0.3))
MANY = 4000


def draws(mixture=THREE, seed=0, setting="passes", steps=MANY):
    return [mixture.draw(seed, setting, step) for step in range(steps)]


def within(count, number, share):
    """Return whether a count is within five standard deviations of the binomial's mean."""
    return abs(count - number * share) <= 5 * (number * share * (1 - share)) ** 0.5


def test_draws_never_change():
    """Another machine, and a run resumed years later, must draw what was drawn."""
    assert draws(steps=24) == [2, 1, 3, 2, 2, 2, 2, 2, 1, 2, 3, 1, 2, 2, 1, 2, 2, 2, 1, 2, 2, 3, 3, 1]
    assert draws(seed=1, steps=12) == [2, 3, 3, 3, 2, 2, 1, 2, 2, 2, 1, 2]
    assert draws(setting="prefix", steps=12) == [2, 3, 3, 2, 2, 2, 1, 2, 3, 3, 2, 3]
    assert [THREE.draw(2**63 - 1, "passes", step) for step in (10**6, 10**9, 10**12)] == [3, 2, 2]


@pytest.mark.parametrize(
    "mixture",
    [THREE, Mixture((16, 1), (1.0, 9.0)), Mixture((0.0, 0.5, 1.0, 0.25), (1.0, 1.0, 1.0, 1.0)), Mixture((7,), (3.0,))],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_values_are_drawn_as_often_as_they_weigh(mixture, seed):
    found = draws(mixture, seed)
    for value, weight in zip(mixture.values, mixture.weights, strict=True):
        assert within(found.count(value), MANY, weight / sum(mixture.weights)), value


def test_a_weight_of_zero_is_never_drawn():
    for weights in ((0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)):
        assert set(draws(Mixture((1, 2, 3), weights))) == {1, 2, 3} - {weights.index(0.0) + 1}


def test_only_ratios_of_weights_count():
    assert draws(Mixture((1, 2, 3), (2.0, 5.0, 3.0))) == draws(Mixture((1, 2, 3), (4.0, 10.0, 6.0)))


@pytest.mark.parametrize(
    "other",
    [{"setting": "prefix"}, {"seed": 1}],
    ids=["another setting", "another seed"],
)
def test_draws_are_independent_of_each_other(other):
    pairs = list(zip(draws(), draws(**other), strict=True))
    for one, share in zip(THREE.values, THREE.weights, strict=True):
        for two, other_share in zip(THREE.values, THREE.weights, strict=True):
            assert within(pairs.count((one, two)), MANY, share * other_share), (one, two)


def test_steps_are_independent_of_each_other():
    found = draws()
    for distance in (1, 2, 10, 256):
        pairs = list(zip(found, found[distance:], strict=False))
        for one, share in zip(THREE.values, THREE.weights, strict=True):
            for two, other_share in zip(THREE.values, THREE.weights, strict=True):
                assert within(pairs.count((one, two)), len(pairs), share * other_share), (distance, one, two)


def test_a_schedule_draws_by_seed_setting_and_step():
    schedules = {"passes": [(0, 1), (0.25, THREE)], "prefix": [(0, Mixture((0.0, 1.0), (1.0, 1.0)))]}
    schedule = make_schedule(schedules, steps=100, seed=3, cls=Unrolled)
    Unrolled.check_schedules(UNROLLED, schedules)
    for step in (99, 0, 24, 25, 60):  # in any order: nothing is remembered
        expected = {
            "passes": 1 if step < 25 else THREE.draw(3, "passes", step),
            "prefix": schedules["prefix"][0][1].draw(3, "prefix", step),
        }
        assert schedule.values(step) == make_schedule(schedules, 100, 3, Unrolled).values(step) == expected
    assert {schedule.values(step)["passes"] for step in range(25, 100)} == {1, 2, 3}


def test_the_end_of_a_run_does_not_change_its_draws():
    """A run that is made longer goes on drawing as it did."""
    schedules = {"passes": [(0, THREE)]}
    short, long = (make_schedule(schedules, steps, cls=Unrolled) for steps in (50, 5000))
    assert [short.values(step) for step in range(50)] == [long.values(step) for step in range(50)]


@pytest.mark.parametrize(
    ("cls", "setting", "values", "closest"),
    [
        (Unrolled, "passes", (2, 3, 1), 3),
        (Interleaved, "subsets", (4, 2), 4),
        (Chunked, "interval", (8, 1, 64), 1),
    ],
)
def test_evaluation_takes_what_is_closest_to_the_recurrence(cls, setting, values, closest):
    """Always, whatever was drawn; of a plain value, that value."""
    stages = [(0, Mixture(values, (1.0,) * len(values))), (0.5, values[0])]
    schedule = make_schedule({setting: stages}, steps=40, cls=cls)
    assert [schedule.evaluation_values(step)[setting] for step in (0, 7, 19)] == [closest] * 3
    assert schedule.evaluation_values(20) == schedule.values(20) == {setting: values[0]}
    assert {schedule.values(step)[setting] for step in range(20)} == set(values)
