"""Solvers: what they refuse, what they feed, where positions lie, and where chunks begin and end."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.models import CRT, FBT, LRT, RLT, Feedback, Transformer
from pipeline.models.inputs import Inputs, pick
from pipeline.solvers import SOLVERS, Carry, Chunked, Interleaved, Parallel, Unrolled, build, sequential
from pipeline.solvers.base import place, residual, shifted
from pipeline.solvers.chunked import ChunkedConfig, even_chunks, uneven_chunks
from pipeline.solvers.parallel import ParallelConfig
from tests.models.cases import make_model, make_tokens, random, starts_of
from tests.solvers.cases import FEEDING

CHUNKED, PARALLEL = ChunkedConfig(name="chunked"), ParallelConfig(name="parallel")


# ---------------------------------------------------------------- settings


def test_build():
    assert type(build(ChunkedConfig(name="chunked", interval=4))) is Chunked
    assert type(build(PARALLEL)) is Parallel
    with pytest.raises(ConfigError, match=r"unknown solver 'newton'; choose one of .*parallel"):
        build(ChunkedConfig(name="newton"))


@pytest.mark.parametrize("name", [name for name, cls in SOLVERS.items() if cls.feeds_back])
def test_what_feeds_nothing_back_is_refused(name):
    solver = SOLVERS[name]
    config = solver.Config(name=name)
    words = rf"solver\.name is {name}.*feeds nothing back.*set solver\.name=parallel"
    with pytest.raises(ConfigError, match=words):
        solver.check_fits(config, Transformer)
    for cls in FEEDING:
        solver.check_fits(config, cls)


def test_a_single_plain_pass_fits_everything():
    for cls in (Transformer, RLT):
        Parallel.check_fits(PARALLEL, cls)


def test_settings_are_the_present_ones():
    solver = build(ChunkedConfig(name="chunked", interval=4))
    assert solver.settings() == {"interval": 4}
    solver.interval = 2
    assert solver.settings() == {"interval": 2}
    assert solver.config.interval == 4
    assert build(PARALLEL).settings() == {}


@pytest.mark.parametrize("name", SOLVERS)
def test_schedulable_settings_are_settings(name):
    cls = SOLVERS[name]
    solver = cls(cls.Config(name=name))
    assert solver.settings() == {setting: getattr(solver.config, setting) for setting in cls.schedulable}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"interval": 0}, "solver.interval is 0"),
        ({"interval": -2}, "solver.interval is -2"),
        ({"segment_length": -1}, "solver.segment_length is -1"),
        ({"segment_length": 8}, "solver.segment_length is set, but solver.activation_checkpointing is false"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        ChunkedConfig(name="chunked", **changes).check()


def test_good_settings_pass():
    ChunkedConfig(name="chunked", interval=7).check()
    ChunkedConfig(name="chunked", activation_checkpointing=True, segment_length=8).check()


def test_sequential():
    exact = sequential(build(ChunkedConfig(name="chunked", interval=4)))
    assert isinstance(exact, Chunked)
    assert exact.interval == 1
    parallel = build(PARALLEL)
    assert sequential(parallel) is parallel


@pytest.mark.parametrize("model", [RLT, Transformer])
def test_adapt(model):
    model = make_model(model, model.variants()["plain"])
    dormant = {id(parameter) for parameter in model.dormant_parameters()}
    for solver, asleep in ((build(PARALLEL), True), (build(CHUNKED), False)):
        solver.adapt(model)
        assert model.checkpoint_blocks is False
        for parameter in model.parameters():
            assert parameter.requires_grad == (not asleep or id(parameter) not in dormant)
    build(ParallelConfig(name="parallel", activation_checkpointing=True)).adapt(model)
    assert model.checkpoint_blocks is True


def test_new_carry():
    model = make_model(RLT, RLT.variants()["plain"])
    carry = build(CHUNKED).new_carry(model, 3, starts=torch.tensor([0, 1, 2]))
    assert (carry.length, carry.starts.tolist()) == (0, [0, 1, 2])
    assert torch.equal(carry.register.states, model.initial.expand(3, 1, -1))
    assert carry.register.fed is None
    assert all(memory.length == 0 for memory in carry.memory.values())
    assert build(PARALLEL).new_carry(model, 3).register is None


def test_running_leaves_the_carry_as_it_was():
    """A carry can be gone on from twice."""
    config = RLT.variants()["plain"]
    model, tokens, solver = make_model(RLT, config), make_tokens(config), build(CHUNKED)
    carry = solver.run(model, tokens[:, :5], carry=solver.new_carry(model, len(tokens))).carry
    first = solver.run(model, tokens[:, 5:], carry=carry)
    second = solver.run(model, tokens[:, 5:], carry=carry)
    assert carry.length == 5
    assert torch.equal(first.states, second.states)


@pytest.mark.parametrize("name", [name for name, cls in SOLVERS.items() if cls.feeds_back])
@torch.no_grad()
def test_a_carry_without_a_register_is_refused(name):
    """Feedback cannot be switched on behind a prefix that was computed without."""
    config = RLT.variants()["plain"]
    model, tokens, plain = make_model(RLT, config), make_tokens(config), build(PARALLEL)
    carry = plain.run(model, tokens[:, :4], carry=plain.new_carry(model, len(tokens))).carry
    solver = build(SOLVERS[name].Config(name=name))
    for end in (5, 8):
        with pytest.raises(ValueError, match="solver without feedback; begin with this solver's new_carry"):
            solver.run(model, tokens[:, 4:end], carry=carry)


def test_set_to():
    solver = build(Unrolled.Config(name="unrolled", passes=4, prefix=0.5))
    with solver.set_to({"passes": 1}):
        assert solver.settings() == {"passes": 1, "prefix": 0.5}
        assert not solver.feeding
        with solver.set_to({"prefix": 0.0, "passes": 2}):
            assert solver.settings() == {"passes": 2, "prefix": 0.0}
        assert solver.settings() == {"passes": 1, "prefix": 0.5}
    assert solver.settings() == {"passes": 4, "prefix": 0.5}
    assert solver.feeding
    with pytest.raises(RuntimeError, match="stop"), solver.set_to({"passes": 1}):
        raise RuntimeError("stop")
    assert solver.settings() == {"passes": 4, "prefix": 0.5}


def test_values_are_checked_under_the_name_they_go_by():
    for cls, setting in ((Chunked, "interval"), (Unrolled, "passes"), (Interleaved, "subsets")):
        cls.check_value(setting, 3)
        with pytest.raises(ConfigError, match=rf"solver\.{setting} is 0; .* from 1 on"):
            cls.check_value(setting, 0)
        with pytest.raises(ConfigError, match=r"some name is '2'; .* from 1 on"):
            cls.check_value(setting, "2", "some name")
    with pytest.raises(NotImplementedError, match="Parallel has no setting to change"):
        Parallel.check_value("interval", 1)


# ---------------------------------------------------------------- what is fed


OFFSET = 4  # row index of the first position


def fed_by_hand(fed, register, initial, starts):
    """Return states, and whether they are fed, position by position."""
    rows, length = fed.shape[:2]
    states, any_fed = torch.empty_like(fed), torch.ones(rows, length, dtype=torch.bool)
    for row in range(rows):
        for position in range(length):
            begins = starts is not None and int(starts[row, position]) == position + OFFSET
            if position and not begins:
                states[row, position] = fed[row, position - 1]
                continue
            source = initial if begins else register
            states[row, position] = source.states[row, 0]
            any_fed[row, position] = source.fed is None or bool(source.fed.expand(rows, -1, -1)[row, 0])
    return states, any_fed


@pytest.mark.parametrize("cls", [CRT, FBT, LRT, RLT])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_shifted(cls, packed, begun):
    """Each position is fed the one before, the first the register, a document's first the initial feedback."""
    model, rows, length = make_model(cls, cls.variants()["plain"]), 3, 5
    starts = None
    if packed:
        starts = torch.stack([starts_of(row, OFFSET + length)[OFFSET:] for row in ([0], [0, 4, 7], [0, 2, 6, 8])])
    inputs = Inputs(torch.arange(OFFSET, OFFSET + length)[None], starts, OFFSET + length, {})
    fed = torch.randn(rows, length, model.config.width, generator=random(0), dtype=torch.float64)
    initial = model.initial_feedback(rows)
    register = Feedback(torch.ones(rows, 1, model.config.width, dtype=torch.float64)) if begun else initial
    found = shifted(model, fed, register, inputs)
    states, any_fed = fed_by_hand(fed, register, initial, starts)
    assert torch.equal(found.states, states)
    mask = torch.ones(rows, length, 1, dtype=torch.bool) if found.fed is None else found.fed.expand(rows, length, 1)
    assert torch.equal(mask[..., 0], any_fed)


