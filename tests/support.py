"""What tests of whole runs share: a small prepared corpus, a small run, and the command in a process of its own."""

import csv
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import config_files
from pipeline.config import Config
from pipeline.data.manifest import Manifest
from pipeline.data.prepare import PrepareConfig, TokenizerConfig, prepare
from pipeline.data.sources import SourceConfig
from pipeline.runs.checkpoints import CheckpointStore

WORDS = (
    "we", "the", "people", "of", "a", "union", "that", "is", "and", "will", "be", "free", "to", "work", "for", "peace",
    "with", "all", "nations", "in", "hope",
)  # fmt: skip

MODELS = {
    "rlt": {
        "architecture": "rlt",
        "width": 16,
        "heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "window": 4,
        "alpha": 0.5,
    },
    "transformer": {"architecture": "transformer", "width": 16, "heads": 2, "layers": 2},
    "crt": {"architecture": "crt", "width": 16, "heads": 2, "layers": 2, "correction_width": 24},
    "lrt": {"architecture": "lrt", "width": 16, "heads": 2, "layers": 2},
    "fbt": {"architecture": "fbt", "width": 16, "heads": 2, "layers": 2},
}
SOLVERS = {"rlt": "chunked", "transformer": "parallel", "crt": "unrolled", "lrt": "interleaved", "fbt": "unrolled"}


def write_text(folder: Path, documents: int = 120, seed: int = 0) -> Path:
    """Write documents of 20 to 120 words."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for number in range(documents):
        words = draw.choices(WORDS, k=draw.randint(20, 120))
        (folder / f"{number:04d}.txt").write_text(" ".join(words) + ".")
    return folder


def prepare_data(folder: Path, *, seed: int = 0, kind: str = "bytes") -> Manifest:
    """Prepare a train and a validation split under ``folder / data``."""
    text = [write_text(folder / f"text{i}", documents, seed + i) for i, documents in enumerate((120, 12))]
    sources = [
        SourceConfig(path=str(path), split=split) for path, split in zip(text, ("train", "validation"), strict=True)
    ]
    tokenizer = TokenizerConfig(kind=kind) if kind == "bytes" else TokenizerConfig(kind="bpe", vocab_size=300)
    config = PrepareConfig(
        output=str(folder / "data"),
        sources=sources,
        tokenizer=tokenizer,
        workers=1,
        member_tokens=1000,
        shard_tokens=20_000,
    )
    return prepare(config)


def run_config(root: Path, data: Path, *overrides: str, architecture: str = "rlt", name: str = "small") -> Config:
    """Return a run of 12 steps of 4 rows of 32 tokens, checkpointed every 4 steps."""
    model = [f"model.{key}={value}" for key, value in MODELS[architecture].items()]
    base = [
        f"run.name={name}",
        f"run.root={root}",
        f"data.path={data}",
        "data.sequence_length=32",
        *model,
        f"solver.name={SOLVERS[architecture]}",
        "optimizer.name=adamw",
        "learning_rate.name=cosine",
        "learning_rate.peak=0.01",
        "learning_rate.warmup_tokens=256",
        "training.tokens=1536",
        "training.batch_tokens=128",
        "training.micro_batch_tokens=128",
        "training.accelerator=cpu",
        "training.threads=1",
        "validation.every_steps=6",
        "validation.tokens=512",
        "checkpoint.every_steps=4",
        "logging.every_steps=1",
        "logging.wandb.mode=disabled",
    ]
    return config_files.load(Config, [], [*base, *overrides])


def command(*arguments: object) -> list[str]:
    """Return the command line of ``backfeed`` in this Python."""
    return [sys.executable, "-m", "pipeline", *map(str, arguments)]


def backfeed(*arguments: object, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment()
    )


def environment() -> dict[str, str]:
    """Return this process's environment without what a launcher or the tests' own group left there."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, "OMP_NUM_THREADS": "1"}


def rows(folder: Path, kind: str = "train") -> list[dict[str, str]]:
    """Return the rows of a run's CSV file."""
    with (folder / "metrics" / f"{kind}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder: Path) -> dict[int, str]:
    """Return the loss of every step, as text: equal text is equal to the last bit."""
    return {int(row["step"]): row["train/loss"] for row in rows(folder)}


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a failed command: its one line, with no traceback about it."""
    assert done.returncode not in (0, -9), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("backfeed: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def forget_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after ``step``, as if the run had died before them."""
    for checkpoint in CheckpointStore(folder / "checkpoints").list():
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)


def assert_close(found: dict[int, str], expected: dict[int, str], relative: float = 1e-5) -> None:
    """Compare the losses of two runs step by step, to float tolerance."""
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert float(found[step]) == pytest.approx(float(loss), rel=relative), step
