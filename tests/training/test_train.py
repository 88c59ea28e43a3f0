"""Whole runs in this process: what is trained, logged and saved."""

import json
import math

import pytest
import torch

from pipeline import config_files
from pipeline.config import Config
from pipeline.errors import ConfigError, RunError, RunWarning, TrainingError, UserError
from pipeline.evaluation.report import report
from pipeline.runs.checkpoints import CheckpointStore
from pipeline.runs.loading import load
from pipeline.training.train import train
from tests.support import assert_close, forget_after, losses, prepare_data, rows, run_config

NINETY_NINE_GPUS = [
    "training.accelerator=cuda",
    "training.devices=99",
    "training.tokens=3168",
    "training.batch_tokens=3168",
    "training.micro_batch_tokens=32",
]
BATCH = ("training.tokens", "training.batch_tokens", "training.micro_batch_tokens")


def run(tmp_path, data, *overrides, resume="never", **options):
    config = run_config(tmp_path / "runs", data, *overrides, **options)
    outcome = train(config, resume)
    return outcome, config


@pytest.mark.parametrize("architecture", ["transformer", "rlt"])
def test_loss_falls_and_everything_is_recorded(tmp_path, data, architecture):
    outcome, _ = run(tmp_path, data, "training.tokens=6400", architecture=architecture)
    assert (outcome.step, outcome.signal) == (50, 0)
    found = losses(outcome.folder)
    assert list(found) == list(range(1, 51))
    assert float(found[1]) == pytest.approx(math.log(257), rel=0.05)  # nothing is known at first
    assert float(found[50]) < 3.3
    validation = rows(outcome.folder, "validation")
    assert [int(row["step"]) for row in validation] == [6, 12, 18, 24, 30, 36, 42, 48, 50]
    bits = [float(row["validation/bits_per_byte"]) for row in validation]
    assert bits[-1] < bits[0]
    assert [each.step for each in CheckpointStore(outcome.folder / "checkpoints").list()] == [48, 50]
    environment = json.loads((outcome.folder / "environment.json").read_text())
    assert environment[0]["packages"]["torch"] == torch.__version__
    assert (outcome.folder / "config.yaml").is_file()


def test_saved_config_repeats_the_run(tmp_path, data):
    outcome, _ = run(tmp_path, data)
    again = config_files.load(Config, [outcome.folder / "config.yaml"], ["run.name=again"])
    assert losses(train(again).folder) == losses(outcome.folder)


@pytest.mark.parametrize("stop", [4, 8])
def test_resumed_run_repeats_every_loss(tmp_path, data, stop):
    whole, _ = run(tmp_path, data, name="whole")
    cut, config = run(tmp_path, data, "checkpoint.keep_last=3", name="cut")
    forget_after(cut.folder, stop)  # as if the process had died before the next checkpoint
    outcome = train(config, "must")
    assert outcome.step == 12
    assert losses(cut.folder) == losses(whole.folder)
    assert rows(cut.folder, "validation") == rows(whole.folder, "validation")


def test_schedule_anneals_the_interval(tmp_path, data):
    schedule = "schedules.interval=[{at: 0.0, value: 8}, {at: 0.5, value: 2}, {at: 0.75, value: 1}]"
    outcome, _ = run(tmp_path, data, schedule)
    intervals = [int(row["solver/interval"]) for row in rows(outcome.folder)]
    assert intervals == [8] * 6 + [2] * 3 + [1] * 3
    recorded = {
        each.step: each.describe()["solver"]["interval"]
        for each in CheckpointStore(outcome.folder / "checkpoints").list()
    }
    assert recorded == {8: 2, 12: 1}
    trained = load(outcome.folder, step=8)
    assert trained.solver.settings() == {"interval": 2}


def test_resume_inside_a_schedule(tmp_path, data):
    schedule = "schedules.interval=[{at: 0.0, value: 8}, {at: 0.5, value: 2}, {at: 0.75, value: 1}]"
    whole, _ = run(tmp_path, data, schedule, name="whole")
    cut, config = run(tmp_path, data, schedule, name="cut")
    forget_after(cut.folder, 8)
    train(config, "auto")
    assert losses(cut.folder) == losses(whole.folder)


def test_accumulation_gives_the_same_losses(tmp_path, data):
    whole, _ = run(tmp_path, data, name="whole")
    parts, _ = run(tmp_path, data, "training.micro_batch_tokens=32", name="parts")
    assert_close(losses(parts.folder), losses(whole.folder))


def test_accumulation_may_change_on_resume(tmp_path, data):
    whole, _ = run(tmp_path, data, name="whole")
    cut, _ = run(tmp_path, data, name="cut")
    forget_after(cut.folder, 8)
    outcome, _ = run(tmp_path, data, "training.micro_batch_tokens=64", name="cut", resume="must")
    assert outcome.step == 12
    assert_close(losses(cut.folder), losses(whole.folder))


