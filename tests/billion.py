"""The one-billion-parameter RLT in real steps on one machine without a GPU: train, kill, resume, verify, consolidate.

``make billion`` runs it: ZeRO-3 on one rank, bfloat16 weights with float32 masters, the optimiser's states on disk,
checkpointing in time, short rows. It needs some 24 GB of memory and 60 GB of disk, and prints the log that
docs/strategies.md shows.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from pipeline.runs.checkpoints import CheckpointStore
from tests.support import command, environment, losses, prepare_data, rows

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS, LENGTH, STEPS, SAVED = 2, 64, 4, 2


def settings(work: Path, ranks: int) -> list[str]:
    """Return the command line behind ``backfeed train``: the run's own configuration, made small in tokens alone."""
    batch = ROWS * LENGTH * ranks
    return [
        str(REPOSITORY / "configs/rlt_1b.yaml"),
        f"run.root={work / 'runs'}",
        f"data.path={work / 'data'}",
        f"data.sequence_length={LENGTH}",
        "learning_rate.warmup_tokens=0",
        "learning_rate.peak=1e-4",
        f"training.tokens={STEPS * batch}",
        f"training.batch_tokens={batch}",
        f"training.micro_batch_tokens={ROWS * LENGTH}",
        "training.precision=bf16",
        "training.strategy=zero3",
        f"training.devices={ranks}",
        "training.accelerator=cpu",
        "training.offload_optimizer=nvme",
        f"training.nvme_path={work / 'swap'}",
        "training.timeout_seconds=3600",
        f"checkpoint.every_steps={SAVED}",
        "checkpoint.keep_last=1",
        "checkpoint.background=false",  # a copy of the state would not fit
        "validation.every_steps=0",
        "logging.every_steps=1",
        "logging.wandb.mode=disabled",
    ]


class Memory(threading.Thread):
    """Watches the memory of a process and its children: what is theirs alone, and their share of what is not."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._end = threading.Event()
        self.peak = 0

    def run(self) -> None:
        """Look four times a second."""
        while not self._end.wait(0.25):
            self.peak = max(self.peak, sum(map(proportional, tree(self._pid))))

    def stop(self) -> float:
        """Return the peak in GB."""
        self._end.set()
        self.join()
        return self.peak / 1e9


def tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in tree(int(child)))]


def proportional(pid: int) -> int:
    """Return a process's bytes, those that it shares divided among the sharers."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def watched(*arguments: object, until: "CheckpointStore | None" = None) -> tuple[float, float, int]:
    """Run ``backfeed``; return seconds, peak GB and exit code.

    Args:
        arguments: of the command.
        until: kill all its processes once this holds a checkpoint and the step after it is under way.
    """
    begin = time.monotonic()
    process = subprocess.Popen(command(*arguments), cwd=REPOSITORY, env=environment(), start_new_session=True)
    memory = Memory(process.pid)
    memory.start()
    while process.poll() is None:
        time.sleep(0.5)
        if until is not None and until.list():
            time.sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
    return time.monotonic() - begin, memory.stop(), process.wait()


def told(what: str, seconds: float, peak: float) -> None:
    """Print a line of the log."""
    print(f"{what:<44}{seconds:>8.0f} s{peak:>8.1f} GB", flush=True)


def main() -> int:
    """Do all of it; return 0 if all of it held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for data, checkpoints and swap (default: a temporary one)")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="billion-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        return run(work, options.ranks)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)


def run(work: Path, ranks: int) -> int:
    """Do all of it in a folder."""
    prepare_data(work)
    (work / "swap").mkdir(exist_ok=True)
    folder = work / "runs/rlt_1b"
    store = CheckpointStore(folder / "checkpoints")
    arguments = settings(work, ranks)

    seconds, peak, code = watched("train", *arguments, until=store)
    assert code == -signal.SIGKILL, code
    told(f"train to step {SAVED}, save, be killed in the next", seconds, peak)

    seconds, peak, code = watched("train", *arguments, "--resume", "must")
    assert code == 0, code
    told(f"resume, train to step {STEPS}, save", seconds, peak)

    seconds, peak, code = watched("checkpoint", "verify", folder)
    assert code == 0, code
    told("verify", seconds, peak)

    made = work / "consolidated"
    shutil.rmtree(made, ignore_errors=True)
    seconds, peak, code = watched("checkpoint", "consolidate", folder, made)
    assert code == 0, code
    told("consolidate", seconds, peak)

    size = (made / "model.safetensors").stat().st_size
    found = losses(folder)
    assert list(found) == list(range(1, STEPS + 1))
    print(f"model.safetensors: {size / 1e9:.2f} GB; checkpoint: {sum(sizes(store)) / 1e9:.2f} GB")
    print("losses:", ", ".join(f"{float(loss):.4f}" for loss in found.values()))
    speed = [float(row["throughput/tokens_per_second"]) for row in rows(folder)]
    print("seconds a step:", ", ".join(f"{ROWS * LENGTH * ranks / each:.0f}" for each in speed))
    return 0


def sizes(store: CheckpointStore) -> list[int]:
    """Return the sizes of the files of the newest checkpoint."""
    return [path.stat().st_size for path in store.list()[-1].path.iterdir()]


if __name__ == "__main__":
    sys.exit(main())
