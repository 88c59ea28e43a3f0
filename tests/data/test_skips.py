"""Samples that a run leaves out: exactly those, whatever ranks, loader processes and stops there are."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import config_files
from pipeline.config import Config
from pipeline.data.loader import StreamLoader
from pipeline.data.skips import Skips, merged
from pipeline.data.stream import TrainStream
from pipeline.errors import ConfigError, DataError
from tests.data.cases import rows_by_sample
from tests.support import run_config

T = 32

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def stream(data, ranges=(), **changes):
    settings_ = {"sequence_length": T, "seed": 3, "rows_per_batch": 24, "rows_per_micro_batch": 4, "total_samples": 240}
    return TrainStream(data, skips=Skips(ranges), **{**settings_, **changes})


@st.composite
def some_ranges(draw, end=300):
    borders = sorted(draw(st.sets(st.integers(0, end), max_size=12)))
    pairs = [(borders[i], borders[i + 1] - 1) for i in range(0, len(borders) - 1, draw(st.sampled_from([1, 2])))]
    return draw(st.permutations(pairs))


def left(ranges, count):
    """Return the first ``count`` samples outside the ranges, by looking at each."""
    out = {sample for first, last in ranges for sample in range(first, last + 1)}
    found, sample = [], 0
    while len(found) < count:
        if sample not in out:
            found.append(sample)
        sample += 1
    return found


@settings(max_examples=200, deadline=None)
@given(ranges=some_ranges(), first=st.integers(0, 300), count=st.integers(1, 60))
def test_places_are_those_that_are_left(ranges, first, count):
    skips, expected = Skips(ranges), left(ranges, 361)
    assert skips.sample(np.arange(361)).tolist() == expected
    assert skips.sample(first) == expected[first]
    runs = skips.runs(first, count)
    assert [sample for begin, end in runs for sample in range(begin, end + 1)] == expected[first : first + count]
    assert all(end + 1 < begin for (_, end), (begin, _) in pairwise(runs))


@settings(max_examples=300, deadline=None)
@given(before=some_ranges(), after=some_ranges(), shared=st.integers(0, 300), place=st.integers(0, 300))
def test_what_is_behind_is_the_same_exactly_where_it_says_so(before, after, shared, place):
    """Two lists of ranges that agree up to some sample, and differ after it: a place means the same, or is refused."""
    common = [each for each in before if each[1] < shared]
    after = [*common, *(each for each in after if each[0] >= shared)]
    one, other = Skips(before), Skips(after)
    same = (one.sample(np.arange(place)) == other.sample(np.arange(place))).all()
    assert (one.passed(place) == other.passed(place)) == same


def test_ranges_that_touch_are_named_as_one():
    assert merged([[5, 9], [0, 1], [10, 12], [14, 14]]) == [[0, 1], [5, 12], [14, 14]]
    assert Skips([[10, 12], [5, 9]]).passed(6) == "[[5, 12]]"
    assert Skips([[5, 9]]).passed(5) == Skips().passed(5) == "[]"  # right before it


@pytest.mark.parametrize("ranges", [[[3, 2]], [[-1, 2]], [[0, 5], [5, 6]], [[4, 9], [2, 6]]])
def test_ranges_that_are_none_are_refused(ranges):
    with pytest.raises(ValueError, match="empty or overlaps"):
        Skips(ranges)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_exactly_those_are_never_seen_and_all_else_once(prepared, ranks, workers):
    ranges = [[30, 30], [0, 2], [100, 151], [152, 160], [239, 260]]
    batches = [
        batch
        for rank in range(ranks)
        for batch in StreamLoader(stream(prepared, ranges, rank=rank, world_size=ranks), workers)
    ]
    found = rows_by_sample(batches)
    assert sorted(found) == left(ranges, 240)
    whole = rows_by_sample(stream(prepared, total_samples=480))
    assert found == {sample: whole[sample] for sample in found}  # a sample is the same row, skips or not


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ranges_ahead_may_change_at_any_stop(prepared, data):
    """Stopped again and again, each time with other ranks and other ranges ahead: nothing twice, nothing lost."""
    whole = rows_by_sample(stream(prepared, rows_per_micro_batch=24, total_samples=960))
    seen, out, ranges, saved = [], set(), [], None
    for _ in range(data.draw(st.integers(1, 4))):
        newest = seen[-1] if seen else -1
        ranges = [each for each in ranges if each[0] < newest]  # what is behind stays; what was ahead may go
        begin = newest + 1
        for _ in range(data.draw(st.integers(0, 3))):
            begin += data.draw(st.integers(0, 20))
            end = begin + data.draw(st.integers(0, 30))
            ranges.append([begin, end])
            begin = end + 1
        ranks, micro, steps = (data.draw(st.integers(1, 3)) for _ in range(3))
        batch = ranks * micro
        loaders = [
            StreamLoader(
                stream(prepared, ranges, rank=rank, world_size=ranks, rows_per_micro_batch=micro, rows_per_batch=batch)
            )
            for rank in range(ranks)
        ]
        for loader in loaders:
            if saved is not None:
                loader.load_state_dict(saved)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            for iterator in iterators:
                found = rows_by_sample([next(iterator)])
                assert all(whole[sample] == row for sample, row in found.items())
                seen += found
        for loader in loaders:
            loader.advance(steps * batch)
        saved = loaders[-1].state_dict()
        assert all(type(value) in (int, str) for value in saved.values())
        out = {sample for first, last in ranges for sample in range(first, last + 1)}
    assert seen == [sample for sample in range(seen[-1] + 1) if sample not in out]


def test_what_is_behind_cannot_be_changed(prepared):
    loader = StreamLoader(stream(prepared, [[10, 19], [200, 209]]))
    loader.advance(48)  # samples 0 to 57 but for those ten
    state = loader.state_dict()
    for fine in ([[10, 19]], [[10, 14], [15, 19]], [[10, 19], [58, 60]]):
        StreamLoader(stream(prepared, fine)).load_state_dict(state)
    for ranges in ([], [[10, 18]], [[10, 19], [57, 60]], [[0, 1], [10, 19]]):
        with pytest.raises(
            DataError, match=r"data\.skip_samples names .* behind sample 48, .*out \[\[10, 19\]\]"
        ) as found:
            StreamLoader(stream(prepared, ranges)).load_state_dict(state)
        assert "\n" not in str(found.value)
    old = {key: value for key, value in state.items() if key != "left_out"}
    with pytest.raises(DataError, match=r"left out \[\]"):  # written when nothing could be left out
        StreamLoader(stream(prepared, [[10, 19]])).load_state_dict(old)
    StreamLoader(stream(prepared)).load_state_dict(old)


def test_an_epoch_misses_what_is_left_out_of_it_alone(prepared):
    count = stream(prepared).count
    samples = 2 * count // 24 * 24
    found = rows_by_sample(stream(prepared, [[3, 12]], total_samples=samples))
    assert not set(range(3, 13)) & set(found)
    second = [tuple(found[sample]) for sample in range(count, samples)]
    whole = rows_by_sample(stream(prepared, total_samples=24))
    missed = [tuple(whole[sample]) for sample in range(3, 13)]
    assert sum(row in second for row in missed) >= 10 - (2 * count - samples)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[[3, 2]]", "data.skip_samples (command line) holds [3, 2]; it must hold ranges [first, last]"),
        ("[[-1, 2]]", "holds [-1, 2]"),
        ("[[1, 2, 3]]", "holds [1, 2, 3]"),
        ("[[7, 9], [1, 7]]", "[1, 7] and [7, 9] overlap"),
        ("[3, 4]", "data.skip_samples.0"),
        ("[[40, 47], [56, 60]]", "holds [56, 60], but the run ends before it: it trains on 48 samples"),
    ],
)
def test_one_line_for_each_mistake(tmp_path, value, words):
    with pytest.raises(ConfigError) as caught:
        run_config(tmp_path, tmp_path, f"data.skip_samples={value}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_last_range_that_can_be_reached_is_taken(tmp_path):
    config = run_config(tmp_path, tmp_path, "data.skip_samples=[[55, 60], [40, 47]]")
    config_files.save(config, tmp_path / "config.yaml")
    assert config_files.load(Config, [tmp_path / "config.yaml"], []).data.skip_samples == [[55, 60], [40, 47]]
    assert Skips(config.data.skip_samples).sample(47) == 61
