"""Runs in which steps go wrong: what is left out, what is told, and when they end."""

import json
import subprocess
import sys

import pytest

from pipeline import config_files
from pipeline.errors import ConfigError, DataError, TrainingError
from pipeline.runs.checkpoints import CheckpointStore
from pipeline.training.train import train
from tests.support import environment, forget_after, losses, rows, run_config
from tests.training.guarded import install

# The window is short, since runs are; only what is spoiled on purpose lies so far out.
SPIKES = ("guards.spike_deviations=100", "guards.spike_window=4", "validation.every_steps=0")
FACTOR = 1e6


def run(tmp_path, data, monkeypatch, name, *overrides, resume="never", architecture="rlt", **faults):
    """Train; return the outcome and the record of each step."""
    steps = []
    with monkeypatch.context() as patch:
        install(patch.setattr, record=lambda rank, entry: steps.append(entry), **faults)
        config = run_config(tmp_path / "runs", data, *overrides, name=name, architecture=architecture)
        outcome = train(config, resume)
    return outcome, steps


def hashes(steps):
    return {entry["step"]: entry["hash"] for entry in steps}


VARIANTS = {
    "adamw": [],
    "muon": ["optimizer.name=muon"],
    "accumulation": ["training.micro_batch_tokens=64"],
    "bf16": ["training.precision=bf16-mixed"],
    "decay": ["optimizer.decay_to_zero=true", "training.clip_norm=0"],
    "asleep": ["solver.passes=1", "optimizer.name=muon"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_spike_changes_nothing_and_the_run_goes_on_as_if_its_update_had_never_been(
    tmp_path, data, monkeypatch, capsys, variant
):
    """Weights, moments and step counts to the last bit; rates and data go on with the steps."""
    settings = [*SPIKES, *VARIANTS[variant]]
    architecture = "crt" if variant == "asleep" else "rlt"  # one pass feeds nothing back: what it would use sleeps
    micro = 1 if variant == "accumulation" else 0
    guarded, found = run(
        tmp_path, data, monkeypatch, "a", *settings, architecture=architecture, spoil=[(7, 0, micro, FACTOR)]
    )
    said = capsys.readouterr().out
    without = ["guards.spike_deviations=0", "validation.every_steps=0", *VARIANTS[variant]]
    plain, expected = run(tmp_path, data, monkeypatch, "b", *without, architecture=architecture, drop=[7])
    assert found == expected
    assert hashes(found)[7] == hashes(found)[6]
    assert len(set(hashes(found).values())) == 11
    (line,) = [line for line in said.splitlines() if "update left out" in line]
    assert line.startswith("step 7: update left out: loss ")
    assert "epoch 0, samples 24 to 27, tokens from 768" in line
    assert line.endswith("1 of at most 10 spikes within 1000 steps")
    assert [row["guards/skipped"] for row in rows(guarded.folder)] == [str(int(step >= 7)) for step in range(1, 13)]
    rates = [[row["optimizer/learning_rate"] for row in rows(each.folder)] for each in (guarded, plain)]
    assert rates[0] == rates[1]


def test_a_guard_that_sees_nothing_changes_nothing(tmp_path, data, monkeypatch):
    _, found = run(tmp_path, data, monkeypatch, "a", *SPIKES, "guards.nonfinite_limit=3")
    _, expected = run(tmp_path, data, monkeypatch, "b", "validation.every_steps=0")
    assert found == expected


@pytest.mark.parametrize("stop", [4, 8])
def test_a_resumed_run_repeats_every_bit(tmp_path, data, monkeypatch, stop):
    faults = {"spoil": [(4, 0, 0, FACTOR), (6, 0, 0, float("nan")), (7, 0, 0, FACTOR), (10, 0, 0, FACTOR)]}
    settings = [*SPIKES, "guards.nonfinite_limit=1", "checkpoint.keep_last=3"]
    whole, expected = run(tmp_path, data, monkeypatch, "a", *settings, **faults)
    cut, _ = run(tmp_path, data, monkeypatch, "b", *settings, **faults)
    forget_after(cut.folder, stop)
    again, found = run(tmp_path, data, monkeypatch, "b", *settings, resume="must", **faults)
    assert found == expected[stop:]
    assert losses(again.folder) == losses(whole.folder)
    skipped = [row["guards/skipped"] for row in rows(again.folder)]
    assert skipped == [row["guards/skipped"] for row in rows(whole.folder)]
    assert skipped[-1] == "4"


@pytest.mark.parametrize("every", [1, 100])
def test_too_many_spikes_end_the_run(tmp_path, data, monkeypatch, every):
    """Also where the judgements are read later only: before the next checkpoint."""
    faults = {"spoil": [(5, 0, 0, FACTOR), (6, 0, 0, FACTOR), (10, 0, 0, FACTOR), (11, 0, 0, FACTOR)]}
    settings = [*SPIKES, "guards.spike_limit=2", f"logging.every_steps={every}"]
    loose, _ = run(tmp_path, data, monkeypatch, "loose", *settings, "guards.spike_span=5", **faults)
    assert loose.step == 12
    with pytest.raises(TrainingError) as caught:
        run(tmp_path, data, monkeypatch, "tight", *settings, "guards.spike_span=6", **faults)
    message = str(caught.value)
    assert "spikes at 3 steps within 6, above guards.spike_limit=2: 5, 6, 10 (loss " in message
    assert "data.skip_samples='[[16, 23], [36, 39]]'" in message
    assert "step_0000000008; go on from there" in message
    assert "\n" not in message
    assert [each.step for each in CheckpointStore(tmp_path / "runs/tight/checkpoints").list()] == [4, 8]


def test_steps_that_are_not_finite_are_left_out_up_to_the_limit(tmp_path, data, monkeypatch, capsys):
    faults = {"spoil": [(step, 0, 0, float(value)) for step, value in ((3, "nan"), (6, "inf"), (10, "nan"))]}
    settings = ["validation.every_steps=0", "guards.nonfinite_limit=2"]
    with pytest.raises(TrainingError) as caught:
        run(tmp_path, data, monkeypatch, "a", *settings, **faults)
    message = str(caught.value)
    assert "not finite at step 10 (epoch 0, samples 36 to 39" in message
    assert "the last of 3, above guards.nonfinite_limit=2" in message
    assert "step_0000000008" in message
    said = [line for line in capsys.readouterr().out.splitlines() if "update left out" in line]
    assert [line.partition(":")[0] for line in said] == ["step 3", "step 6"]
    assert "loss nan is not finite, gradient norm nan is not finite" in said[0]
    # The count goes on where the run is resumed, and the limit may be another.
    with pytest.raises(TrainingError, match="not finite at step 10"):
        run(tmp_path, data, monkeypatch, "a", *settings, resume="must", **faults)
    outcome, found = run(
        tmp_path, data, monkeypatch, "a", settings[0], "guards.nonfinite_limit=3", resume="must", **faults
    )
    assert outcome.step == 12
    assert hashes(found)[10] == hashes(found)[9]
    assert rows(outcome.folder)[-1]["guards/skipped"] == "3"
    with pytest.raises(TrainingError, match=r"not finite at step 3 \(epoch 0, samples 8 to 11, .*\); there is no"):
        run(tmp_path, data, monkeypatch, "b", *SPIKES, **faults)  # a guard of spikes alone lets none pass


def test_a_guard_may_be_switched_on_and_off_on_resume(tmp_path, data, monkeypatch, recwarn):
    off = ("validation.every_steps=0", "checkpoint.keep_last=3")
    plain, expected = run(tmp_path, data, monkeypatch, "a", *off)
    run(tmp_path, data, monkeypatch, "b", *off, *SPIKES)
    for stop, settings in ((8, []), (4, [*SPIKES, "guards.spike_window=6"])):
        forget_after(tmp_path / "runs/b", stop)
        outcome, found = run(tmp_path, data, monkeypatch, "b", *off, *settings, resume="must")
        assert found == expected[stop:]
    assert losses(outcome.folder) == losses(plain.folder)
    assert not [each for each in recwarn if "ckpt_path" in str(each.message)]


def test_a_new_stage_of_a_schedule_is_no_spike(tmp_path, data, monkeypatch, capsys):
    """Loss may leap there: the window begins anew."""
    schedule = "schedules.interval=[{at: 0.0, value: 8}, {at: 0.5, value: 1}]"
    faults = {"spoil": [(step, 0, 0, 50.0) for step in range(7, 13)]}
    _, found = run(tmp_path, data, monkeypatch, "a", *SPIKES, schedule, **faults)
    assert len(set(hashes(found).values())) == 12
    # Without the stage the same leap is one.
    _, found = run(tmp_path, data, monkeypatch, "b", *SPIKES, **faults)
    assert hashes(found)[12] == hashes(found)[6]


def test_the_data_of_a_spike_are_left_out_on_resume(tmp_path, data, monkeypatch):
    """The usual use: the run ends at a spike, and goes on from the checkpoint before it without those data."""
    faults = {"spoil": [(7, 0, 0, FACTOR)]}
    with pytest.raises(TrainingError) as caught:
        run(tmp_path, data, monkeypatch, "a", *SPIKES, "guards.spike_limit=0", **faults)
    advice = str(caught.value).partition("without these data (")[2].partition(")")[0].replace("'", "")
    assert advice == "data.skip_samples=[[24, 27]]"
    assert [each.step for each in CheckpointStore(tmp_path / "runs/a/checkpoints").list()] == [4]
    outcome, found = run(tmp_path, data, monkeypatch, "a", *SPIKES, advice, resume="must")
    taken = [sample for entry in found for sample in entry["samples"]]
    assert taken == [*range(16, 24), *range(28, 52)]
    assert outcome.step == 12
    # From the start without them it is the same run.
    _, whole = run(tmp_path, data, monkeypatch, "b", *SPIKES, advice)
    assert whole[4:] == found
    # They lie behind now.
    forget_after(outcome.folder, 8)
    for other in ([], ["data.skip_samples=[[20, 27]]"]):
        with pytest.raises(DataError, match=r"has left out \[\[24, 27\]\]; only what is ahead"):
            run(tmp_path, data, monkeypatch, "a", *SPIKES, *other, resume="must")
    _, found = run(tmp_path, data, monkeypatch, "a", *SPIKES, "data.skip_samples=[[36, 37], [24, 27]]", resume="must")
    assert [sample for entry in found for sample in entry["samples"]] == list(range(38, 54))


def test_ranges_that_the_run_does_not_reach_are_refused(tmp_path, data):
    with pytest.raises(ConfigError, match=r"holds \[48, 50\], but the run ends before it"):
        run_config(tmp_path, data, "data.skip_samples=[[48, 50]]")


STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]


def two_ranks(tmp_path, data, *overrides, spoil=(), name="two"):
    """Train on two ranks; return the finished process and the records of both."""
    path = tmp_path / "config.yaml"
    settings = [*SPIKES, "training.micro_batch_tokens=32", "training.devices=2", *overrides]
    config_files.save(run_config(tmp_path / "runs", data, *settings, name=name), path)
    spec = {"spoil": list(spoil), "record": str(tmp_path / f"record_{name}")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.guarded", json.dumps(spec), "train", str(path)],
        capture_output=True, text=True, timeout=240, env=environment(),
    )  # fmt: skip
    paths = [tmp_path / f"record_{name}.{rank}" for rank in (0, 1)]
    assert all(path.is_file() for path in paths), done.stdout + done.stderr
    records = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    return done, records


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_leave_out_what_one_alone_has_seen(tmp_path, data, monkeypatch, strategy):
    spoil = [(5, 1, 0, FACTOR), (7, 0, 1, FACTOR), (9, 1, 1, "nan"), (12, 0, 0, "inf")]
    spoil = [(*where, float(factor)) for *where, factor in spoil]
    limit = "guards.nonfinite_limit=2"
    done, records = two_ranks(tmp_path, data, f"training.strategy={strategy}", limit, spoil=spoil)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if "update left out" in line] == [
        "step 5", "step 7", "step 9", "step 12",
    ]  # fmt: skip
    assert hashes(records[0]) == hashes(records[1])
    found = hashes(records[0])
    assert [step for step in range(2, 13) if found[step] != found[step - 1]] == [2, 3, 4, 6, 8, 10, 11]
    # Rates and data go on with the steps, as in a run in which nothing happens.
    _, alone = run(tmp_path, data, monkeypatch, "one", *SPIKES)
    assert [entry["rates"] for entry in records[0]] == [entry["rates"] for entry in alone]
    for entry, *parts in zip(alone, *records, strict=True):
        assert sorted(parts[0]["samples"] + parts[1]["samples"]) == entry["samples"]


