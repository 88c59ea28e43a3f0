"""Runs in processes of their own: killed, interrupted, on several ranks, on a full disk."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipeline import config_files
from pipeline.runs.checkpoints import CheckpointStore
from tests.crash import survive
from tests.support import assert_close, backfeed, command, environment, losses, one_line, rows, run_config


def config_file(tmp_path, data, *overrides, **options):
    path = tmp_path / "config.yaml"
    config_files.save(run_config(tmp_path / "runs", data, *overrides, **options), path)
    return path


def test_killed_at_random_moments_and_resumed(tmp_path, data):
    """The small version of ``make crash``."""
    config = config_file(tmp_path, data, "training.tokens=5120", "training.micro_batch_tokens=64", "data.workers=1")
    assert survive(tmp_path / "work", [str(config)], kills=4, seed=1, rows=4) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signal_saves_and_ends(tmp_path, data, number):
    config = config_file(tmp_path, data, "training.tokens=128000", "checkpoint.every_steps=1000")
    process = start(config)
    wait_for_step(process, tmp_path / "runs/small", 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out + err
    assert "Traceback" not in err
    (step,) = (int(found) for found in re.findall(r"stopped at step (\d+), saved", out))
    (saved,) = CheckpointStore(tmp_path / "runs/small/checkpoints").list()
    assert saved.step == step == max(losses(tmp_path / "runs/small"))
    saved.verify()


def test_second_interrupt_ends_at_once(tmp_path, data):
    config = config_file(tmp_path, data, "training.tokens=128000", "checkpoint.every_steps=1000")
    process = start(config)
    wait_for_step(process, tmp_path / "runs/small", 2)
    os.kill(process.pid, signal.SIGSTOP)  # both arrive within one step
    process.send_signal(signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (1, 130), out + err


def test_two_ranks_give_the_losses_of_one(tmp_path, data):
    config = config_file(tmp_path, data, "training.micro_batch_tokens=64")
    one = backfeed("train", config, "run.name=one")
    assert one.returncode == 0, one.stderr
    two = backfeed("train", config, "run.name=two", "training.devices=2")
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("done: step 12") == 1  # one rank speaks
    assert_close(losses(tmp_path / "runs/two"), losses(tmp_path / "runs/one"))
    for found, expected in zip(
        rows(tmp_path / "runs/two", "validation"), rows(tmp_path / "runs/one", "validation"), strict=True
    ):
        assert float(found["validation/loss"]) == pytest.approx(float(expected["validation/loss"]), rel=1e-5)
        assert found["validation/tokens"] == expected["validation/tokens"]


def test_ranks_may_change_on_resume(tmp_path, data):
    """Two ranks, interrupted, then one: every sample once, the same losses."""
    config = config_file(
        tmp_path, data, "training.micro_batch_tokens=64", "training.tokens=5120", "checkpoint.every_steps=1000"
    )
    whole = backfeed("train", config, "run.name=whole")
    assert whole.returncode == 0, whole.stderr
    record = tmp_path / "record"
    process = start(config, "run.name=cut", "training.devices=2", "--resume", "auto", record=record)
    wait_for_step(process, tmp_path / "runs/cut", 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    stopped = max(losses(tmp_path / "runs/cut"))
    done = start(config, "run.name=cut", "training.devices=1", "--resume", "must", record=record)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, out + err
    assert_close(losses(tmp_path / "runs/cut"), losses(tmp_path / "runs/whole"))
    assert seen_samples(record) == [
        (step, sample) for step in range(1, 41) for sample in range((step - 1) * 4, step * 4)
    ]
    assert 5 <= stopped < 40


def test_full_disk_keeps_what_was_saved(tmp_path, data):
    """On a file system that fills up during the run: one line, the last checkpoint whole, and on it goes with room."""
    config = config_file(tmp_path, data, "training.tokens=12800", "checkpoint.every_steps=5", "checkpoint.keep_last=1")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size=2m tmpfs {disk} || exit 77
        {" ".join(command("train", config, f"run.root={disk}"))} &
        run=$!
        until ls -d {disk}/small/checkpoints/step_* >/dev/null 2>&1; do sleep 0.02; done
        head -c 100m /dev/zero >{disk}/filler 2>/dev/null
        wait $run
        echo "code $?"
        ls {disk}/small/checkpoints -a
        rm {disk}/filler
        {" ".join(command("train", config, f"run.root={disk}", "--resume", "must"))}
        echo "code $?"
    """
    private = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if subprocess.run([*private, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a small file system to fill up")
    done = subprocess.run(
        [*private, "sh", "-c", script], capture_output=True, text=True, timeout=240, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    codes = [int(code) for code in re.findall(r"code (\d+)", done.stdout)]
    assert len(codes) == 2, done.stdout + done.stderr
    assert codes[0] != 0, done.stdout
    assert codes[1] == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("backfeed: ")]
    assert "no space" in line.lower(), line
    assert ".writing-" not in done.stdout
    assert "done: step 100" in done.stdout


def test_too_small_a_disk_is_refused_at_the_start(tmp_path, data, monkeypatch):
    import shutil
    from collections import namedtuple

    from pipeline.errors import RunError
    from pipeline.training.train import train

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(RunError, match=r"needs 0\.5 MB"):
        train(run_config(tmp_path / "runs", data))


def test_a_reader_that_went_away_does_not_stop_the_run(tmp_path, data):
    config = config_file(tmp_path, data)
    line = " ".join(command("train", config)) + " | head -n 1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment(), timeout=240)
    assert done.stderr.count("Traceback") == 0, done.stderr
    assert [each.step for each in CheckpointStore(tmp_path / "runs/small/checkpoints").list()] == [8, 12]


def test_run_folder_that_was_moved_stops_the_run(tmp_path, data):
    config = config_file(tmp_path, data, "training.tokens=128000", "checkpoint.every_steps=1000")
    process = start(config)
    wait_for_step(process, tmp_path / "runs/small", 2)
    (tmp_path / "runs/small").rename(tmp_path / "runs/moved")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in err, err
    assert sum(line.startswith("backfeed: ") for line in err.splitlines()) == 1
    assert not (tmp_path / "runs/small").exists()


def test_a_rank_that_died_is_named_by_the_others(tmp_path, data):
    config = config_file(tmp_path, data, "training.tokens=1280000", "training.micro_batch_tokens=64")
    process = start(config, "training.devices=2")
    wait_for_step(process, tmp_path / "runs/small", 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (other,) = (pid for pid in children if b"pipeline" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(other), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Traceback" not in err, err
    assert "backfeed: rank 1 was killed by signal 9 (SIGKILL) at step" in err


def test_two_processes_cannot_train_one_run(tmp_path, data):
    config = config_file(tmp_path, data, "training.tokens=128000")
    process = start(config)
    try:
        wait_for_step(process, tmp_path / "runs/small", 1)
        line = one_line(backfeed("train", config, "--resume", "auto"))
        assert f"in use by process {process.pid}" in line
    finally:
        process.kill()
        process.communicate()


def test_weights_and_biases_offline_and_tensorboard(tmp_path, data):
    config = config_file(tmp_path, data, "logging.wandb.mode=offline", "logging.tensorboard=true")
    done = backfeed("train", config)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/small"
    (written,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0
    assert b"train/loss" in written.read_bytes()
    assert list((folder / "tensorboard").rglob("events.out.tfevents.*"))


def start(config, *arguments, record=None):
    line = command("train", config, *arguments)
    if record is not None:
        line = [line[0], "-m", "tests.training.recorder", str(record), "train", str(config), *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def wait_for_step(process, folder, step, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if (folder / "metrics/train.csv").is_file() and len(rows(folder)) >= step:
            return
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached: {process.communicate() if process.poll() is not None else ''}")


def seen_samples(record):
    import json

    found = {}
    for path in sorted(record.parent.glob(f"{record.name}.*")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found.setdefault(entry["step"], []).extend(entry["samples"])
    return sorted((step, sample) for step, samples in found.items() for sample in samples)
