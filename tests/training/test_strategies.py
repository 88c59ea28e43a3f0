"""A run is the same run under every strategy, on any number of ranks, and may change both on the way."""

import json
from dataclasses import replace

import pytest
import torch

from pipeline.models.base import build_on_meta
from pipeline.runs.checkpoints import CheckpointStore
from pipeline.runs.tensors import TensorReader
from pipeline.training.train import train
from tests.support import losses, prepare_data, rows, run_config
from tests.training.ranks import Job, train_in_ranks

STEPS = 20
PAIRS = {
    "rlt": ("solver.name=chunked", "solver.interval=1"),
    "crt": ("solver.name=unrolled", "solver.passes=3"),
    "lrt": ("solver.name=interleaved",),
    "fbt": ("solver.name=unrolled", "solver.passes=2", "model.jitter=0"),
}
"""The papers' pairs, without what every rank draws for itself."""
CIRCUMSTANCES = [
    pytest.param(("training.micro_batch_tokens=64",), id="plain", marks=pytest.mark.long),
    pytest.param(("training.micro_batch_tokens=32", "solver.activation_checkpointing=true"), id="accumulated"),
]
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
# Losses of one rank and of two differ by the order of float32 sums, which training carries on: about 2^-24 of the
# gradients' size a step, times the step's growth. Over 20 steps of these runs it stays three digits below this.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    prepare_data(folder)
    return folder / "data"


def config_of(root, data, strategy, ranks, *settings, architecture="rlt", name=None):
    return run_config(
        root,
        data,
        f"training.strategy={strategy}",
        f"training.devices={ranks}",
        *settings,
        architecture=architecture,
        name=name or f"{architecture}_{strategy}_{ranks}",
    )


def curve(folder):
    return [float(loss) for loss in losses(folder).values()]


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
def test_losses_are_the_same_under_every_strategy(tmp_path, data, circumstances):
    """So are the norms of the gradients, the schedule and what validation finds."""
    runs = {}
    settings = (*circumstances, f"training.tokens={128 * STEPS}", "validation.every_steps=20")
    settings += ("checkpoint.every_steps=100",)
    for architecture, pair in PAIRS.items():
        for strategy in STRATEGIES:
            config = config_of(tmp_path, data, strategy, 2, *settings, *pair, architecture=architecture)
            runs[architecture, strategy] = config
    train_in_ranks(2, [Job(config) for config in runs.values()], tmp_path / "jobs")
    for (architecture, strategy), config in runs.items():
        single = config_of(tmp_path, data, "single", 1, *settings, *PAIRS[architecture], architecture=architecture)
        if not single.run.folder.exists():
            train(single)
        one, two = single.run.folder, config.run.folder
        assert len(curve(one)) == STEPS
        assert curve(one)[-1] < curve(one)[0]
        for kind, names in (
            ("train", ("train/loss", "optimizer/gradient_norm", "optimizer/learning_rate")),
            ("validation", ("validation/loss",)),
        ):
            for name in names:
                values = [[float(row[name]) for row in rows(folder, kind)] for folder in (one, two)]
                assert values[1] == pytest.approx(values[0], rel=TOLERANCE), (architecture, strategy, name)


def seen(root, name, ranks):
    """Return the samples of each step, over all ranks."""
    found = {}
    for rank in range(ranks):
        for line in (root / f"{name}.{ranks}.seen.{rank}").read_text().splitlines():
            step, samples = json.loads(line)
            found.setdefault(step, []).extend(samples)
    return found


