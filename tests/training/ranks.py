"""Several runs one after the other in the same processes: starting those takes longer than the runs.

Usage, with RANK and the like set: python -m tests.training.ranks JOBS.json
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline import config_files
from pipeline.config import Config
from tests.support import environment


@dataclass(frozen=True)
class Job:
    """A run to train, or to go on with.

    Attributes:
        config: its settings.
        resume: as in ``train``.
        stop: step after which it ends as on a signal; 0: none.
    """

    config: Config
    resume: str = "never"
    stop: int = 0


def train_in_ranks(ranks: int, jobs: list[Job], folder: Path, timeout: float = 400) -> None:
    """Train each job on ``ranks`` processes; all must come to their end.

    Args:
        ranks: number of processes.
        jobs: the runs, of as many ranks.
        folder: where settings and what each rank has seen are written: ``<run>.<ranks>.seen.<rank>``, a line of samples
            a step, and ``<run>.calls.<rank>``, the number of collectives of each kind where DeepSpeed counts them.
        timeout: seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = []
    for number, job in enumerate(jobs):
        path = folder / f"{ranks}_{number}.yaml"
        config_files.save(job.config, path)
        described.append([str(path), job.resume, job.stop])
    listed = folder / f"jobs_{ranks}.json"
    listed.write_text(json.dumps(described))
    port = str(free_port())
    outputs = [folder / f"output_{ranks}.{rank}" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.ranks", str(listed)],
            env={
                **environment(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=output.open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output.read_text()[-4000:]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


# ---------------------------------------------------------------- in the processes


def main() -> int:
    """Train all jobs."""
    from pipeline.training import distributed
    from pipeline.training.callbacks.interruption import Interruption
    from pipeline.training.module import PretrainingModule
    from pipeline.training.train import train

    plain_step, plain_end = PretrainingModule.training_step, Interruption.on_step_end
    seen: list[int] = []
    current = {"stop": 0}

    def training_step(self, batch, batch_idx):
        seen.extend(batch["samples"].tolist())
        return plain_step(self, batch, batch_idx)

    def on_step_end(self, trainer, module, step):
        run = module.config.run
        with open(f"{run.root}/{run.name}.{trainer.world_size}.seen.{trainer.global_rank}", "a") as file:
            file.write(json.dumps([step, seen]) + "\n")
        seen.clear()
        if step == current["stop"]:
            self._received = 15
        plain_end(self, trainer, module, step)

    PretrainingModule.training_step, Interruption.on_step_end = training_step, on_step_end
    distributed.leave = lambda: None  # DeepSpeed holds on to its groups, and the next run needs them
    for path, resume, current["stop"] in json.loads(Path(sys.argv[1]).read_text()):
        run = train(config_files.load(Config, [path], []), resume).folder
        run.with_name(f"{run.name}.calls.{os.environ['RANK']}").write_text(json.dumps(calls()))
    return 0


def calls() -> dict[str, int]:
    """Return how often each collective was called, as DeepSpeed counts them where it is told to; forget it."""
    if "deepspeed" not in sys.modules:
        return {}
    from deepspeed.comm.comm import comms_logger

    found = {name: sum(each[0] for each in sizes.values()) for name, sizes in comms_logger.comms_dict.items()}
    comms_logger.comms_dict.clear()
    return found


if __name__ == "__main__":
    sys.exit(main())
