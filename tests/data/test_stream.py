import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.loader import EvaluationLoader, StreamLoader, describe_position
from pipeline.data.manifest import Manifest
from pipeline.data.order import GlobalOrder
from pipeline.data.shards import TokenReader
from pipeline.data.stream import EvaluationStream, TrainStream, document_starts
from pipeline.errors import ConfigError, DataError
from tests.data.cases import rows_by_sample

T = 32

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def tokens(prepared):
    reader = TokenReader(Manifest.load(prepared), "train")
    return reader.read(0, reader.total).astype(np.int64)


def stream(data, **changes):
    settings_ = {"sequence_length": T, "seed": 3, "rows_per_batch": 24, "rows_per_micro_batch": 4, "total_samples": 240}
    return TrainStream(data, **{**settings_, **changes})


def same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert (a[key] is None and b[key] is None) or torch.equal(a[key], b[key])


def test_rows_are_the_tokens_that_the_order_says(prepared, tokens):
    count = (len(tokens) - 1) // T
    samples = 3 * count // 24 * 24
    order = GlobalOrder(3, count).sequence(np.arange(samples))
    found = rows_by_sample(stream(prepared, total_samples=samples))
    assert sorted(found) == list(range(samples))
    for sample, row in found.items():
        start = order[sample] * T
        assert row == tokens[start : start + T + 1].tolist()
    # Every epoch is every row once.
    assert sorted(order[:count]) == list(range(count))


