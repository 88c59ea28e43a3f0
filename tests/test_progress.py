import io

import pytest

from pipeline import progress as module
from pipeline.progress import Progress


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_come_now_and_then_and_at_the_end(clock):
    stream = io.StringIO()
    with Progress(1000, "tokens", "train", stream=stream, every_seconds=10) as progress:
        for _ in range(30):
            clock.now += 1
            progress.advance(20, loss=2.34567)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "train: 200/1.00k tokens (20.0%), 20 tokens/s, 0:00:40 left, loss=2.346"
    assert lines[-1] == "train: 600/1.00k tokens (60.0%), 20 tokens/s, 0:00:30 elapsed, loss=2.346"


def test_what_was_done_before_does_not_count_for_the_rate(clock):
    stream = io.StringIO()
    progress = Progress(4e9, "B", "read", stream=stream, initial=2e9)
    clock.now += 10
    progress.advance(1e9)
    assert stream.getvalue() == "read: 3.00G/4.00G B (75.0%), 100.00M B/s, 0:00:10 left\n"


def test_unknown_totals_nothing_done_and_closing_twice(clock):
    stream = io.StringIO()
    progress = Progress(None, "B", "read", stream=stream)
    progress.close()
    progress.close()
    assert stream.getvalue() == "read: 0 B, 0 B/s, 0:00:00 elapsed\n"
    stream = io.StringIO()
    progress = Progress(0, "B", "none", stream=stream, every_seconds=0)
    progress.advance(0, note="x")
    assert stream.getvalue() == "none: 0/0 B, 0 B/s, 0:00:00 elapsed, note=x\n"
    stream = io.StringIO()
    progress = Progress(10, "B", "slow", stream=stream, every_seconds=0)
    progress.advance(0)
    assert "time left unknown" in stream.getvalue()


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    with Progress(10, "B", "copy", stream=stream, initial=2) as progress:
        progress.advance(8, loss=1.5)
    assert "copy: 100%" in stream.getvalue()
    assert "10.0/10.0" in stream.getvalue()
    assert "loss=1.5" in stream.getvalue()