def test_loader_processes_change_nothing(tmp_path, data):
    alone, _ = run(tmp_path, data, name="alone")
    helped, _ = run(tmp_path, data, "data.workers=2", name="helped")
    assert losses(helped.folder) == losses(alone.folder)


def test_activation_checkpointing_changes_nothing(tmp_path, data):
    plain, _ = run(tmp_path, data, name="plain")
    saved, _ = run(tmp_path, data, "solver.activation_checkpointing=true", "solver.segment_length=4", name="saved")
    assert losses(saved.folder) == losses(plain.folder)


def test_bf16_stays_close(tmp_path, data):
    full, _ = run(tmp_path, data, name="full")
    half, _ = run(tmp_path, data, "training.precision=bf16-mixed", name="half")
    assert_close(losses(half.folder), losses(full.folder), relative=2**-8 * 8)


def test_validation_is_what_evaluate_measures(tmp_path, data):
    outcome, _ = run(tmp_path, data)
    found = report(load(outcome.folder), "validation", tokens=512)
    row = rows(outcome.folder, "validation")[-1]
    assert float(row["validation/loss"]) == pytest.approx(found[0].sums.loss, rel=1e-6)
    assert float(row["validation/bits_per_byte"]) == pytest.approx(found[0].sums.bits_per_byte, rel=1e-6)


def test_learning_rate_is_logged_as_used(tmp_path, data):
    outcome, _ = run(tmp_path, data)
    rates = [float(row["optimizer/learning_rate"]) for row in rows(outcome.folder)]
    assert rates[0] == pytest.approx(0.005)  # half of a warm-up of two steps
    assert rates[1] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0.001)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_loss_that_is_no_number_stops_the_run(tmp_path, data, monkeypatch):
    from pipeline.training.module import PretrainingModule

    plain = PretrainingModule.training_step

    def spoiled(self, batch, batch_idx):
        loss = plain(self, batch, batch_idx)
        if batch_idx == 6:  # step 7
            self.step_mean = self.step_mean.scaled(float("nan"))
            return loss * float("nan")
        return loss

    monkeypatch.setattr(PretrainingModule, "training_step", spoiled)
    with pytest.raises(TrainingError) as caught:
        run(tmp_path, data, "logging.every_steps=12")  # looked at before validation and saving, if not before
    message = str(caught.value)
    assert "at step 7 " in message
    assert "samples 24 to 27" in message
    assert "step_0000000004" in message
    assert [each.step for each in CheckpointStore(tmp_path / "runs/small/checkpoints").list()] == [4]


def test_damaged_checkpoint_is_passed_over(tmp_path, data):
    whole, _ = run(tmp_path, data, name="whole")
    cut, config = run(tmp_path, data, name="cut", resume="never")
    newest = CheckpointStore(cut.folder / "checkpoints").at(12)
    weights = newest.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.warns(RunWarning, match="does not match its hash"):
        outcome = train(config, "auto")
    assert outcome.step == 12
    assert losses(cut.folder) == losses(whole.folder)
    newest.verify()  # written anew


def test_a_folder_of_another_run_is_refused(tmp_path, data):
    run(tmp_path, data)
    before = sorted(path for path in (tmp_path / "runs").rglob("*"))
    with pytest.raises(RunError, match=r"learning_rate\.peak was 0\.01 and is now 0\.02"):
        run(tmp_path, data, "learning_rate.peak=0.02", resume="auto")
    with pytest.raises(RunError, match="already holds a run"):
        run(tmp_path, data)
    with pytest.raises(RunError, match="holds no checkpoint to resume"):
        run(tmp_path, data, name="other", resume="must")
    assert sorted(path for path in (tmp_path / "runs").rglob("*")) == before


def test_other_data_are_refused_on_resume(tmp_path, data):
    cut, _ = run(tmp_path, data)
    forget_after(cut.folder, 8)
    other = prepare_data(tmp_path / "other", seed=7).folder
    with pytest.raises(Exception, match="fingerprint"):
        run(tmp_path, other, resume="must")
    assert [each.step for each in CheckpointStore(cut.folder / "checkpoints").list()] == [8]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sequence_length=65536", *(f"{key}=65536" for key in BATCH)], "too few for one row"),
        (NINETY_NINE_GPUS, "cannot be had here"),
        (["validation.split=nowhere"], "has no split 'nowhere'"),
    ],
)
def test_failed_start_leaves_nothing_behind(tmp_path, data, overrides, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, data, *overrides)
    assert not (tmp_path / "runs").exists()
    assert run(tmp_path, data)[0].step == 12


def test_vocabulary_must_hold_the_tokenizer(tmp_path, data):
    with pytest.raises(ConfigError, match="has 257 ids"):
        run(tmp_path, data, "model.vocab_size=200")


def test_finished_run_says_so(tmp_path, data, capsys):
    _, config = run(tmp_path, data)
    assert train(config, "auto").step == 12
    assert "nothing is left to train" in capsys.readouterr().out
