"""Which process is the first one, before there is a process group to ask."""

import subprocess
import sys

import pytest

from pipeline import config_files
from pipeline.errors import RunError
from pipeline.training import distributed
from tests.support import environment, run_config

# Gloo's threads let go of the tensors of their last collective some time after it; a process that ends while one of
# them does may be aborted.
LISTING = """
import os, sys
from pipeline import cli

code = cli.main(sys.argv[1:])
names = [open(f"/proc/self/task/{each}/comm").read().strip() for each in os.listdir("/proc/self/task")]
os._exit(code or any("gloo" in name for name in names))
"""
VARIABLES = ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID")


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "4", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "3"}, False),
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, False),
    ],
)
def test_first_process(monkeypatch, variables, first):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.is_first() is first


def test_alone_everything_is_agreed(monkeypatch):
    import torch

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    number = torch.tensor(3.0)
    assert distributed.total(number) is distributed.mean(number) is distributed.smallest(number) is number
    assert distributed.largest(2) == 2
    assert distributed.from_first("x") == "x"
    assert distributed.first_decides(lambda: 5) == 5

    def refuse():
        raise RunError("no")

    with pytest.raises(RunError, match="no"):
        distributed.first_decides(refuse)


def test_no_thread_is_left_of_the_groups_after_a_run(tmp_path, data):
    script, config = tmp_path / "listing.py", tmp_path / "config.yaml"
    script.write_text(LISTING)
    config_files.save(run_config(tmp_path / "runs", data, "training.micro_batch_tokens=64"), config)
    line = [sys.executable, str(script), "train", str(config), "training.devices=2"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: step 12" in done.stdout


def test_what_tells_the_loss_of_another_rank():
    import torch.distributed as dist

    assert distributed.lost_peer(RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert distributed.lost_peer(dist.DistStoreError("Timed out after 601 seconds waiting for clients"))
    assert not distributed.lost_peer(RuntimeError("shapes do not match"))
    assert not distributed.lost_peer(KeyboardInterrupt())
