"""The configurations that come with the repository: each is a run, and what its comment says of it is so."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pipeline import config_files, models, solvers
from pipeline.config import Config
from pipeline.data.prepare import PrepareConfig
from pipeline.description import describe
from pipeline.models.base import count_parameters
from pipeline.solvers.schedules import SolverSchedule
from pipeline.training.train import train
from tests import support

FOLDER = Path(__file__).parents[1] / "configs"
SMALL = FOLDER / "small.yaml"
WHOLE = [path for path in sorted(FOLDER.glob("*.yaml")) if path != SMALL]
VARIANTS = sorted(FOLDER.glob("variants/*.yaml"))
SCHEDULES = sorted(FOLDER.glob("schedules/*.yaml"))
MEMBERS = sorted(FOLDER.glob("families/*/*.yaml"))
RUNS = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in [*WHOLE, *VARIANTS, *MEMBERS]}
PUBLISHED = {name: path for name, path in RUNS.items() if path not in MEMBERS and "demo" not in name}
NUMBERED = [name for name in RUNS if "demo" not in name and name != "rlt_120m"]  # their comments give counts

COUNTS = {
    "crt_d5_c1120": 157_094_080,
    "crt_d1_c2048": 215_035_136,
    "transformer_n12_c768": 134_240_000,
    "variants/transformer_n6_c1088": 154_980_608,
    "rlt_4_4": 28_726_912,
    "variants/rlt_5_3": 28_201_984,
    "variants/rlt_6_2": 27_677_056,
    "variants/rlt_7_1": 27_152_128,
    "variants/rlt_8_0": 26_102_272,
    "transformer_t8": 25_314_304,
}


def files(path):
    """Return the files that make a run of ``path``, by the command in its comment if it is no whole one."""
    if path in WHOLE:
        return [path]
    (command,) = re.findall(r"^#     backfeed train (.+)$", path.read_text(), re.MULTILINE)
    found = [FOLDER.parent / each for each in command.split()]
    assert path in found
    return found


@cache
def loaded(path, *overrides):
    return config_files.load(Config, files(path), overrides)


def on_meta(model):
    with torch.device("meta"):
        return models.build(model)


def total(model):
    return count_parameters(on_meta(model))


def without_embedding(model):
    built = on_meta(model)
    return count_parameters(built) - built.embedding.weight.numel()


def training_flops(config):
    """Return the FLOPs of a token in training: three times the solver's forward ones, mean over the schedule."""
    return describe(config).training_flops


def schedule(config, steps):
    closest = solvers.build(config.solver).closest
    return SolverSchedule(config.stages, steps=steps, seed=config.run.seed, closest=closest)


# Files


@pytest.mark.parametrize("name", RUNS)
def test_every_run_loads_under_its_own_name(name):
    config = loaded(RUNS[name])
    names = {RUNS[name].stem}
    if RUNS[name] in MEMBERS:
        architecture, _, matched = RUNS[name].stem.partition("_")
        names = {"_".join(filter(None, (architecture, RUNS[name].parent.name, matched)))}
    assert {config.run.name} == names


def test_there_is_no_other_file():
    rest = {SMALL, FOLDER / "data/sotu.yaml", *(path.parent.with_suffix(".yaml") for path in MEMBERS), *SCHEDULES}
    assert set(FOLDER.rglob("*.yaml")) == rest | set(RUNS.values())
    config_files.load(PrepareConfig, [FOLDER / "data/sotu.yaml"])


@pytest.mark.parametrize("name", NUMBERED)
def test_the_comment_has_the_numbers(name):
    config, text = loaded(RUNS[name]), RUNS[name].read_text()
    parameters, flops = re.findall(r"^# ([\d,]+) parameters.*; ([\d,]+) MFLOP a token in training", text, re.M)[0]
    assert parameters == f"{total(config.model):,}"
    assert flops == f"{training_flops(config) / 1e6:,.0f}"


# Counts


