"""Whole runs with the fast loop and with autograd's: the same losses, and a run may change from one to the other."""

import pytest

from pipeline.training.train import train
from tests.support import assert_close, forget_after, losses, run_config

SCHEDULE = "schedules.interval=[{at: 0.0, value: 8}, {at: 0.5, value: 2}, {at: 0.75, value: 1}]"


def run(tmp_path, data, architecture, loop, *overrides, name=None, resume="never"):
    settings = ["solver.name=chunked", f"solver.loop={loop}", "validation.every_steps=12", *overrides]
    config = run_config(tmp_path / "runs", data, *settings, architecture=architecture, name=name or loop)
    return train(config, resume).folder


@pytest.mark.parametrize("architecture", ["rlt", "crt", "lrt", "fbt"])
def test_losses_are_the_same(tmp_path, data, architecture):
    """With micro-batches, an interval that anneals, documents that restart and activation checkpointing."""
    shared = [SCHEDULE, "training.micro_batch_tokens=64", "data.document_boundaries=restart"]
    expected = losses(run(tmp_path, data, architecture, "autograd", *shared))
    assert_close(losses(run(tmp_path, data, architecture, "fast", *shared)), expected)
    again = run(tmp_path, data, architecture, "fast", *shared, "solver.activation_checkpointing=true", name="again")
    assert_close(losses(again), expected)


@pytest.mark.parametrize(("first", "then"), [("fast", "autograd"), ("autograd", "fast")])
def test_loop_may_change_on_resume(tmp_path, data, first, then):
    whole = losses(run(tmp_path, data, "rlt", first, name="whole"))
    cut = run(tmp_path, data, "rlt", first, name="cut")
    forget_after(cut, 8)
    assert run(tmp_path, data, "rlt", then, name="cut", resume="must") == cut
    found = losses(cut)
    assert_close(found, whole)
    assert {step: found[step] for step in range(1, 9)} == {step: whole[step] for step in range(1, 9)}
