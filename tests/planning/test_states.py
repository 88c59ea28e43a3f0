"""Predicted bytes beside those of real runs, of one and of two real processes."""

import json
import subprocess
import sys

import pytest

from pipeline import config_files
from pipeline.config import Config
from pipeline.planning.machines import Machine
from pipeline.planning.plan import on_meta, option, settled
from pipeline.planning.states import BUCKET, SUB_GROUP, sizes_of, states
from pipeline.training.strategies import deepspeed_options
from tests.support import environment, prepare_data

CPU = Machine("cpu", 2**40, 1e12, 0.4, 3600)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planning")
    prepare_data(folder)
    return folder / "data"


def overrides(data, root, *more):
    return [
        "run.name=measured",
        f"run.root={root}",
        f"data.path={data}",
        "data.sequence_length=64",
        "model.architecture=rlt",
        "model.width=128",
        "model.heads=4",
        "model.encoder_layers=2",
        "model.decoder_layers=2",
        "solver.name=chunked",
        "solver.interval=8",
        "optimizer.name=adamw",
        "learning_rate.name=cosine",
        "learning_rate.peak=0.001",
        "training.tokens=2048",
        "training.batch_tokens=512",
        "training.micro_batch_tokens=256",
        "training.accelerator=cpu",
        "training.threads=1",
        "validation.every_steps=0",
        "logging.wandb.mode=disabled",
        *more,
    ]


@pytest.mark.parametrize(
    ("strategy", "precision", "more"),
    [
        ("single", "bf16-mixed", ["solver.activation_checkpointing=true"]),
        ("single", "float32", ["optimizer.name=muon"]),
        ("ddp", "float32", []),
        ("zero1", "float32", ["training.micro_batch_tokens=128"]),
        ("zero2", "bf16", []),
        ("zero3", "float32", []),
        ("zero3", "bf16", []),
    ],
)
def test_a_run_holds_what_was_predicted(strategy, precision, more, data, tmp_path):
    ranks = 1 if strategy == "single" else 2
    chosen = [f"training.strategy={strategy}", f"training.precision={precision}", f"training.devices={ranks}"]
    settings = overrides(data, tmp_path, *chosen, *more)
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.measuring", tmp_path / "found", "train", *settings],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    measured = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(ranks)]
    config = settled(config_files.load(Config, [], settings))
    sizes = sizes_of(config, on_meta(config))
    predicted = option(config, CPU, sizes)
    for rank in measured:
        assert rank["states"] == pytest.approx(predicted.states, rel=0.02)
    assert max(rank["peak"] for rank in measured) == pytest.approx(predicted.peak, rel=0.15)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_buckets_are_those_that_the_strategy_asks_for(precision, data, tmp_path):
    for stage, ranks in (("zero2", 2), ("zero3", 4)):
        more = [f"training.strategy={stage}", f"training.devices={ranks}", f"training.precision={precision}"]
        config = config_files.load(Config, [], overrides(data, tmp_path, *more, "training.micro_batch_tokens=64"))
        for parameters in (10, 10**6, 10**9):
            zero = deepspeed_options.options(config, "cpu", parameters)["zero_optimization"]
            assert zero["reduce_bucket_size"] == max(1024, min(BUCKET, parameters))
            assert zero.get("sub_group_size", SUB_GROUP) == SUB_GROUP


def test_padding_and_shares(data, tmp_path):
    """Three ranks divide no parameter evenly; shares add up to all, but for less than a pad a parameter and rank."""
    config = config_files.load(Config, [], overrides(data, tmp_path, "model.vocab_size=257"))
    sizes = sizes_of(config, on_meta(config))
    from dataclasses import replace

    training = replace(config.training, devices=3)
    for strategy in ("zero1", "zero2", "zero3"):
        held = states(replace(config, training=replace(training, strategy=strategy)), sizes, cuda=False).device
        masters = 3 * held["float32 masters"] // 4
        pads = len(sizes.parameters) * 3 if strategy == "zero3" else len(sizes.groups) * 6
        assert sizes.trained <= masters <= sizes.trained + pads
        assert held["optimizer's moments"] == 2 * held["float32 masters"]
