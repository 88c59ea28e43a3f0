"""Kills and hangs of single ranks, one after the other in one run, which goes on each time."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline import config_files
from pipeline.runs.checkpoints import CheckpointStore
from tests.support import environment, losses, rows, run_config

REPOSITORY = Path(__file__).resolve().parent.parent
SAVES, VALIDATIONS = 4, 6  # steps from one to the next
# Limits of the watch that tests can wait for. A machine that does much else may let a rank stand still for seconds.
LIMITS = ("training.silence_seconds=10", "training.timeout_seconds=30", "training.grace_seconds=3")
BOUND = 240
"""Seconds after which a test gives up; the limits end a run long before."""


@dataclass(frozen=True)
class Plan:
    """What happens to a rank; see ``tests.training.failing``.

    Attributes:
        cause: what the message of another rank says of it, a regular expression.
    """

    rank: int = 0
    step: int = 0
    phase: str = ""
    action: str = ""
    delay: float = 0.0
    cause: str = r"was killed by signal 9 \(SIGKILL\)"

    def after(self, last: int) -> "Plan":
        """Return the plan at its first place behind a step."""
        every = {"save": SAVES, "validation": VALIDATIONS}.get(self.phase, 1)
        step = (last // every + 1) * every
        return Plan(self.rank, max(step, last + 1), self.phase, self.action, self.delay, self.cause)


@dataclass(frozen=True)
class Ended:
    """A run of two ranks that has ended; nothing of it is left."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The errors that its ranks have printed."""
        return [line for line in self.err.splitlines() if line.startswith("backfeed: ")]


def run_ranks(plan: Plan | None, config: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> Ended:
    """Train on two ranks to the end, however it comes, and see that no process is left."""
    planned = {} if plan is None else {key: value for key, value in asdict(plan).items() if key != "cause"}
    line = ["tests.training.failing", json.dumps(planned), "-", "train", str(config), "training.devices=2", *arguments]
    process = subprocess.Popen(
        [*(launcher or (sys.executable,)), "-m", *line],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=BOUND)  # until the last rank has closed the pipes
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{plan} hangs\n{out}{err}") from None
    assert not living(process.pid), f"{plan}: processes are left\n{out}{err}"
    return Ended(process.returncode, out, err)


def living(session: int) -> list[int]:
    """Return the processes of a session that have not ended. One whose parent is gone may wait to be reaped by the
    system's first process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, of_session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of_session) == session and not (state in "ZX" and int(parent) in (0, 1)):
            found.append(int(path.parent.name))
    return found


def write_config(folder: Path, data: Path, *overrides: str) -> Path:
    """Write a run of two ranks with quick limits."""
    path = folder / "config.yaml"
    every = (f"checkpoint.every_steps={SAVES}", f"validation.every_steps={VALIDATIONS}")
    overrides = ("training.micro_batch_tokens=64", "training.tokens=25600", "logging.every_steps=1", *every, *overrides)
    config_files.save(run_config(folder / "runs", data, *overrides), path)
    return path


def survive_ranks(folder: Path, data: Path, strategy: str, plans: list[Plan], tell=lambda line: None) -> int:
    """Let the plans happen in one run, resume it each time; return after how many everything was as it should be.

    Args:
        folder: an empty folder.
        data: prepared data.
        strategy: of ``training.strategy``.
        plans: what happens, in this order.
        tell: is told of each.
    """
    config = write_config(folder, data, f"training.strategy={strategy}")
    whole = run_ranks(None, config, "run.name=whole")
    assert whole.code == 0, whole.err
    cut, store = folder / "runs/cut", CheckpointStore(folder / "runs/cut/checkpoints")
    for number, plan in enumerate([*plans, None]):
        saved = store.list()
        newest = saved[-1].step if saved else 0
        for each in saved:
            each.verify()
        here = None if plan is None else plan.after(newest + number % 3)
        ended = run_ranks(here, config, "run.name=cut", "--resume", "auto", *LIMITS)
        if newest:
            assert f"resuming from {saved[-1].path}" in ended.out, ended.out + ended.err
        if here is None:
            assert ended.code == 0, ended.out + ended.err
        else:
            check(here, ended)
            tell(f"{here.action} of rank {here.rank} at step {here.step}, {here.phase}: {ended.lines[0]}")
    assert losses(cut) == losses(folder / "runs/whole"), "a loss differs from the undisturbed run's"
    assert rows(cut, "validation") == rows(folder / "runs/whole", "validation")
    assert not list((cut / "checkpoints").glob(".writing-*"))
    return len(plans)


def check(plan: Plan, ended: Ended) -> None:
    """See that a run has ended as it should after something happened."""
    assert ended.code not in (0, -signal.SIGABRT), ended.out + ended.err
    assert ended.lines, ended.out + ended.err
    place = ".*" if plan.delay else re.escape(f"at step {plan.step}, ") + f".*{plan.phase}"
    named = re.compile(f"backfeed: rank {plan.rank} (?=.*(?:{plan.cause}))(?=.*{place})")
    assert any(named.match(line) for line in ended.lines), ended.out + ended.err


def kills(count: int, seed: int) -> list[Plan]:
    """Return kills of either rank, at the begin of every phase of a step, and at moments in the middle of saves."""
    draw = random.Random(seed)
    phases = ["forward", "save", "backward", "save", "optimizer step", "validation"]
    return [
        Plan(number % 2, 0, phase, "SIGKILL", draw.uniform(0, 0.05) if phase == "save" and number % 4 > 1 else 0.0)
        for number, phase in ((each, phases[each % len(phases)]) for each in range(count))
    ]
