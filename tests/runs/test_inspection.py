"""Checkpoints are listed, verified and put into one file."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import RunError
from pipeline.runs import inspection
from pipeline.runs.checkpoints import DESCRIPTION, CheckpointStore, vouch
from pipeline.runs.loading import load
from pipeline.runs.tensors import INDEX_SUFFIX, TensorShape, TensorWriter, file_name, write_index
from pipeline.training.train import train
from tests.support import backfeed, one_line, prepare_data, run_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    prepare_data(folder)
    return train(run_config(folder / "runs", folder / "data", "checkpoint.keep_last=3")).folder


@pytest.fixture
def copy(run, tmp_path):
    """The run in a folder of the test's own."""
    return shutil.copytree(run, tmp_path / "run")


def checkpoint(folder, step):
    return CheckpointStore(folder / "checkpoints").at(step).path


def spoil(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def divide(folder, parts=3):
    """Put the weights of a checkpoint into several files, as several ranks would have."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {}
    for part in range(parts):
        own = {name: weights[name] for name in sorted(weights)[part::parts]}
        name = file_name("model", part, parts)
        files[name] = {key: TensorShape(tuple(each.shape)) for key, each in own.items()}
        with TensorWriter(folder / name, files[name]) as writer:
            for key, each in own.items():
                writer.write(key, each)
    write_index(folder / f"model{INDEX_SUFFIX}", files)
    description = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).unlink()
    kept = {name: description[name] for name in ("tokens", "solver", "data", "tokenizer")}
    vouch(folder, description["step"], **kept)


def test_list(run):
    found = inspection.found(run)
    assert [(each.checkpoint.step, each.tokens, each.parts) for each in found] == [
        (4, 512, 1),
        (8, 1024, 1),
        (12, 1536, 1),
    ]
    assert inspection.table(found).count("MB") == 3
    (one,) = inspection.found(checkpoint(run, 8))
    assert one.checkpoint.step == 8


def test_list_names_what_is_damaged(copy):
    (checkpoint(copy, 8) / "training.pt").unlink()
    text = inspection.table(inspection.found(copy))
    assert "training.pt is missing" in text
    assert text.count("MB") == 2


def test_verify_finds_a_flipped_bit(copy):
    said = []
    assert inspection.verify(copy, None, said.append)
    spoil(checkpoint(copy, 8) / "optimizer.safetensors")
    assert not inspection.verify(copy, None, said.append)
    assert sum("does not match its hash" in line for line in said) == 1
    assert inspection.verify(copy, 4, said.append)
    assert not inspection.verify(checkpoint(copy, 8), None, said.append)


def test_consolidated_weights_are_those_of_the_checkpoint(copy, tmp_path):
    """They lie in one file of a folder that is enough to evaluate or generate, whatever wrote the checkpoint."""
    before = load(copy, step=12).model.state_dict()
    divide(checkpoint(copy, 12))
    inspection.consolidate(copy, None, tmp_path / "made")
    weights = load_file(tmp_path / "made/model.safetensors")
    assert set(weights) == set(before)
    assert all(torch.equal(weights[name], before[name]) for name in before)
    again = load(tmp_path / "made")
    assert again.checkpoint.step == 12
    assert all(torch.equal(each, before[name]) for name, each in again.model.state_dict().items())
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        "model.safetensors",
        "config.yaml",
        "tokenizer.json",
        DESCRIPTION,
    }


def test_consolidate_takes_the_newest_whole_one(copy, tmp_path):
    spoil(checkpoint(copy, 12) / "model.safetensors")
    with pytest.warns(UserWarning, match="trying the one before"):
        inspection.consolidate(copy, None, tmp_path / "made")
    assert load(tmp_path / "made").checkpoint.step == 8


def test_nothing_is_overwritten_or_left_behind(copy, tmp_path):
    (tmp_path / "made").mkdir()
    with pytest.raises(RunError, match="exists already"):
        inspection.consolidate(copy, None, tmp_path / "made")
    spoil(checkpoint(copy, 12) / "model.safetensors")
    with pytest.raises(RunError, match="does not match its hash"):
        inspection.consolidate(copy, 12, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "run"]


@pytest.mark.parametrize("task", ["list", "verify", "consolidate"])
def test_what_is_no_run_is_refused(tmp_path, task):
    extra = [tmp_path / "made"] if task == "consolidate" else []
    assert "neither a run folder" in one_line(backfeed("checkpoint", task, tmp_path, *extra))


def test_commands(copy, tmp_path):
    assert "1,536" in backfeed("checkpoint", "list", copy).stdout
    assert backfeed("checkpoint", "verify", copy).stdout.count(": whole") == 3
    done = backfeed("checkpoint", "consolidate", copy, tmp_path / "made", "--step", 8)
    assert done.returncode == 0, done.stderr
    assert "step 8" in done.stdout
    spoil(checkpoint(copy, 4) / "model.safetensors")
    assert backfeed("checkpoint", "verify", copy).returncode == 1