def test_types_and_shapes(prepared):
    batch = next(iter(stream(prepared)))
    assert batch["tokens"].dtype == batch["samples"].dtype == torch.int64
    assert batch["tokens"].shape == (4, T + 1)
    assert batch["samples"].tolist() == [0, 1, 2, 3]
    assert batch["tokens"].is_contiguous()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_ranks_and_workers_partition_every_step_exactly(prepared, ranks, workers):
    whole = rows_by_sample(stream(prepared, rows_per_micro_batch=24))
    parts = []
    for rank in range(ranks):
        alone = list(stream(prepared, rank=rank, world_size=ranks))
        loader = StreamLoader(stream(prepared, rank=rank, world_size=ranks), workers)
        batches = list(loader)
        same(batches, alone)
        assert len(batches) == len(loader) == 240 // (4 * ranks)
        parts.append(batches)
    # Micro-batch m of step k on rank r holds rows k G + (m R + r) b and the next b - 1.
    for rank, batches in enumerate(parts):
        for number, batch in enumerate(batches):
            step, micro = divmod(number, 24 // (4 * ranks))
            first = step * 24 + (micro * ranks + rank) * 4
            assert batch["samples"].tolist() == list(range(first, first + 4))
    assert rows_by_sample(batch for batches in parts for batch in batches) == whole


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_resuming_anywhere_with_anything_else_changed_gives_the_same_rows(prepared, data):
    whole = rows_by_sample(stream(prepared, rows_per_micro_batch=24, total_samples=960))
    found, saved, goal = {}, None, 0
    for _ in range(data.draw(st.integers(1, 4))):
        ranks, micro, accumulate = (data.draw(st.integers(1, 4)) for _ in range(3))
        batch = ranks * micro * accumulate
        loaders = [
            StreamLoader(
                stream(
                    prepared,
                    rank=rank,
                    world_size=ranks,
                    rows_per_micro_batch=micro,
                    rows_per_batch=batch,
                    total_samples=960,
                )
            )
            for rank in range(ranks)
        ]
        if saved is not None:
            for loader in loaders:
                loader.load_state_dict(saved)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(data.draw(st.integers(0, min(4, (960 - goal) // batch)))):
            for iterator in iterators:
                for _ in range(accumulate):
                    for sample, row in rows_by_sample([next(iterator)]).items():
                        assert sample not in found
                        found[sample] = row
            goal += batch
            for loader in loaders:
                loader.advance(batch)
        # More is read ahead than is trained on, and does not count.
        for iterator in iterators:
            next(iterator, None)
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        saved = states[0]
    assert saved["samples"] == goal
    assert saved["tokens"] == goal * T
    assert found == {sample: whole[sample] for sample in range(goal)}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_length_counts_the_whole_run_also_after_resuming(prepared, workers):
    loader = StreamLoader(stream(prepared), workers)
    assert len(loader) == 60
    iterator = iter(loader)
    for _ in range(18):
        next(iterator)
    loader.advance(72)
    assert len(loader) == 60
    later = StreamLoader(stream(prepared, rows_per_micro_batch=12), workers)
    later.load_state_dict(loader.state_dict())
    # 72 rows are done and 168 left, 12 at once.
    assert later.micro_batches_done == 6
    assert len(later) == 6 + 14
    assert len(list(later)) == 14
    with pytest.raises(TypeError, match="no end"):
        len(StreamLoader(stream(prepared, total_samples=None)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_iteration_starts_where_the_run_is(prepared, workers):
    loader = StreamLoader(stream(prepared), workers)
    iterator = iter(loader)
    next(iterator)
    loader.advance(48)
    same(loader, stream(prepared, first_sample=48))
    loader.load_state_dict({**loader.state_dict(), "samples": 24})
    same(loader, stream(prepared, first_sample=24))
    same(loader, stream(prepared, first_sample=24))


def test_the_state_is_plain_and_positions_are_words(prepared):
    loader = StreamLoader(stream(prepared))
    loader.advance(240)
    state = loader.state_dict()
    assert all(type(value) in (int, str) for value in state.values())
    assert "sample 240, tokens 7680" in loader.position()
    assert describe_position({"samples": 25, "tokens": 100}, 10) == "epoch 2, sample 25, tokens 100"
    assert describe_position({}) == "sample 0, tokens 0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, "the seed was 3 and is now 4"),
        ({"sequence_length": 16}, "the sequence length was 32 and is now 16"),
        ({"split": "validation"}, "the split was 'train' and is now 'validation'"),
        ({"document_boundaries": "continue"}, "document_boundaries was 'restart' and is now 'continue'"),
    ],
)
def test_a_position_of_another_stream_is_refused(prepared, change, words):
    state = StreamLoader(stream(prepared)).state_dict()
    with pytest.raises(DataError) as caught:
        StreamLoader(stream(prepared, **change)).load_state_dict(state)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_position_in_other_data_is_refused(prepared, tmp_path):
    from pipeline.data.prepare import prepare
    from tests.data.small_corpora import config_for, write_corpus

    prepare(config_for(tmp_path / "other", write_corpus(tmp_path / "texts", 30)))
    state = StreamLoader(stream(prepared)).state_dict()
    with pytest.raises(DataError, match="the data \\(manifest fingerprint\\) was"):
        StreamLoader(stream(tmp_path / "other")).load_state_dict(state)
    with pytest.raises(DataError, match="format None"):
        StreamLoader(stream(prepared)).load_state_dict({})
    # Moved data are the same data.
    StreamLoader(stream(shutil.copytree(prepared, tmp_path / "moved"))).load_state_dict(state)


def test_document_starts_against_the_obvious_loop(prepared, tokens):
    some = 0
    for batch in stream(prepared, sequence_length=400, rows_per_batch=4, total_samples=200):
        inputs = batch["tokens"][:, :-1]
        expected = torch.zeros_like(inputs)
        for row in range(len(inputs)):
            begin = 0
            for place in range(400):
                if inputs[row, place] == 256:
                    begin = place
                expected[row, place] = begin
        if batch["starts"] is None:
            assert not expected.any()
        else:
            some += 1
            assert batch["starts"].dtype == torch.int64
            assert torch.equal(batch["starts"], expected)
            assert expected.any()
    assert some > 10
    continued = stream(prepared, sequence_length=400, document_boundaries="continue")
    assert all(batch["starts"] is None for batch in continued)


def test_document_starts_at_the_borders():
    # The last token of a row is a target only; a beginning at position 0 is no news.
    assert document_starts(np.array([[9, 1, 2, 9], [1, 1, 1, 1]]), 9) is None
    assert document_starts(np.array([[9, 9, 2, 9], [1, 2, 9, 1]]), 9).tolist() == [[0, 1, 1], [0, 0, 2]]
    assert document_starts(np.array([[1, 9, 9, 9]]), 9, np.array([1])) is None


def test_batches_that_cannot_be_dealt_out_are_refused(prepared):
    with pytest.raises(ConfigError, match="24 rows; it must be a multiple"):
        stream(prepared, world_size=5)
    with pytest.raises(DataError, match="too few for one row"):
        stream(prepared, sequence_length=10**6)
    with pytest.raises(DataError, match="no split 'test'"):
        stream(prepared, split="test")
    with pytest.raises(ValueError, match="rank is 2"):
        stream(prepared, rank=2, world_size=2)


def test_a_missing_shard_fails_at_the_start(prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "data")
    (folder / Manifest.load(folder).splits["train"].shards[-1].file).unlink()
    with pytest.raises(DataError, match="is missing"):
        stream(folder)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_in_a_loader_process_is_the_same_one_line(prepared, tmp_path, workers):
    folder = shutil.copytree(prepared, tmp_path / "data")
    loader = StreamLoader(stream(folder), workers)
    shard = Manifest.load(folder).splits["train"].shards[1]
    os.truncate(folder / shard.file, 512)
    with pytest.raises(DataError, match="is truncated") as caught:
        list(loader)
    assert type(caught.value) is DataError
    assert "\n" not in str(caught.value)


def test_loaders_draw_nothing_from_the_global_generator(prepared):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 2):
        list(StreamLoader(stream(prepared), workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_processes_survive_the_signals_of_a_cluster(prepared):
    loader = StreamLoader(stream(prepared, total_samples=24 * 40), 2)
    iterator = iter(loader)
    processes = loader._iterator._workers  # they may still be starting
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        # Not from the main process itself, whose SIGTERM they obey.
        for process in processes:
            os.system(f"kill -{int(number)} {process.pid}")
    time.sleep(0.3)
    assert all(process.is_alive() for process in processes)
    same(iterator, stream(prepared, total_samples=24 * 40))
    # The main process can still end them.
    processes[0]._popen._send_signal(signal.SIGTERM)
    processes[0].join(5)
    assert not processes[0].is_alive()


def test_the_stream_can_be_sent_to_a_spawned_process(prepared):
    loader = StreamLoader(stream(prepared, total_samples=48), 1)
    loader.multiprocessing_context = "spawn"
    same(loader, stream(prepared, total_samples=48))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("limit", [0, 1, 1000, 10**9])
def test_evaluation_covers_every_target_once(prepared, tokens, ranks, limit):
    targets, seen = [], []
    sizes = set()
    for rank in range(ranks):
        evaluation = EvaluationStream(
            prepared,
            "train",
            sequence_length=T,
            rows_per_micro_batch=5,
            rank=rank,
            world_size=ranks,
            limit_tokens=limit,
        )
        loader = EvaluationLoader(evaluation, 2 if limit == 1000 else 0)
        batches = list(loader)
        same(loader, batches)
        sizes.add((len(batches), len(loader), evaluation.targets))
        for batch in batches:
            assert batch["tokens"].shape == (5, T + 1)
            for row in range(5):
                valid = batch["valid"][row]
                sample = int(batch["samples"][row])
                assert (sample < 0) == (not valid.any())
                if sample >= 0:
                    seen.append(sample)
                    targets += [
                        (sample * T + place, int(batch["tokens"][row, place + 1])) for place in range(T) if valid[place]
                    ]
                    assert batch["tokens"][row, 0] == tokens[sample * T]
    assert len(sizes) == 1
    count = {0: len(tokens) - 1, 1: T, 1000: 1000 // T * T, 10**9: len(tokens) - 1}[limit]
    assert (len(tokens) - 1) % T != 0
    assert sizes.pop()[2] == count
    assert sorted(targets) == [(place, int(tokens[place + 1])) for place in range(count)]
    assert sorted(seen) == list(range(-(-count // T)))


def test_evaluation_marks_documents_only_where_there_is_text(prepared):
    evaluation = EvaluationStream(prepared, "validation", sequence_length=64, rows_per_micro_batch=1000)
    (batch,) = list(evaluation)
    assert batch["starts"] is not None
    assert not batch["starts"][~batch["valid"].any(dim=1)].any()