PATHS = [
    pytest.param([("zero2", 2), ("zero2", 1), ("zero2", 4)], id="ranks", marks=pytest.mark.long),
    pytest.param([("zero1", 2), ("zero2", 2), ("zero3", 2)], id="stages", marks=pytest.mark.long),
    pytest.param([("ddp", 2), ("zero3", 4), ("ddp", 1)], id="from_replicas"),
    pytest.param([("zero3", 2), ("zero1", 4), ("single", 1)], id="back", marks=pytest.mark.long),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_run_goes_on_under_another_strategy_and_on_other_ranks(tmp_path, data, path):
    """Model, optimiser, schedules and data position carry on: every token is read once, and losses are those of one."""
    settings = ("training.micro_batch_tokens=32", "checkpoint.keep_last=9", "validation.every_steps=0")
    for number, (strategy, ranks) in enumerate(path):
        config = config_of(tmp_path, data, strategy, ranks, *settings, name="run")
        job = Job(config, "must" if number else "never", stop=4 * (number + 1))
        train_in_ranks(ranks, [job], tmp_path / f"jobs{number}")
    whole = train(config_of(tmp_path, data, "single", 1, *settings, name="whole")).folder
    assert curve(tmp_path / "run") == pytest.approx(curve(whole), rel=TOLERANCE)
    read = {}
    for _, ranks in path:
        read.update(seen(tmp_path, "run", ranks))
    assert sorted(read) == list(range(1, 13))
    samples = [sample for step in sorted(read) for sample in read[step]]
    assert sorted(samples) == list(range(12 * 4))


LONG = [pytest.param(each, marks=pytest.mark.long) for each in ("zero1", "zero2")]


@pytest.mark.parametrize("strategy", [*LONG, "zero3"])
def test_a_resumed_run_repeats_every_loss(tmp_path, data, strategy):
    """To the last bit, with weights that sleep for a while, accumulation and bfloat16 weights."""
    schedule = "schedules.passes=[{at: 0, value: 1}, {at: 0.5, value: 2}]"  # the correction wakes at step 7
    settings = ("training.micro_batch_tokens=32", "checkpoint.keep_last=9", "training.precision=bf16", schedule)
    settings += ("solver.name=unrolled",)
    runs = {
        name: config_of(tmp_path, data, strategy, 2, *settings, architecture="crt", name=name)
        for name in ("whole", "early", "late")
    }
    train_in_ranks(
        2, [Job(runs["whole"]), *(Job(runs[n], stop=s) for n, s in (("early", 4), ("late", 8)))], tmp_path / "a"
    )
    train_in_ranks(2, [Job(runs[name], "must") for name in ("early", "late")], tmp_path / "b")
    for name in ("early", "late"):
        assert losses(tmp_path / name) == losses(tmp_path / "whole"), name
        first, second = (CheckpointStore(tmp_path / each / "checkpoints").at(12).path for each in ("whole", name))
        for stem in ("model", "optimizer"):
            one, two = TensorReader(first, stem), TensorReader(second, stem)
            assert set(one) == set(two)
            for key in one:
                assert torch.equal(one[key], two[key]), key


COUNTED = "training.deepspeed={comms_logger: {enabled: true, verbose: false, prof_all: true}}"


def test_gathers_do_not_grow_with_the_sequence(tmp_path, data):
    """ZeRO-3 gathers the weights before forward and before backward, however often the recurrence calls a layer."""
    settings = ("training.tokens=2048", "training.batch_tokens=512", "training.micro_batch_tokens=256")
    settings += ("validation.every_steps=0", "checkpoint.every_steps=100", COUNTED)
    runs = {
        (architecture, length, checkpointing): config_of(
            tmp_path,
            data,
            "zero3",
            2,
            *settings,
            *pair,
            f"solver.activation_checkpointing={checkpointing}",
            f"data.sequence_length={length}",
            architecture=architecture,
            name=f"{architecture}_{length}_{checkpointing}",
        )
        for architecture, pair in PAIRS.items()
        for length in (16, 64)
        for checkpointing in ("false", "true")
    }
    train_in_ranks(2, [Job(config) for config in runs.values()], tmp_path / "jobs")
    for architecture in PAIRS:
        counts = []
        for (other, _, _), config in runs.items():
            if other == architecture:
                found = json.loads((tmp_path / f"{config.run.name}.calls.0").read_text())
                counts.append({name: number for name, number in found.items() if "gather" in name})
        assert counts[0]
        assert counts == [counts[0]] * len(counts)
        # Two in each of the four steps, and of every weight a few when weights are drawn and saved.
        model = replace(runs[architecture, 16, "false"].model, vocab_size=257)
        assert sum(counts[0].values()) <= 2 * 4 + 8 * len(dict(build_on_meta(model).named_parameters()))


def test_checkpoints_hold_what_the_model_has(tmp_path, data):
    config = config_of(tmp_path, data, "zero3", 2, "training.micro_batch_tokens=64", "training.precision=bf16-mixed")
    train_in_ranks(2, [Job(config)], tmp_path / "jobs")
    last = CheckpointStore(config.run.folder / "checkpoints").list()[-1]
    last.verify()
    shapes = {
        name: each.shape for name, each in build_on_meta(replace(config.model, vocab_size=257)).named_parameters()
    }
    weights, moments = TensorReader(last.path, "model"), TensorReader(last.path, "optimizer")
    assert {name: weights[name].shape for name in weights} == shapes
    assert {name: moments[f"{name}/exp_avg_sq"].shape for name in shapes} == shapes
    assert {float(moments[f"{name}/step"]) for name in shapes} == {12.0}
