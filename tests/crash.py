"""Kill a run at many moments, resume it each time, and compare every step with a run that nobody disturbed.

``make crash`` runs the long version: the demo's model on the demo's data, killed with SIGKILL at random moments and in
the middle of saves; then a small model on two ranks, of which one is killed, for each strategy. It prints ``N survived
of N`` for each. The test suite runs short versions (``survive``, ``rank_failures.survive_ranks``).
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.rank_failures import kills, survive_ranks
from tests.support import backfeed, environment, losses, prepare_data

REPOSITORY = Path(__file__).resolve().parent.parent


def start(record: Path, arguments: list[str]) -> subprocess.Popen:
    """Start a recorded training process in a group of its own."""
    line = [sys.executable, "-m", "tests.training.recorder", str(record), "train", *arguments, "--resume", "auto"]
    return subprocess.Popen(
        line,
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_at_random(process: subprocess.Popen, draw: random.Random, folder: Path, steps: int) -> str | None:
    """Kill the process some time after it has made progress; return how, or None if it ended before."""
    before = _last_step(folder)
    # Half of the kills wait for a save to begin, the others for some steps and a moment.
    saving = draw.random() < 0.5
    ahead, moment = draw.randint(0, max(1, steps // 8)), draw.random()
    while process.poll() is None:
        if saving:
            if list((folder / "checkpoints").glob(".writing-*")) and _last_step(folder) > before:
                time.sleep(moment * 0.02)
                return _kill(process, "while saving")
        elif _last_step(folder) > before + ahead:
            time.sleep(moment * 0.3)
            return _kill(process, "while training")
        time.sleep(0.001)
    return None


def _kill(process: subprocess.Popen, how: str) -> str:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return how


def _last_step(folder: Path) -> int:
    path = folder / "metrics" / "train.csv"
    if not path.is_file():
        return 0
    last = path.read_bytes().rstrip().rsplit(b"\n", 1)[-1].split(b",")[0]
    return int(last) if last.isdigit() else 0


def survive(work: Path, arguments: list[str], *, kills: int, seed: int, rows: int) -> int:
    """Train undisturbed and disturbed; return the number of kills after which everything was as it should be.

    Args:
        work: an empty folder.
        arguments: of ``backfeed train``, without run.name and run.root.
        kills: how often to kill.
        seed: seed of the moments.
        rows: samples of a step.
    """
    root = [f"run.root={work}"]
    whole = backfeed("train", *arguments, *root, "run.name=whole", cwd=REPOSITORY, timeout=3600)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    expected = losses(work / "whole")
    draw, survived, round_ = random.Random(seed), 0, 0
    while survived < kills:
        round_ += 1
        name = f"killed{round_}"
        survived += _disturbed(
            work, [*arguments, *root, f"run.name={name}"], name, expected, draw, kills - survived, rows
        )
    return survived


def _disturbed(
    work: Path,
    arguments: list[str],
    name: str,
    expected: dict[int, str],
    draw: random.Random,
    kills: int,
    rows: int,
) -> int:
    """Run to the end with up to ``kills`` kills; compare; return how many there were."""
    folder, record, hows = work / name, work / f"{name}.samples", []
    while True:
        process = start(record, arguments)
        how = kill_at_random(process, draw, folder, len(expected)) if len(hows) < kills else None
        if how is None:
            output = process.communicate()[0]
            assert process.returncode == 0, output
            break
        hows.append(how)
        print(f"  {name}: killed {how} at step {_last_step(folder)}", flush=True)
    assert losses(folder) == expected, "a loss differs from the undisturbed run's"
    seen = {}
    for line in Path(f"{record}.0").read_text().splitlines():
        entry = json.loads(line)
        seen[entry["step"]] = entry["samples"]  # the last time that the step was done
    for step in expected:
        assert seen[step] == list(range((step - 1) * rows, step * rows)), f"step {step} saw other samples"
    assert not list((folder / "checkpoints").glob(".writing-*"))
    return len(hows)


def main() -> int:
    """Run the long version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--rank-kills", type=int, default=20, help="kills of one of two ranks, for each strategy")
    parser.add_argument("--strategies", nargs="*", default=["single", "ddp", "zero2", "zero3"], help="what to run")
    options = parser.parse_args()
    outcomes = [
        alone(options) if strategy == "single" else of_ranks(strategy, options) for strategy in options.strategies
    ]
    return 0 if all(outcomes) else 1


def of_ranks(strategy: str, options: argparse.Namespace) -> bool:
    """Kill one of two ranks again and again."""
    print(f"{strategy}, two ranks", flush=True)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        prepare_data(work)
        plans = kills(options.rank_kills, options.seed)
        survived = survive_ranks(work, work / "data", strategy, plans, lambda line: print(f"  {line}", flush=True))
    print(f"{strategy}: {survived} survived of {options.rank_kills}", flush=True)
    return survived == options.rank_kills


def alone(options: argparse.Namespace) -> bool:
    """Kill a run of one rank again and again."""
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        done = backfeed("prepare", "configs/data/sotu.yaml", f"output={work / 'data'}", cwd=REPOSITORY, timeout=600)
        assert done.returncode == 0, done.stderr
        settings = [
            "configs/rlt_demo.yaml",
            f"data.path={work / 'data'}",
            f"training.tokens={options.tokens}",
            "training.threads=1",
            "checkpoint.every_steps=8",
            "validation.every_steps=40",
            "logging.every_steps=1",
        ]
        survived = survive(work, settings, kills=options.kills, seed=options.seed, rows=32)
    print(f"{survived} survived of {options.kills}", flush=True)
    return survived == options.kills


if __name__ == "__main__":
    sys.exit(main())
