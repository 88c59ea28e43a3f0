"""What ranks conclude from each other's signs of life; no time passes."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.training import phases
from pipeline.training.heartbeat import Beat, Judge
from pipeline.training.last_place import LastPlace
from pipeline.training.processes import Process, how_it_ended, returncode
from pipeline.training.wire import Wire

SILENCE, HANG = 60.0, 600.0


def judge(*, own=0, ranks=(0, 1, 2), now=0.0):
    return Judge(list(ranks), own, SILENCE, HANG, now)


def hear_all(judge, now, **beats):
    for rank in range(3):
        judge.hear(rank, beats.get(f"rank{rank}", Beat(number=int(now), step=5, phase="forward", count=20)), now)


def test_all_is_well():
    watcher = judge()
    for now in range(0, 100_000, 50):
        hear_all(watcher, now, **{f"rank{rank}": Beat(now, 5, "forward", count=now) for rank in range(3)})
        assert watcher.look(now, {}, {1: "its process is alive"}) is None


def test_own_words_come_first():
    watcher = judge()
    hear_all(watcher, 1.0, rank2=Beat(1, 8, "save", 20, words="no space left on device"))
    found = watcher.look(1.0, {2: "ended with exit code 2"}, {})
    assert (found.rank, found.text) == (2, "rank 2 failed at step 8, in save: no space left on device")


@pytest.mark.parametrize(
    ("beat", "where"),
    [
        (Beat(1, 0, "start", 1), "before the first step"),
        (Beat(1, 5, "between steps", 1), "at step 5, between steps"),
        (Beat(1, 5, "backward", 1), "at step 5, in backward"),
    ],
)
def test_an_ended_process(beat, where):
    watcher = judge()
    hear_all(watcher, 1.0, rank1=beat)
    found = watcher.look(1.0, {1: how_it_ended(-9)}, {})
    assert found.text == f"rank 1 was killed by signal 9 (SIGKILL) {where}"
    assert not found.silent


def test_last_place_of_an_ended_process_corrects_its_last_beat():
    watcher = judge()
    hear_all(watcher, 1.0)
    watcher.place(1, 6, "save")
    assert watcher.look(1.0, {1: how_it_ended(None)}, {}).text == "rank 1 is gone at step 6, in save"


def test_silence():
    watcher = judge()
    hear_all(watcher, 0.0)
    for now in (30.0, 61.0):
        for rank in (0, 2):
            watcher.hear(rank, Beat(2, 5, "backward", 21), now)
        found = watcher.look(now, {}, {1: "its process is stopped"})
        assert (found is None) is (now == 30.0)
    assert found.text == "rank 1 has been silent for 61 s at step 5, in forward; its process is stopped"
    assert (found.rank, found.silent) == (1, True)


def test_time_in_which_the_watcher_itself_stood_still_does_not_count():
    watcher = judge()
    hear_all(watcher, 0.0)
    watcher.forgive(10_000.0)
    assert watcher.look(10_000.0, {}, {}) is None
    assert watcher.look(10_061.0, {}, {}).silent


def test_the_rank_that_the_others_wait_for():
    watcher = judge()
    for now in range(0, 700, 50):
        hear_all(
            watcher, now, rank1=Beat(now, 5, "forward", 19, "disk.py:3 in read"), rank0=Beat(now, 5, "backward", 20)
        )
        found = watcher.look(now, {}, {})
        assert (found is None) is (now <= HANG)
        if found is not None:
            break
    assert found.text == "rank 1 has made no progress for 650 s at step 5, in forward (disk.py:3 in read)"
    assert not found.silent


def test_ranks_that_all_hang():
    watcher = judge()
    for now in range(0, 700, 50):
        hear_all(watcher, now, **{f"rank{rank}": Beat(now, 5, "save", 19, f"a.py:{rank} in f") for rank in range(3)})
    assert watcher.look(650.0, {}, {}).text == (
        "no rank has made progress for 650 s at step 5, in save "
        "(rank 0 at a.py:0 in f; rank 1 at a.py:1 in f; rank 2 at a.py:2 in f)"
    )


def test_a_long_phase_that_goes_on_is_progress():
    watcher = judge()
    for now in range(0, 10_000, 50):
        hear_all(watcher, now, **{f"rank{rank}": Beat(now, 5, "validation", now // 500) for rank in range(3)})
        assert watcher.look(now, {}, {}) is None


def test_processes():
    this = Process.this()
    assert this.here
    assert this.life().alive
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        other = Process(this.host, this.name, child.pid, int(stat[19]))
        assert other.life().alive
        assert not Process(this.host, this.name, child.pid, 1).life().alive  # an older process of the same number
        other.kill()
        assert child.wait() == -signal.SIGKILL
    assert not other.life().alive
    other.kill()  # nothing is there
    assert Process("elsewhere", "elsewhere", 1, 1).life() is None
    assert returncode(None) is None
    assert (returncode(9), returncode(3 << 8)) == (-9, 3)
    assert how_it_ended(3) == "ended with exit code 3"


def test_wire():
    one, other = map(Wire, socket.socketpair())
    one.send(beat={"number": 1})
    one.send(verdict=None)
    assert other.read() == [{"beat": {"number": 1}}, {"verdict": None}]
    assert other.read() == []
    assert not other.closed
    one.connection.send(b"no message\n")
    assert other.read() == []
    assert other.closed
    one, other = map(Wire, socket.socketpair())
    one.send(last=True)
    one.close()
    assert other.read() == [{"last": True}]
    assert other.closed
    other.send(more=True)  # nobody is there


def test_a_reader_that_reads_nothing_stops_nobody():
    one, other = map(Wire, socket.socketpair())
    for number in range(20_000):
        one.send(number=number, padding="x" * 100)
        if number % 5000 == 4999:
            other.read()
    assert not other.closed


def test_last_place():
    own = LastPlace()
    try:
        other = LastPlace(own.path)
    finally:
        own.remove_file()
    assert other.read() == (0, phases.START)
    own.write(phases.Moment(7, phases.SAVE, 1))
    assert other.read() == (7, phases.SAVE)


def test_phases():
    heard = []
    phases.listen(heard.append)
    try:
        phases.enter(phases.FORWARD, 3)
        with phases.within(phases.SAVE):
            pass
        assert list(phases.marked([1, 2])) == [1, 2]
        with pytest.raises(ZeroDivisionError), phases.within(phases.VALIDATION):
            raise ZeroDivisionError
    finally:
        phases.listen(None)
    assert [each.phase for each in heard[1:]] == ["forward", "save", "forward", "validation"]
    assert phases.now().phase == phases.VALIDATION
    assert phases.now().count == heard[0].count + 6
    assert {each.step for each in heard[1:]} == {3}