def test_residual_is_the_share_that_changed():
    new, old = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([3.0, 3.0], dtype=torch.float64)
    assert residual(new, old).item() == pytest.approx(1 / 5)
    assert residual(new, new).item() == 0
    assert residual(new, -new).item() == pytest.approx(2)
    assert residual(0 * new, 0 * new).item() == 0
    assert residual(100 * new.bfloat16(), 100 * old.bfloat16()).item() == pytest.approx(1 / 5)
    assert residual(new, old).dtype == torch.float64
    assert residual(new.bfloat16(), old.bfloat16()).dtype == torch.float32


# ---------------------------------------------------------------- places


def test_place_without_carry():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    index, starts = place(tokens, None, None)
    assert index.tolist() == [[0, 1, 2]]
    assert starts is None
    given_starts = torch.tensor([[0, 0, 2], [0, 1, 1]])
    assert place(tokens, given_starts, None)[1] is given_starts


def test_place_goes_on_from_the_carry():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    index, starts = place(tokens, None, Carry({}, length=5))
    assert index.tolist() == [[5, 6, 7]]
    assert starts is None
    given_starts = torch.tensor([[4, 4, 7], [0, 6, 6]])
    assert place(tokens, given_starts, Carry({}, length=5, starts=torch.tensor([1, 1])))[1] is given_starts


