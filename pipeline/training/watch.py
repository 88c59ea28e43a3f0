"""Ranks that watch each other: when one dies, hangs or fails, all say which one and why, and end.

Every rank has a thread that tells the first rank once a second where its main thread is, over a connection of its own:
a collective, of whatever backend and strategy, is never waited for. The system closes the connection of a process that
dies, on any machine. The first rank tells all others what it concludes; they watch the first. The thread goes on while
the main thread is blocked. Where that holds Python's lock meanwhile, its rank is silent, and is ended by the others on
its machine or by a timer of the system.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from pipeline.errors import TrainingError, UserError
from pipeline.training import distributed, ending, phases
from pipeline.training.heartbeat import Beat, Judge, Verdict
from pipeline.training.last_place import LastPlace
from pipeline.training.launcher import Launcher, StartWatch
from pipeline.training.processes import Process, how_it_ended, returncode
from pipeline.training.wire import Wire

MEETING_SECONDS = 120
"""How much longer collectives wait than ``training.timeout_seconds``: the watch can say which rank they wait for. Ranks
have so long at least to meet at the start."""
RESUME = "go on with --resume auto"
_UNREAPED_SECONDS = 1.0
"""How long a process whose connection is closed may take until the system says how it ended."""


class Watch:
    """One rank's part.

    Args:
        ranks: number of them.
        silence: seconds without a sign of life after which a rank is taken for lost.
        hang: seconds without progress after which a rank, though alive, is taken for hanging.
        grace: seconds that a process has to end by itself once a rank has failed.
        launcher: started the other ranks of this node, where this process did.
    """

    def __init__(self, ranks: int, silence: float, hang: float, grace: float, launcher: Launcher | None = None) -> None:
        self._ranks, self._launcher = ranks, launcher
        self._silence, self._hang, self._grace = silence, hang, grace
        self._main = threading.get_ident()
        self._thread: threading.Thread | None = None
        self._known, self._told, self._left, self._stop = (threading.Event() for _ in range(4))
        self._verdict: Verdict | None = None
        self._words = ""
        self._number = 0

    # ------------------------------------------------------------ the main thread's side

    def start(self) -> None:
        """Begin to watch; all ranks call it once their process group stands."""
        if self._ranks == 1 or self._thread is not None:
            return
        self._rank = dist.get_rank()
        place = LastPlace()
        processes, paths = zip(*distributed.gathered((Process.this(), place.path)), strict=True)
        self._places = {
            rank: LastPlace(path)
            for rank, (process, path) in enumerate(zip(processes, paths, strict=True))
            if process.here and rank != self._rank
        }
        phases.listen(place.write)
        self._others = {rank: each for rank, each in enumerate(processes) if rank != self._rank}
        # A message of each rank a second up to 64 of them: the first rank reads them all.
        self._interval = min(max(1.0, len(processes) / 64), self._silence / 4)
        self._wires: dict[int, Wire] = {}
        self._closed: dict[int, float] = {}
        self._reported: dict[int, str] = {}
        self._connect(all(each.here for each in processes))
        self._judged = list(range(len(processes))) if self._rank == 0 else [0]
        self._judge = Judge(self._judged, self._rank, self._silence, self._hang, time.monotonic())
        dist.barrier(group=distributed.host_group())
        place.remove_file()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        StartWatch.stop()
        self._thread = threading.Thread(target=self._run, name="watch")
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends, unless it is for the loss of another."""
        if self._thread is None or self._words or self._known.is_set() or distributed.lost_peer(error):
            return
        self._say(in_words(error))

    def explained(self, error: BaseException) -> BaseException:
        """Return what to raise for an error: where a collective failed, which rank has failed, and how."""
        if self._ranks == 1 or not distributed.lost_peer(error):
            return error
        # A connection that is closed is seen at once, one that is cut when nothing has come for long enough.
        if self._thread is not None:
            self._known.wait(self._silence + 2 * self._interval + _UNREAPED_SECONDS)
        if self._verdict is None:
            line = f"another rank is gone or does not answer ({str(error).strip().splitlines()[0]})"
            self._say(line)
            return TrainingError(f"{line}; {RESUME}")
        return TrainingError(f"{self._verdict.text}; {RESUME}")

    def finish(self) -> None:
        """Wait for the others at the end of the run, and watch no longer."""
        if self._thread is None:
            return
        dist.barrier(group=distributed.host_group())
        self._end_thread()

    def reap(self) -> None:
        """Wait for the end of the ranks that this one has started, after the end of the run.

        Raises:
            TrainingError: one did not end as it should.
        """
        if self._launcher is not None:
            for rank, code in self._launcher.reap(self._grace).items():
                if code:
                    raise TrainingError(f"the run is at its end, but then rank {rank} {how_it_ended(code)}")

    def abandon(self, error: BaseException) -> None:
        """End after a failure: the first rank only when the others know why; its children never outlive it."""
        code = error.exit_code if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        StartWatch.stop()
        if self._ranks > 1:
            ending.after_failure(code, 2 * self._grace)
        if self._thread is not None:
            self._known.wait(2 * self._interval)
            self._end_thread()
        if self._launcher is not None:
            self._launcher.reap(self._grace)

    def _say(self, words: str) -> None:
        if self._thread is None:
            return
        self._words = words
        self._wake.send(b"w")
        self._told.wait(self._grace)

    def _end_thread(self) -> None:
        assert self._thread is not None
        self._left.set()
        self._stop.set()
        self._wake.send(b"s")
        self._thread.join()
        self._thread = None
        phases.listen(None)
        faulthandler.cancel_dump_traceback_later()

    def _connect(self, one_machine: bool) -> None:
        """Open the connection of each other rank to the first."""
        host = "127.0.0.1" if one_machine else ""
        server, token = None, secrets.token_hex(16)
        if self._rank == 0:
            server = socket.create_server((host, 0), backlog=max(128, len(self._others)))
            server.settimeout(self._silence)
        port, token = distributed.from_first((0 if server is None else server.getsockname()[1], token))
        if server is None:
            address = host or os.environ.get("MASTER_ADDR", "127.0.0.1")
            try:
                wire = Wire(socket.create_connection((address, port), timeout=self._silence))
            except OSError as error:
                raise TrainingError(f"rank 0 cannot be reached at {address}, port {port}: {error}") from None
            wire.send(token=token, rank=self._rank)
            self._wires[0] = wire
            return
        with server:
            while len(self._wires) < len(self._others):
                try:
                    connection, _ = server.accept()
                except OSError:
                    missing = sorted(set(self._others) - set(self._wires))
                    raise TrainingError(f"rank {missing[0]} has not opened its connection to rank 0") from None
                connection.settimeout(self._silence)
                rank = _greeting(connection, token)
                if rank in self._others:
                    self._wires[rank] = Wire(connection)

    # ------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for wire in self._wires.values():
                selector.register(wire, selectors.EVENT_READ)
            last, due = time.monotonic(), 0.0
            while not self._stop.is_set():
                waits = 0.1 if self._closed else max(0.0, due - time.monotonic())
                selector.select(waits)
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(64)
                now = time.monotonic()
                if now - last > 2 * self._interval + 1:  # stopped and continued, perhaps with all others
                    self._judge.forgive(now - last)
                last = now
                if now >= due or (self._words and not self._told.is_set()):
                    due = now + self._interval
                    self._beat(now)
                verdict = self._received(selector, now) or self._judge.look(now, *self._processes(now))
                if verdict is not None:
                    self._carry_out(verdict)
                    break
        for wire in self._wires.values():
            wire.close()

    def _beat(self, now: float) -> None:
        """Say where this rank is."""
        moment = phases.now()
        self._number += 1
        beat = Beat(self._number, moment.step, moment.phase, moment.count, self._place(), self._words)
        self._judge.hear(self._rank, beat, now)
        if self._rank == 0:
            for wire in self._wires.values():
                wire.send(beat=asdict(beat))
        else:
            self._wires[0].send(beat=asdict(beat))
        if self._words and self._rank:
            self._told.set()
        # The system's own thread ends the process should this one no longer come to run.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback_later(self._silence + self._hang, exit=True, file=sys.__stderr__ or sys.stderr)

    def _received(self, selector: selectors.BaseSelector, now: float) -> Verdict | None:
        """Read what has come; return what the first rank has concluded."""
        verdict = None
        for rank, wire in self._wires.items():
            if rank in self._closed:
                continue
            for message in wire.read():
                if "verdict" in message:
                    verdict = Verdict(**message["verdict"])
                elif "beat" in message:
                    self._judge.hear(rank, Beat(**message["beat"]), now)
                elif "ended" in message:
                    self._reported[message["ended"]] = message["how"]
            if wire.closed:
                self._closed[rank] = now
                selector.unregister(wire)
        return verdict

    def _processes(self, now: float) -> tuple[dict[int, str], dict[int, str]]:
        """Return how ranks have ended, and what is known of the processes of others."""
        ends, states = dict(self._reported), {}
        for rank in self._judged:
            if rank == self._rank or rank in ends:
                continue
            process = self._others[rank]
            code = None if self._launcher is None else self._launcher.returncode(rank)
            life = process.life()
            if code is None and life is not None and life.status is not None:
                code = returncode(life.status)
            if rank in self._places:
                self._judge.place(rank, *self._places[rank].read())
            # How a process ended is known a moment after its connection is closed, and not everywhere.
            late = now - self._closed.get(rank, now) > _UNREAPED_SECONDS
            if code is not None:
                ends[rank] = how_it_ended(code)
            elif life is not None and life.alive:
                states[rank] = "its process is stopped" if life.stopped else "its process is alive"
                if late:
                    ends[rank] = "has closed its connection"
            elif life is not None and rank not in self._closed:
                self._closed[rank] = now  # gone before its connection was seen to be closed
            elif late:
                ends[rank] = f"(process {process.pid} on {process.name}) is gone"
        if self._rank and self._launcher is not None:  # the first rank cannot see how children on other machines end
            for rank in self._launcher.children:
                code = self._launcher.returncode(rank)
                if code is not None and rank not in self._reported:
                    self._reported[rank] = how_it_ended(code)
                    self._wires[0].send(ended=rank, how=self._reported[rank])
        return ends, states

    def _carry_out(self, verdict: Verdict) -> None:
        """Tell all, give the main thread time to end, and end the process if it does not."""
        self._verdict = verdict
        if self._rank == 0:
            for wire in self._wires.values():
                wire.send(verdict=asdict(verdict))
        self._told.set()
        self._known.set()
        if verdict.silent and verdict.rank in self._others:
            self._others[verdict.rank].kill()
        if self._left.wait(self._grace):
            return
        ending.tell(f"{verdict.text}; {RESUME}")
        if self._launcher is not None:
            self._launcher.reap(2 * self._interval)
        ending.at_once(1)

    def _place(self) -> str:
        """Return the line of the program at which the main thread is."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return ""
        code = frame.f_code
        return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def in_words(error: BaseException) -> str:
    """Return an error in one line."""
    line = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}".rstrip(": ")


def _greeting(connection: socket.socket, token: str) -> int | None:
    """Return the rank that has opened a connection; None if it is not one of ours."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < 256:
            part = connection.recv(1)
            if not part:
                break
            line += part
        message = json.loads(line)
        if secrets.compare_digest(message["token"], token):
            return int(message["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    connection.close()
    return None
