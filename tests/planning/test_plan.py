"""``backfeed plan``: what it says, what it advises, and what it refuses."""

import json
from dataclasses import replace

import pytest

from pipeline import config_files, description
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.planning.machines import ACCELERATORS, Machine, machine, seconds, size
from pipeline.planning.plan import CONTEXT, changed, plan
from pipeline.planning.report import text
from tests.support import backfeed, one_line, run_config

RANK = ["training.devices=8", "training.precision=bf16-mixed", "model.vocab_size=4096", "model.width=1024"]


def config_of(tmp_path, *overrides, architecture="transformer"):
    rows = ["training.batch_tokens=32768", "training.micro_batch_tokens=4096", "data.sequence_length=512"]
    rows += ["training.tokens=1000000000", "learning_rate.warmup_tokens=0", "validation.every_steps=0"]
    return run_config(tmp_path, "nowhere", *RANK, *rows, *overrides, architecture=architecture)


def gpu(memory):
    return Machine("h100", memory, 989e12, 0.4, 86_400)


def test_all_strategies_with_and_without_checkpointing(tmp_path):
    found = plan(config_of(tmp_path), gpu(80 * 2**30))
    rows = {(each.strategy, each.activation_checkpointing): each for each in found.options}
    assert set(rows) == {(name, each) for name in ("ddp", "zero1", "zero2", "zero3") for each in (False, True)}
    assert found.chosen == rows["ddp", False]
    assert found.chosen.fits
    assert found.advice is None
    for each in found.options:
        assert sum(each.parts.values()) == each.peak
        assert each.exact
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        assert rows[strategy, True].peak < rows[strategy, False].peak
    states = [rows[name, False].states for name in ("ddp", "zero1")]
    assert states[1] < states[0] / 2
    assert "it fits" in text(found)


def test_what_fits_is_verified_by_planning_again(tmp_path):
    config = config_of(tmp_path)
    tight = gpu(plan(config, gpu(80 * 2**30)).chosen.peak - 2**20)
    for memory in (tight.memory, CONTEXT + (tight.memory - CONTEXT) // 2):
        found = plan(config, gpu(memory))
        assert not found.chosen.fits
        assert found.advice is not None
        other = config_of(tmp_path, *found.advice.overrides)
        again = plan(other, gpu(memory))
        assert again.chosen.fits
        assert again.chosen.peak == found.advice.peak
        said = text(found)
        assert "does not fit" in said
        assert " ".join(found.advice.overrides) in said


def test_nothing_fits_into_nothing(tmp_path):
    found = plan(config_of(tmp_path), gpu(2**20))
    assert found.advice is None
    assert "choose a smaller model" in text(found)


def test_the_stage_that_takes_most_counts(tmp_path):
    stages = "schedules.passes=[{at: 0, value: 1}, {at: 0.5, draw: [2, 4]}]"
    config = config_of(tmp_path, "solver.name=unrolled", stages, architecture="fbt")
    found = plan(config, gpu(80 * 2**30))
    assert found.chosen.settings == {"passes": 4}
    fixed = replace(config, schedules={}, solver=replace(config.solver, passes=4))
    assert plan(fixed, gpu(80 * 2**30)).chosen.peak == found.chosen.peak


def test_time(tmp_path):
    config = config_of(tmp_path)
    found = plan(config, gpu(80 * 2**30)).time
    flops = description.describe(config).training_flops
    assert found.flops == pytest.approx(flops)
    assert found.tokens_a_day == pytest.approx(8 * 989e12 * 0.4 / flops * 86_400)
    assert found.seconds == pytest.approx(config.training.steps * 32768 / (found.tokens_a_day / 86_400))
    assert found.jobs == 1
    again = plan(changed(config, activation_checkpointing=True), gpu(80 * 2**30)).time
    assert again.flops == pytest.approx(flops + again.recomputed)
    assert flops / 4 < again.recomputed < flops / 3
    short = replace(gpu(80 * 2**30), time_limit=1)
    assert plan(config, short).time.jobs == -(-found.seconds // 1)


def test_what_a_strategy_refuses_is_said(tmp_path):
    found = plan(config_of(tmp_path, "optimizer.name=muon"), gpu(80 * 2**30))
    assert {each.strategy for each in found.options} == {"ddp"}
    assert "zero2" in found.refused


def test_the_command(tmp_path):
    config_files.save(config_of("runs"), tmp_path / "config.yaml")
    done = backfeed("plan", "config.yaml", "--gpus", "4", "--gpu-memory", "20GiB", "--json", "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["ranks"] == 4
    assert found["machine"]["memory"] == 20 * 2**30
    config = config_files.load(Config, [tmp_path / "config.yaml"], ["training.devices=4", "training.nodes=1"])
    expected = plan(config, machine("h100", "bf16-mixed", memory="20GiB"))
    assert found["chosen"]["peak"] == expected.chosen.peak
    assert text(expected) in done.stdout
    for wrong, told in (
        (["--gpu", "abacus"], "--gpu"),
        (["--gpu-memory", "80"], "--gpu-memory"),
        (["--utilization", "2"], "--utilization"),
        (["--time-limit", "soon"], "--time-limit"),
        (["--gpus", "3"], "training.batch_tokens"),
        (["model.vocab_size=null"], "set model.vocab_size"),
        (["--gpu", "cpu"], "--peak-flops"),
    ):
        assert told in one_line(backfeed("plan", "config.yaml", *wrong, cwd=tmp_path))


@pytest.mark.parametrize(
    ("written", "expected"),
    [("90", 5400), ("1:30", 90), ("24:00:00", 86_400), ("2-0", 172_800), ("1-12:30", 131_400), ("0-0:0:5", 5)],
)
def test_times_of_slurm(written, expected):
    assert seconds(written, "--time-limit") == expected


@pytest.mark.parametrize("written", ["", "0", "x", "1:2:3:4", "1-", "-5", "1.5"])
def test_what_is_no_time(written):
    with pytest.raises(ConfigError):
        seconds(written, "--time-limit")


def test_sizes():
    assert size("80GiB", "x") == 80 * 2**30
    assert size("1.5 GB", "x") == 1_500_000_000
    for wrong in ("80", "GiB", "-1GiB", "0GiB", "8gigs"):
        with pytest.raises(ConfigError):
            size(wrong, "x")
    assert all(each.bf16 > each.float32 for each in ACCELERATORS.values())