def test_place_makes_padding_a_document_of_its_own():
    tokens = torch.zeros(3, 4, dtype=torch.int64)
    index, starts = place(tokens, None, Carry({}, starts=torch.tensor([0, 2, 6])))
    assert starts.tolist() == [[0, 0, 0, 0], [0, 0, 2, 2], [0, 0, 0, 0]]
    index, starts = place(tokens, None, Carry({}, length=4, starts=torch.tensor([0, 2, 6])))
    assert index.tolist() == [[4, 5, 6, 7]]
    assert starts.tolist() == [[0, 0, 0, 0], [2, 2, 2, 2], [0, 0, 6, 6]]


# ---------------------------------------------------------------- chunks


def documents(draw, end, unit):
    return [0, *(unit * each for each in sorted(draw(st.sets(st.integers(1, max(1, end // unit)), max_size=4))))]


@st.composite
def rows_of_documents(draw, aligned):
    offset, length = draw(st.integers(0, 7)), draw(st.integers(1, 12))
    interval, rows = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    end = offset + length
    borders = [documents(draw, end, interval if aligned else 1) for _ in range(rows)]
    starts = torch.stack([starts_of(row, end)[offset:] for row in borders])
    index = torch.arange(offset, end)[None]
    values = {"index": index.expand(rows, -1), "one": index}
    return Inputs(index, starts, end, values), offset, interval


def chunks_by_definition(inputs, interval):
    """Return each row's chunks as (row indices, begins a document, complete).

    A chunk is what lies between two multiples of the interval, counted from the document's start; of one that began in
    an earlier call or goes on in a later one, the part at hand.
    """
    found = []
    for starts in inputs.starts.tolist():
        chunks = {}
        for position, start in zip(inputs.index[0].tolist(), starts, strict=True):
            chunks.setdefault((start, (position - start) // interval), []).append(position)
        found.append(
            [
                (positions, positions[0] == start, positions[-1] - start == (number + 1) * interval - 1)
                for (start, number), positions in chunks.items()
            ]
        )
    return found


def check_chunks(chunks, inputs, interval):
    expected = chunks_by_definition(inputs, interval)
    assert len(chunks) == max(len(row) for row in expected)
    for number, chunk in enumerate(chunks):
        part = chunk.cut(inputs)
        assert part.length <= interval
        for row, definition in enumerate(expected):
            valid = [True] * part.length if part.valid is None else part.valid[row].tolist()
            slots = part.index.expand(len(expected), -1)[row].tolist()
            positions = [slot for slot, is_one in zip(slots, valid, strict=True) if is_one]
            assert valid == sorted(valid, reverse=True), "positions come first, empty slots last"
            fresh = chunk.fresh is not None and bool(chunk.fresh[row])
            commit = chunk.commit if isinstance(chunk.commit, bool) else bool(chunk.commit[row])
            if number >= len(definition):
                assert (positions, fresh, commit) == ([], False, False)
                continue
            assert (positions, fresh, commit) == definition[number]
            assert all(position < part.stop for position in positions)
            assert part.values["index"][row].tolist()[: len(positions)] == positions
            assert part.values["one"].expand(len(expected), -1)[row].tolist()[: len(positions)] == positions
            places = [position - int(inputs.index[0, 0]) for position in positions]
            assert part.starts[row].tolist()[: len(positions)] == inputs.starts[row][places].tolist()
            last = part.length - 1 if chunk.last is None else int(chunk.last[row])
            assert last == len(positions) - 1
    assert max(int(chunk.cut(inputs).stop) for chunk in chunks) == inputs.stop


@settings(max_examples=200)
@given(rows_of_documents(aligned=False))
def test_uneven_chunks(scene):
    inputs, offset, interval = scene
    chunks, places = uneven_chunks(inputs, offset, interval)
    check_chunks(chunks, inputs, interval)
    joined = torch.cat([chunk.cut(inputs).values["index"] for chunk in chunks], dim=1)
    parts = [chunk.cut(inputs) for chunk in chunks]
    every = [torch.ones(part.index.shape, dtype=torch.bool) for part in parts]
    valid = torch.cat([full if part.valid is None else part.valid for part, full in zip(parts, every, strict=True)], 1)
    assert torch.equal(pick(joined, places), inputs.values["index"])
    assert bool(pick(valid, places).all())


@settings(max_examples=100)
@given(rows_of_documents(aligned=True))
def test_even_chunks(scene):
    inputs, offset, interval = scene
    check_chunks(even_chunks(inputs, offset, interval), inputs, interval)


@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 14))
def test_even_chunks_of_one_document(offset, length, interval):
    index = torch.arange(offset, offset + length)[None]
    chunks = even_chunks(Inputs(index, None, offset + length, {"index": index}), offset, interval)
    assert all(chunk.fresh is None and chunk.last is None for chunk in chunks)
    parts = [chunk.cut(Inputs(index, None, offset + length, {"index": index})) for chunk in chunks]
    assert torch.equal(torch.cat([part.values["index"] for part in parts], dim=1), index)
    for chunk, part in zip(chunks, parts, strict=True):
        assert len(set((part.index[0] // interval).tolist())) == 1
        assert part.stop == int(part.index[0, -1]) + 1
        assert chunk.commit is (part.stop % interval == 0)
    assert len(chunks) == len(set((index[0] // interval).tolist()))