def test_too_many_on_one_rank_end_all(tmp_path, data):
    done, _ = two_ranks(tmp_path, data, "guards.spike_limit=1", spoil=[(5, 1, 0, FACTOR), (6, 1, 0, FACTOR)])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("spikes at 2 steps within 1000, above guards.spike_limit=1: 5, 6 (") == 2  # a rank each
    assert [each.step for each in CheckpointStore(tmp_path / "runs/two/checkpoints").list()] == [4]


def test_ranks_may_change_on_resume(tmp_path, data, monkeypatch):
    """What a guard knows belongs to the run, not to a rank."""
    one, expected = run(tmp_path, data, monkeypatch, "one", *SPIKES, spoil=[(5, 0, 0, FACTOR), (9, 0, 0, FACTOR)])
    done, _ = two_ranks(tmp_path, data, spoil=[(5, 0, 0, 2 * FACTOR)])
    assert done.returncode == 0, done.stderr
    forget_after(tmp_path / "runs/two", 8)
    outcome, found = run(tmp_path, data, monkeypatch, "two", *SPIKES, resume="must", spoil=[(9, 0, 0, FACTOR)])
    assert [entry["samples"] for entry in found] == [entry["samples"] for entry in expected[8:]]
    assert hashes(found)[9] != hashes(found)[10]
    assert [row["guards/skipped"] for row in rows(outcome.folder)] == [
        row["guards/skipped"] for row in rows(one.folder)
    ]
