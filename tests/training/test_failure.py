"""A rank that dies, hangs or fails: which one, where and why is said, every process ends, and the run goes on."""

import signal
import sys

import pytest

from tests.rank_failures import LIMITS, Plan, check, run_ranks, survive_ranks, write_config

# One run of each strategy, which goes on after each of them.
DISTURBANCES = {
    "ddp": [
        Plan(1, phase="backward", action="SIGKILL"),
        Plan(0, phase="save", action="SIGKILL"),
        Plan(1, phase="validation", action="exit", cause="ended with exit code 3"),
        Plan(1, phase="optimizer step", action="error", cause="ArithmeticError: a fault of the program"),
    ],
    "zero2": [Plan(1, phase="optimizer step", action="SIGKILL")],
    "zero3": [Plan(0, phase="backward", action="SIGKILL"), Plan(1, phase="save", action="SIGKILL", delay=0.01)],
}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.long), "zero3"])
def test_killed_ranks_are_named_and_the_run_goes_on(tmp_path, data, strategy):
    plans = DISTURBANCES[strategy]
    assert survive_ranks(tmp_path, data, strategy, plans) == len(plans)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(1, 7, "forward", "sleep", cause="has made no progress for .* in act"),
        Plan(0, 7, "backward", "lock", cause="has been silent for .*its process is alive"),
        Plan(1, 8, "save", "SIGSTOP", cause="has been silent for .*its process is stopped"),
    ],
    ids=["hangs", "hangs_with_pythons_lock", "stopped"],
)
def test_hanging_ranks_are_named_and_ended(tmp_path, data, plan):
    quick = ("training.silence_seconds=5", "training.timeout_seconds=15", "training.grace_seconds=2")
    check(plan, run_ranks(plan, write_config(tmp_path, data), *quick))


def test_a_loss_that_is_no_number_on_one_rank_ends_all(tmp_path, data):
    ended = run_ranks(Plan(1, 7, "forward", "nan"), write_config(tmp_path, data), *LIMITS)
    assert ended.code == 1, ended.out + ended.err
    assert any("not finite at step 7" in line for line in ended.lines), ended.err
    assert "Traceback" not in ended.err


def test_under_torchrun(tmp_path, data):
    plan = Plan(1, 7, "backward", "SIGKILL", cause="was killed by signal 9|is gone")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    ended = run_ranks(plan, write_config(tmp_path, data), *LIMITS, launcher=launcher)
    check(plan, ended)


def test_a_rank_that_dies_before_training_ends_the_others(tmp_path, data):
    """Before the ranks have met, there is nothing yet that could watch them but the launcher."""
    plan = Plan(1, 0, "start", "exit")
    ended = run_ranks(plan, write_config(tmp_path, data), *LIMITS)
    assert ended.code == 1, ended.err
    assert "backfeed: rank 1 ended with exit code 3 before training began; see its message" in ended.lines


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGTERM), (0, signal.SIGUSR1)], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path, data, rank, number):
    plan = Plan(rank, 7, "forward", number.name)
    ended = run_ranks(plan, write_config(tmp_path, data), *LIMITS)
    assert ended.code == 128 + number, ended.out + ended.err
    assert "stopped at step 7, saved" in ended.out
    assert not ended.lines


def test_all_ranks_may_stand_still_for_a_while(tmp_path, data):
    """A job that is stopped and continued goes on; so does a save or a step that takes long."""
    config = write_config(tmp_path, data, "training.tokens=1280")
    limits = ("training.silence_seconds=2", "training.timeout_seconds=60", "training.grace_seconds=2")
    ended = run_ranks(Plan(0, 7, "forward", "pause"), config, *limits)
    assert ended.code == 0, ended.out + ended.err
    ended = run_ranks(Plan(1, 8, "save", "slow"), config, *limits, "run.name=slow")
    assert ended.code == 0, ended.out + ended.err