@pytest.mark.parametrize("name", COUNTS)
def test_published_counts(name):
    assert total(loaded(RUNS[name]).model) == COUNTS[name]


def test_crt_of_6_blocks():
    config = loaded(RUNS["crt_d5_c1120"], "model.layers=6", "model.width=1024")
    assert total(config.model) == 149_543_168


def test_rlt_0_trains_all_but_the_merge():
    config = loaded(RUNS["rlt_4_4"], "solver.name=parallel")
    model = on_meta(config.model)
    solvers.build(config.solver).adapt(model)
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == 27_938_944


@pytest.mark.parametrize(("name", "layers"), [("lrt_d20", 20), ("variants/lrt_d24", 24)])
def test_lrt_by_hand(name, layers):
    width, heads, vocabulary = 64 * layers, layers // 2, 32_768
    backbone = (
        layers * 12 * width**2  # attention 4, feed-forward 8
        + layers * (heads * width + 2)  # gates of value embeddings, alpha and beta
        + 2 * vocabulary * width
        + layers * vocabulary * width  # value embeddings
    )
    recurrence = 2 * width**2 + layers * (2 * heads * width + 1)  # projection; gates and gamma
    config = loaded(RUNS[name])
    assert total(config.model) == backbone + recurrence
    assert recurrence / backbone == pytest.approx(0.003, abs=0.0005)
    if layers == 20:
        assert backbone == pytest.approx(1.316e9, rel=5e-4)
        assert backbone == total(loaded(RUNS["variants/transformer_d20"]).model)
    else:
        layerwise = total(replace(config.model, recurrent_projection="layerwise"))
        assert layerwise == pytest.approx(2.1e9, rel=0.005)


def test_fbt_by_hand():
    config = loaded(RUNS["fbt_1b"])
    model = on_meta(config.model)
    assert model.fusion.gate.weight.numel() + model.fusion.value.weight.numel() == 4_718_592
    width, ffn, head = 1536, 6656, 96
    attention = width * (16 + 2 * 8) * head + 16 * head * width
    block = attention + 3 * width * ffn + 16 * width + 2 * width + 2 * head  # gates of heads, norms, QK-norms
    outside = 100_352 * width + 3 * width  # norms of inputs, gates and readout
    assert count_parameters(model) == 24 * block + outside + 4_718_592


# Recipes


@pytest.mark.parametrize(
    ("name", "steps"), [("crt_d5_c1120", 100_000), ("crt_d1_c2048", 80_000), ("rlt_4_4", 2000), ("rlt_1b", 38_146)]
)
def test_steps(name, steps):
    assert loaded(RUNS[name]).training.steps == steps


