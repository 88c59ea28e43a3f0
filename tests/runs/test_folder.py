"""Run folders: who may open them, and what they remember."""

import json

import pytest

from pipeline import config_files
from pipeline.config import Config
from pipeline.errors import RunError
from pipeline.runs.folder import RunFolder
from tests.support import run_config


@pytest.fixture
def config(tmp_path):
    return run_config(tmp_path / "runs", tmp_path / "data")


DATA = "f" * 64


def begin(folder, config, resume, step=1):
    """Begin or resume a run, and give it a checkpoint if it has none."""
    folder.open(config, resume, DATA)
    folder.record(config)
    if not folder.checkpoints.list():
        with folder.checkpoints.writing(step, data=DATA) as path:
            (path / "weights").write_text("w")
            config_files.save(config, path / "config.yaml")


def test_a_start_that_failed_leaves_nothing(tmp_path, config):
    folder = RunFolder(config.run.folder)
    folder.open(config, "never", DATA)
    assert not folder.exists()
    with pytest.raises(RunError, match="is in use"):
        RunFolder(config.run.folder).open(config, "never", DATA)
    folder.close()
    assert not (tmp_path / "runs").exists()


def test_a_new_run(tmp_path, config):
    folder = RunFolder(config.run.folder)
    assert not folder.exists()
    begin(folder, config, "never")
    assert folder.config() == config
    assert config_files.load(Config, [folder.config_file], []) == config
    (start,) = json.loads((folder.path / "environment.json").read_text())
    assert {"python", "packages", "host", "command", "git"} <= set(start)
    assert not {"HOME", "WANDB_API_KEY"} & set(start["variables"])


def test_identity_stays_and_starts_add_up(config):
    first = RunFolder(config.run.folder)
    begin(first, config, "auto")
    run_id = first.id
    first.close()
    again = RunFolder(config.run.folder)
    begin(again, config, "must")
    assert again.id == run_id
    assert len(json.loads((again.path / "environment.json").read_text())) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=1", "run.seed was 0 and is now 1"),
        ("model.width=32", "model.width was 16 and is now 32"),
        ("training.batch_tokens=256", "training.batch_tokens was 128 and is now 256"),
        ("solver.interval=2", "solver.interval was 1 and is now 2"),
        ("training.precision=bf16-mixed", "training.precision was 'float32' and is now 'bf16-mixed'"),
    ],
)
def test_another_configuration_is_refused(tmp_path, config, override, message):
    folder = RunFolder(config.run.folder)
    begin(folder, config, "never")
    folder.close()
    before = folder.config_file.read_bytes()
    with pytest.raises(RunError, match="belongs to another configuration") as caught:
        RunFolder(config.run.folder).open(run_config(tmp_path / "runs", tmp_path / "data", override), "auto", DATA)
    assert message in str(caught.value)
    assert folder.config_file.read_bytes() == before


@pytest.mark.parametrize(
    "override",
    ["training.micro_batch_tokens=32", "data.workers=3", "checkpoint.every_steps=1", "logging.every_steps=7"],
)
def test_what_may_change_on_resume(tmp_path, config, override):
    folder = RunFolder(config.run.folder)
    begin(folder, config, "never")
    folder.close()
    changed = run_config(tmp_path / "runs", tmp_path / "data", override)
    again = RunFolder(config.run.folder)
    begin(again, changed, "auto")
    assert again.config() == changed


def test_refusals(tmp_path, config):
    with pytest.raises(RunError, match="holds no checkpoint to resume"):
        RunFolder(config.run.folder).open(config, "must", DATA)
    held = RunFolder(config.run.folder)
    begin(held, config, "never")
    with pytest.raises(RunError, match="already holds a run"):
        RunFolder(config.run.folder).open(config, "never", DATA)
    with pytest.raises(RunError, match="is in use by process"):
        RunFolder(config.run.folder).open(config, "auto", DATA)
    held.close()
    RunFolder(config.run.folder).open(config, "auto", DATA)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        RunFolder(tmp_path / "file").open(config, "auto", DATA)
    with pytest.raises(RunError, match="is not a run folder"):
        RunFolder(tmp_path).config()


def test_other_data_are_named_before_settings(tmp_path, config):
    folder = RunFolder(config.run.folder)
    begin(folder, config, "never")
    folder.close()
    changed = run_config(tmp_path / "runs", tmp_path / "data", "model.vocab_size=300")
    with pytest.raises(RunError, match="was trained on other data: the manifest's fingerprint was ffff"):
        RunFolder(config.run.folder).open(changed, "auto", "e" * 64)


def test_a_run_without_a_checkpoint_may_begin_anew(tmp_path, config):
    folder = RunFolder(config.run.folder)
    folder.open(config, "never", DATA)
    folder.record(config)
    folder.close()
    changed = run_config(tmp_path / "runs", tmp_path / "data", "model.width=32")
    again = RunFolder(config.run.folder)
    again.open(changed, "never", DATA)
    again.record(changed)
    assert again.config() == changed


def test_checkpoints_without_a_config_belong_to_nobody(config):
    folder = RunFolder(config.run.folder)
    begin(folder, config, "never")
    folder.close()
    folder.config_file.unlink()
    with pytest.raises(RunError, match="already holds a run"):
        RunFolder(config.run.folder).open(config, "never", DATA)
    with pytest.raises(RunError, match=r"checkpoints but no config\.yaml"):
        RunFolder(config.run.folder).open(config, "auto", DATA)
    assert not folder.config_file.exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"id": "../x"}'])
def test_lost_records_are_written_anew(config, content):
    folder = RunFolder(config.run.folder)
    begin(folder, config, "never")
    folder.close()
    for name in ("run.json", "environment.json"):
        (folder.path / name).write_text(content)
    with pytest.raises(RunError, match=r"run\.json is missing or damaged"):
        _ = folder.id
    again = RunFolder(config.run.folder)
    begin(again, config, "must")
    assert len(again.id) == 8
    assert len(json.loads((again.path / "environment.json").read_text())) == 1
