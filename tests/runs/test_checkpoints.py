"""Checkpoints on disk are whole or invisible."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from pipeline.errors import RunError, RunWarning
from pipeline.runs.checkpoints import DESCRIPTION, CheckpointStore


def write(store, step, content=b"weights"):
    with store.writing(step, tokens=step * 10) as folder:
        (folder / "model.bin").write_bytes(content)
        (folder / "part").mkdir()
        (folder / "part" / "state.bin").write_bytes(content * 2)


def test_a_checkpoint_records_itself(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.list() == []
    assert store.newest_whole() is None
    write(store, 7)
    (found,) = store.list()
    assert (found.path.name, found.step) == ("step_0000000007", 7)
    description = found.verify()
    assert description["tokens"] == 70
    assert set(description["files"]) == {"model.bin", "part/state.bin"}


def test_nothing_is_visible_until_the_end(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(OSError, match="full"):
        half_write(store)
    assert store.list() == []
    assert list(tmp_path.iterdir()) == []


def half_write(store):
    with store.writing(1) as folder:
        (folder / "model.bin").write_bytes(b"x")
        assert store.list() == []
        raise OSError("disk full")


@pytest.mark.parametrize(
    "damage", ["truncate", "flip", "remove", "description", "format", "edited", "renamed", "empty"]
)
def test_damage_is_found_and_the_one_before_is_used(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    write(store, 2)
    file = store.at(2).path / "part" / "state.bin"
    description = store.at(2).path / DESCRIPTION
    match damage:
        case "truncate":
            os.truncate(file, 3)
        case "flip":
            file.write_bytes(b"Weightsweights")
        case "remove":
            file.unlink()
        case "description":
            description.write_text("{")
        case "format":
            description.write_text(json.dumps({**json.loads(description.read_text()), "format": 99}))
        case "edited":
            description.write_text(json.dumps({**json.loads(description.read_text()), "files": {}}))
        case "renamed":
            store.at(2).path.rename(tmp_path / "step_0000000009")
        case "empty":
            description.unlink()
    with pytest.raises(RunError, match=r"step_000000000[29]"):
        store.list()[-1].verify()
    with pytest.warns(RunWarning, match="trying the one before"):
        found = store.newest_whole()
    assert found is not None
    assert found.step == 1


def test_all_damaged_is_an_error_and_no_silent_start_from_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    (store.at(1).path / "model.bin").unlink()
    with pytest.warns(RunWarning, match="is missing"), pytest.raises(RunError, match="all 1 checkpoints are damaged"):
        store.newest_whole()


def test_a_damaged_one_is_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 3)
    (store.at(3).path / "model.bin").unlink()
    write(store, 3, b"better")
    store.at(3).verify()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (1, 0, [50]),
        (2, 0, [40, 50]),
        (1, 20, [20, 40, 50]),
        (9, 0, [10, 20, 30, 40, 50]),
        (2, 10, [10, 20, 30, 40, 50]),
    ],
)
def test_prune(tmp_path, keep_last, keep_every, left):
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30, 40, 50):
        write(store, step)
    store.prune(50, keep_last, keep_every)
    assert [each.step for each in store.list()] == left


def test_prune_counts_no_damaged_one_for_a_whole_one(tmp_path):
    """Resumed from 10, since 30 is damaged, and saved at 20: 20 must stay, whatever lies after it."""
    store = CheckpointStore(tmp_path)
    for step in (10, 30, 20):
        write(store, step)
    (store.at(30).path / "model.bin").unlink()
    store.prune(20, keep_last=1, keep_every_steps=0)
    assert [each.step for each in store.list()] == [20, 30]
    with pytest.warns(RunWarning, match="is missing"):
        newest = store.newest_whole()
    assert newest is not None
    assert newest.step == 20


def test_other_names_are_none_of_its_business(tmp_path):
    store = CheckpointStore(tmp_path)
    for name in ("step_1", "step_0000000001x", "notes", ".writing-0000000009"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_0000000005").write_text("a file")
    assert store.list() == []
    store.remove_unfinished()
    assert not (tmp_path / ".writing-0000000009").exists()
    assert (tmp_path / "notes").exists()
    with pytest.raises(RunError, match="has no checkpoint of step 4; it has: none"):
        store.at(4)


WRITER = """
import sys
from pathlib import Path
from pipeline.runs.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
store.remove_unfinished()
step = store.list()[-1].step if store.list() else 0
while True:
    step += 1
    with store.writing(step) as folder:
        for part in range(4):
            (folder / f"{part}.bin").write_bytes(bytes([part, step % 256]) * 50_000)
    store.prune(step, 2, 0)
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(8))
def test_killed_while_writing(tmp_path, seed):
    """A writer that dies at any moment leaves whole checkpoints, and no fewer than it may keep."""
    draw, store = random.Random(seed), CheckpointStore(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(draw.random() * 0.05)
    process.send_signal(signal.SIGKILL)
    printed = process.communicate()[0].split()
    found = store.list()
    assert len(found) >= 2
    for checkpoint in found:
        checkpoint.verify()
    assert found[-1].step >= int(printed[-1]) if printed else 3