@pytest.mark.parametrize("name", ["lrt_d20", "variants/lrt_d24"])
def test_lrt_follows_from_its_depth(name):
    config = loaded(RUNS[name])
    model, layers = config.model, config.model.layers
    assert (model.width, model.heads) == (64 * layers, layers // 2)
    assert config.optimizer.weight_decay == pytest.approx(0.2 * (12 / layers) ** 2)
    assert config.training.tokens == 10 * (12 * layers * model.width**2 + 32_768 * model.width)
    assert config.training.tokens % config.training.batch_tokens == 0
    assert [model.window(layer) for layer in range(4)] == [1024, 1024, 1024, None]
    assert model.window(layers - 1) is None


def test_fbt_warms_up_for_200_steps_and_sees_all_in_every_sixth_block():
    config = loaded(RUNS["fbt_1b"])
    assert config.learning_rate.warmup_tokens == 200 * config.training.batch_tokens
    full = [layer + 1 for layer in range(24) if config.model.window(layer) is None]
    assert full == [6, 12, 18, 24]
    assert config.stages == loaded(FOLDER / "schedules/fbt_late_ramp.yaml").stages


def test_rlt_warms_up_for_a_tenth_and_ends_at_5e_6():
    config = loaded(RUNS["rlt_4_4"])
    assert config.learning_rate.warmup_tokens == 200 * config.training.batch_tokens
    assert config.learning_rate.peak * config.learning_rate.final_fraction == pytest.approx(5e-6)
    assert config.training.batch_tokens == 512 * config.data.sequence_length == 16 * config.training.micro_batch_tokens


@pytest.mark.parametrize(
    ("name", "baseline"),
    [
        ("crt_d5_c1120", "transformer_n12_c768"),
        ("crt_d1_c2048", "variants/transformer_n6_c1088"),
        ("lrt_d20", "variants/transformer_d20"),
        ("rlt_4_4", "transformer_t8"),
        ("crt_1b", "transformer_1b"),
        ("lrt_1b", "transformer_1b"),
        ("rlt_1b", "transformer_1b"),
        *((name, f"{path.parent.relative_to(FOLDER)}/transformer") for name, path in RUNS.items() if path in MEMBERS),
    ],
)
def test_a_baseline_has_the_recipe_of_what_it_is_compared_with(name, baseline):
    first, second = loaded(RUNS[name]), loaded(RUNS[baseline])
    sections = {key.partition(".")[0] for key, *_ in config_files.differences(first, second)}
    assert sections <= {"run", "model", "solver", "schedules"}
    assert replace(first.run, name="") == replace(second.run, name="")
    shared = models.ArchitectureConfig.__dataclass_fields__.keys() - {"architecture", "width", "ffn_width"}
    assert {key: getattr(first.model, key) for key in shared} == {key: getattr(second.model, key) for key in shared}


# Families


@pytest.mark.parametrize("name", ["transformer", "crt", "lrt", "rlt"])
def test_a_billion(name):
    model = loaded(RUNS[f"{name}_1b"]).model
    assert total(model) == pytest.approx(1e9, rel=0.005)  # so any two are within 1 %
    assert (model.width, model.vocab_size) == (2048, 32_768)


@pytest.mark.parametrize("scale", sorted({path.parent.name for path in MEMBERS}))
def test_matched_parameters(scale):
    """As many parameters, with the embedding and without, so that none hides in the other."""
    names = ("transformer", "crt_parameters", "lrt_parameters", "rlt", "fbt_parameters")
    found = [loaded(RUNS[f"families/{scale}/{name}"]).model for name in names]
    for measure in (total, without_embedding):
        counts = [measure(model) for model in found]
        assert max(counts) <= 1.01 * min(counts)


@pytest.mark.parametrize("scale", sorted({path.parent.name for path in MEMBERS}))
def test_matched_compute(scale):
    names = ("transformer", "crt_compute", "lrt_compute", "rlt", "fbt_compute")
    flops = [training_flops(loaded(RUNS[f"families/{scale}/{name}"])) for name in names]
    assert max(flops) <= 1.02 * min(flops)


@pytest.mark.parametrize("path", [path for path in MEMBERS if path.stem != "transformer"], ids=str)
def test_how_the_width_was_found(path):
    """Both measures are linear in ffn_width: two points give the line, and it the multiple of 8 closest to the goal."""
    config, goal = loaded(path), loaded(path.with_name("transformer.yaml"))

    def measure(config):
        return training_flops(config) if path.stem.endswith("_compute") else total(config.model)

    low, high = (measure(replace(config, model=replace(config.model, ffn_width=width))) for width in (8, 808))
    steps = (measure(goal) - low) / ((high - low) / 100)
    assert config.model.ffn_width == 8 + 8 * round(steps)


# Schedules


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_schedules_go_on_top_of_what_they_are_for(path):
    config = loaded(path)
    assert schedule(config, 1000).values(0)
    assert config.run.name == files(path)[0].stem


PAPER = {1: 0.75, 2: 0.22, 3: 0.03}


@pytest.mark.parametrize(
    ("path", "shares"),
    [("fbt_late_ramp", PAPER), ("fbt_mixture", PAPER), ("fbt_two_passes", {1: 0.75, 2: 0.25})],
)
def test_shares_of_the_passes(path, shares):
    """A share p drawn n times lies within five of its standard deviations, sqrt(p (1 - p) / n).

    Where feedback comes late, one pass is no draw, and the shares of the others vary less than that.
    """
    steps = 20_000
    drawn = schedule(loaded(FOLDER / f"schedules/{path}.yaml"), steps)
    found = Counter(drawn.values(step)["passes"] for step in range(steps))
    assert found.keys() == shares.keys()
    for passes, share in shares.items():
        assert abs(found[passes] / steps - share) <= 5 * math.sqrt(share * (1 - share) / steps)


def test_the_paper_trains_256_billion_tokens_of_passes_on_200_billion():
    assert sum(passes * share for passes, share in PAPER.items()) == pytest.approx(256 / 200)


@pytest.mark.parametrize(
    ("path", "setting", "stages"),
    [
        ("fbt_late_ramp", "passes", [(0.75, {1}, {2, 3})]),
        ("crt_staged_passes", "passes", [(0.75, {1}, {2}), (0.925, {2}, {2, 3, 4, 5})]),
        ("rlt_anneal", "interval", [(0.6, {64}, {16}), (0.8, {16}, {4}), (0.9, {4}, {1})]),
    ],
)
@pytest.mark.parametrize("steps", [200_000, 997])
def test_borders_of_the_stages(path, setting, stages, steps):
    """The first step of a stage is the first whose tokens before it reach its fraction of the run."""
    drawn = schedule(loaded(FOLDER / f"schedules/{path}.yaml"), steps)
    for fraction, before, after in stages:
        border = math.ceil(round(fraction * steps, 6))
        assert {drawn.values(step)[setting] for step in range(border - 60, border)} == before
        assert {drawn.values(step)[setting] for step in range(border, min(steps, border + 60))} == after
    assert drawn.values(steps - 1)[setting] in stages[-1][2]


def test_crt_is_staged_at_the_steps_of_the_author():
    borders = [at * 200_000 for at, _ in loaded(FOLDER / "schedules/crt_staged_passes.yaml").stages["passes"]]
    assert borders == pytest.approx([0, 150_000, 185_000])


def test_random_passes_are_uniform():
    config, steps = loaded(RUNS["crt_d5_c1120"]), 20_000
    drawn = schedule(config, steps)
    found = Counter(drawn.values(step)["passes"] for step in range(steps))
    assert found.keys() == {2, 3, 4, 5}
    assert all(abs(count / steps - 0.25) <= 5 * math.sqrt(0.25 * 0.75 / steps) for count in found.values())
    assert drawn.evaluation_values(0) == {"passes": 5}


# Small runs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    support.prepare_data(folder)
    return folder / "data"


def small_overrides(root, data, batch=32):
    """Return what makes a test of a small run: 4 steps, so that late feedback comes too."""
    return [
        f"run.root={root}",
        f"data.path={data}",
        "data.sequence_length=16",
        "learning_rate.warmup_tokens=0",
        f"training.tokens={4 * batch}",
        f"training.batch_tokens={batch}",
        f"training.micro_batch_tokens={batch}",
        "training.accelerator=cpu",
        "training.threads=1",
        "validation.every_steps=0",
        "logging.every_steps=1",
        "logging.wandb.mode=disabled",
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_small_runs(name, data, tmp_path):
    config = config_files.load(Config, [*files(RUNS[name]), SMALL], small_overrides(tmp_path, data))
    assert config.model.width == 64
    outcome = train(config)
    found = support.losses(outcome.folder)
    assert len(found) == outcome.step == 4
    assert all(math.isfinite(float(loss)) for loss in found.values())


def test_the_command_of_the_small_run(data, tmp_path):
    done = support.backfeed(
        "train", FOLDER / "fbt_1b.yaml", SMALL, *small_overrides(tmp_path, data), "validation.every_steps=4"
    )
    assert done.returncode == 0, done.stderr
    assert len(support.losses(tmp_path / "fbt_1b")) == 4
