"""What DeepSpeed is told, and what may not be told it."""

import pytest

from pipeline.errors import ConfigError
from pipeline.training.strategies.deepspeed_options import REFUSED, merge, options
from tests.support import run_config


def config_of(tmp_path, *settings):
    return run_config(tmp_path, tmp_path / "data", *settings)


def test_settings_become_deepspeeds(tmp_path):
    config = config_of(
        tmp_path,
        "training.strategy=zero3",
        "training.precision=bf16",
        "training.clip_norm=0.5",
        "training.offload_optimizer=nvme",
        "training.offload_parameters=cpu",
        f"training.nvme_path={tmp_path}",
    )
    found = options(config, "cuda", 10**9)
    zero = found["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path)}
    assert zero["offload_param"] == {"device": "cpu"}
    assert zero["overlap_comm"]
    assert found["bf16"] == {"enabled": True}
    assert found["gradient_clipping"] == 0.5
    assert found["train_micro_batch_size_per_gpu"] == 4


def test_clipping_is_always_said(tmp_path):
    """DeepSpeed would clip at 1 otherwise."""
    config = config_of(tmp_path, "training.strategy=zero1", "training.clip_norm=0")
    assert options(config, "cpu", 1000)["gradient_clipping"] == 0.0


def test_mixed_precision_keeps_float32_weights(tmp_path):
    found = options(config_of(tmp_path, "training.strategy=zero2", "training.precision=bf16-mixed"), "cuda", 1000)
    assert found["bf16"] == {"enabled": False}
    assert found["torch_autocast"]["enabled"]


def test_the_users_own_settings_are_added(tmp_path):
    given = "training.deepspeed={zero_optimization: {reduce_bucket_size: 4096, stage: 2}, wall_clock_breakdown: true}"
    found = options(config_of(tmp_path, "training.strategy=zero2", given), "cpu", 10**6)
    assert found["zero_optimization"]["reduce_bucket_size"] == 4096
    assert found["zero_optimization"]["contiguous_gradients"]
    assert found["wall_clock_breakdown"]


@pytest.mark.parametrize("value", ["auto", "0.5"])
def test_what_agrees_may_be_repeated(tmp_path, value):
    given = f"training.deepspeed={{gradient_clipping: {value}}}"
    found = options(config_of(tmp_path, "training.strategy=zero1", "training.clip_norm=0.5", given), "cpu", 1000)
    assert found["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{zero_optimization: {stage: 2}}", "training.deepspeed.zero_optimization.stage is 2, but .* make it 3"),
        ("{gradient_clipping: 2.0}", "training.deepspeed.gradient_clipping is 2.0, but .* make it 1.0"),
        ("{bf16: {enabled: true}}", "training.deepspeed.bf16.enabled is True, but .* make it False"),
        ("{train_micro_batch_size_per_gpu: 3}", "train_micro_batch_size_per_gpu is 3, but .* make it 4"),
        ("{zero_optimization: {no_such: 1}}", r"training.deepspeed.zero_optimization.no_such: "),
        ("{zero_optimization: {reduce_bucket_size: -1}}", "reduce_bucket_size: .*greater than 0"),
        *((f"{{{key}: 1}}", f"training.deepspeed.{key} cannot be set: ") for key in REFUSED),
    ],
)
def test_contradictions_are_refused(tmp_path, given, told):
    config = config_of(tmp_path, "training.strategy=zero3", f"training.deepspeed={given}")
    with pytest.raises(ConfigError, match=told):
        options(config, "cpu", 1000)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("training.strategy=ddp", "training.offload_optimizer=cpu"), "offload_optimizer .*is cpu, but .* is ddp"),
        (("training.strategy=zero2", "training.offload_parameters=cpu"), "which zero2 cannot; set strategy=zero3"),
        (("training.strategy=zero2", "training.offload_optimizer=nvme"), "which zero2 cannot; set strategy=zero3"),
        (("training.strategy=zero3", "training.offload_optimizer=nvme"), "set training.nvme_path"),
        (("training.strategy=zero3", "training.nvme_path=/x"), "nothing is offloaded to nvme"),
        (("training.deepspeed={steps_per_print: 1}",), "training.deepspeed .*is set, but training.strategy is auto"),
        (("training.precision=bf16",), "set precision=bf16-mixed, or strategy=zero1"),
        (("training.strategy=zero1", "optimizer.name=muon"), "muon, which needs whole matrices; zero1 divides them"),
        (("training.timeout_seconds=0",), "timeout_seconds .*is 0; it must be at least 1"),
    ],
)
def test_settings_without_use_are_refused(tmp_path, settings, told):
    with pytest.raises(ConfigError, match=told):
        config_of(tmp_path, *settings)


def test_merge():
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "e": 5}) == {"a": {"b": 1, "c": 4}, "d": 3, "e": 5}
