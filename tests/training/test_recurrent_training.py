"""Whole runs of every architecture that feeds back, each with the solver and the schedule of its paper."""

import itertools
import json
import math
import subprocess
import sys
import warnings

import pytest
import torch

from pipeline import cli, config_files, models, solvers
from pipeline.config import Config
from pipeline.errors import RunError
from pipeline.evaluation.loss import token_losses
from pipeline.runs.checkpoints import MODEL, OPTIMIZER, CheckpointStore
from pipeline.runs.folder import RunFolder
from pipeline.runs.loading import load
from pipeline.runs.tensors import TensorReader
from pipeline.solvers import SOLVERS
from pipeline.solvers.schedules import Mixture
from pipeline.training import module
from pipeline.training.drawing import draw_weights
from pipeline.training.module import PretrainingModule
from pipeline.training.train import train
from tests.support import assert_close, environment, forget_after, losses, rows, run_config

CRT = ("solver.name=unrolled", "solver.convergence_weight=0.1")
CRT_PASSES = "schedules.passes=[{at: 0, draw: [2, 3, 4, 5]}]"
LRT = ("solver.name=interleaved", "solver.subsets=2")
LRT_MEAN = ("solver.name=unrolled", "solver.loss=mean", "solver.passes=3")
FBT = ("solver.name=unrolled", "solver.loss=plain_and_fed")
FBT_PASSES = "schedules.passes=[{at: 0, draw: [1, 2, 3], weights: [2, 1, 1]}]"
INTERVALS = "schedules.interval=[{at: 0, value: 8}, {at: 0.4, value: 3}, {at: 0.7, value: 1}]"

RECIPES = {
    "crt_drawn": ("crt", *CRT, CRT_PASSES),
    "crt_exact": ("crt", "solver.name=chunked", "solver.interval=1"),
    "lrt_interleaved": ("lrt", *LRT),
    "lrt_refreshed": ("lrt", *LRT, "solver.refresh_keys_values=true"),
    "lrt_mean": ("lrt", *LRT_MEAN),
    "fbt_mixture": ("fbt", *FBT, FBT_PASSES, "solver.prefix=1.0"),
    "rlt_annealed": ("rlt", INTERVALS),
    "rlt_unrolled": ("rlt", "solver.name=unrolled", "solver.passes=3"),
}
# What a run may meet beside its recipe, and what more when it goes on.
CIRCUMSTANCES = {
    "plain": ((), ()),
    "dropout": (("model.dropout=0.1",), ()),
    "accumulated": (
        ("model.dropout=0.1", "training.micro_batch_tokens=64"),
        ("solver.activation_checkpointing=true",),
    ),
}
LIVELY = "model.hidden_std_factor=1.5"  # passes that do not settle at once
SHORT = "training.tokens=1024"  # 8 steps
SEED = 0  # of a run, from which passes are drawn


def config_of(tmp_path, data, architecture, *settings, name="small"):
    return run_config(tmp_path / "runs", data, *settings, architecture=architecture, name=name)


def trained_folder(tmp_path, data, architecture, *settings, name="small"):
    return train(config_of(tmp_path, data, architecture, *settings, name=name)).folder


def drawn(passes, weights, steps, seed=SEED):
    """Return what is drawn for each step from 1 on."""
    mixture = Mixture(tuple(passes), tuple(map(float, weights)))
    return {step: mixture.draw(seed, "passes", step - 1) for step in range(1, steps + 1)}


CRT_DRAWN = drawn([2, 3, 4, 5], [1, 1, 1, 1], 12)
FBT_DRAWN = drawn([1, 2, 3], [2, 1, 1], 12)


def pass_solver(name, **settings):
    return solvers.build(SOLVERS[name].Config(name=name, **settings))


def pass_states(model, batch, name, **settings):
    """Return the states of the last pass under a solver of its own."""
    return pass_solver(name, **settings).run(model, batch["tokens"][:, :-1], batch["starts"]).states


def passes_of(folder):
    return {int(row["step"]): int(row["solver/passes"]) for row in rows(folder)}


def recorded(folder):
    """Return all that a run's rows say of learning, as text, and the hashes of its last weights."""
    kept = [{key: row[key] for key in row if not key.startswith("throughput/")} for row in rows(folder)]
    last = CheckpointStore(folder / "checkpoints").list()[-1]
    weights = {name: each["sha256"] for name, each in last.describe()["files"].items() if name.startswith(MODEL)}
    return kept, rows(folder, "validation"), last.step, weights


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_resumed_run_repeats_every_step(tmp_path, data, recipe, circumstances):
    architecture, *settings = RECIPES[recipe]
    before, after = CIRCUMSTANCES[circumstances]
    settings += [SHORT, *before]
    folder = trained_folder(tmp_path, data, architecture, *settings)
    whole = recorded(folder)
    assert list(losses(folder)) == list(range(1, 9))
    forget_after(folder, 4)  # as if the process had died before the next checkpoint
    torch.manual_seed(1)  # another process would not go on with this one's random state
    assert train(config_of(tmp_path, data, architecture, *settings, *after), "must").step == 8
    assert recorded(folder) == whole


def test_what_is_drawn_hangs_on_the_seed(tmp_path, data):
    """Dropout, jitter and prefixes change a run's losses, and hang on its seed alone."""
    found = {}
    for name, settings in {
        "calm": ["model.jitter=0"],
        "jittered": ["model.jitter=0.1"],
        "prefixed": ["model.jitter=0", "solver.prefix=1.0"],
        "dropped": ["model.jitter=0", "model.dropout=0.1"],
        "again": ["model.jitter=0.1"],
    }.items():
        short = ("solver.passes=2", "training.tokens=256")
        found[name] = losses(trained_folder(tmp_path, data, "fbt", *FBT, *short, *settings, name=name))[1]
    assert found.pop("again") == found["jittered"]
    assert len(set(found.values())) == len(found)


def test_every_micro_batch_draws_from_a_seed_of_its_own(tmp_path, data, monkeypatch):
    plain, found = module.ObjectiveModule.forward, []

    def forward(self, *arguments):
        found.append(torch.initial_seed())
        return plain(self, *arguments)

    monkeypatch.setattr(module.ObjectiveModule, "forward", forward)
    trained_folder(tmp_path, data, "fbt", SHORT, "training.micro_batch_tokens=64")
    assert found == [module.draw_seed(SEED, step, part, 0) for step in range(8) for part in range(2)]
    others = [module.draw_seed(*each) for each in itertools.product(range(3), range(12), range(3), range(3))]
    assert len(set(others)) == len(others)
    assert all(0 <= each < 2**63 for each in others)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("crt", (*CRT, CRT_PASSES)), ("lrt", LRT), ("lrt", LRT_MEAN), ("fbt", (*FBT, FBT_PASSES, "model.jitter=0"))],
    ids=["crt_drawn", "lrt_interleaved", "lrt_mean", "fbt_mixture"],
)
def test_accumulation_changes_nothing_but_rounding(tmp_path, data, architecture, settings):
    """The objective is a mean over micro-batches like the loss."""
    settings = (architecture, *settings, SHORT)
    whole = trained_folder(tmp_path, data, *settings, name="whole")
    parts = trained_folder(tmp_path, data, *settings, "training.micro_batch_tokens=64", name="parts")
    assert_close(losses(parts), losses(whole))
    for found, expected in zip(rows(parts), rows(whole), strict=True):
        assert float(found["train/objective"]) == pytest.approx(float(expected["train/objective"]), rel=1e-5)
    forget_after(parts, 4)
    config = config_of(tmp_path, data, *settings, "training.micro_batch_tokens=32", name="parts")
    assert train(config, "must").step == 8  # and it may change when a run goes on
    assert_close(losses(parts), losses(whole))


# ---------------------------------------------------------------- what is drawn, logged and kept


def test_drawn_passes_are_logged_and_the_largest_kept(tmp_path, data):
    folder = trained_folder(tmp_path, data, "crt", *CRT, CRT_PASSES, LIVELY, "model.embedding_std=1.0")
    assert passes_of(folder) == CRT_DRAWN
    assert set(CRT_DRAWN.values()) == {2, 3, 4, 5}
    for row in rows(folder):
        assert 0 < float(row["solver/residual"]) < 10
        assert float(row["train/objective"]) > float(row["train/loss"])  # the convergence loss is on top
    assert {row["solver/passes"] for row in rows(folder, "validation")} == {"5"}
    assert CRT_DRAWN[8] != 5  # or the checkpoint's would be the step's by chance
    for checkpoint in CheckpointStore(folder / "checkpoints").list():
        assert checkpoint.describe()["solver"] == {"passes": 5, "prefix": 0.0}
    assert load(folder, step=8).solver.settings() == {"passes": 5, "prefix": 0.0}


def test_another_seed_draws_other_passes(tmp_path, data):
    folder = trained_folder(tmp_path, data, "fbt", *FBT, FBT_PASSES, SHORT, "run.seed=1")
    assert passes_of(folder) == drawn([1, 2, 3], [2, 1, 1], 8, seed=1)
    assert list(passes_of(folder).values()) != list(FBT_DRAWN.values())[:8]


def test_plain_steps_among_fed_ones(tmp_path, data):
    folder = trained_folder(tmp_path, data, "fbt", *FBT, FBT_PASSES, "solver.prefix=0.5")
    assert passes_of(folder) == FBT_DRAWN
    assert set(FBT_DRAWN.values()) == {1, 2, 3}
    for row in rows(folder):
        fed = FBT_DRAWN[int(row["step"])] > 1
        assert (row["train/objective"] != row["train/loss"]) == fed
        assert math.isnan(float(row["solver/residual"])) != fed
        assert float(row["solver/prefix"]) == 0.5
    assert load(folder).solver.settings() == {"passes": 3, "prefix": 0.0}  # prefixes belong to training


def test_feedback_that_comes_late(tmp_path, data):
    """Evaluation follows the stage: one pass before feedback begins, then as many as the draw has."""
    schedule = "schedules.passes=[{at: 0, value: 1}, {at: 0.5, draw: [2, 3], weights: [3, 1]}]"
    kept = ("checkpoint.keep_last=3", "validation.every_steps=4")
    folder = trained_folder(tmp_path, data, "fbt", *FBT, schedule, *kept)
    later = drawn([2, 3], [3, 1], 12)
    assert passes_of(folder) == {**dict.fromkeys(range(1, 7), 1), **{step: later[step] for step in range(7, 13)}}
    assert [row["solver/passes"] for row in rows(folder, "validation")] == ["1", "3", "3"]
    found = {step: load(folder, step=step).solver.settings()["passes"] for step in (4, 8, 12)}
    assert found == {4: 1, 8: 3, 12: 3}


def test_throughput_counts_the_passes_of_every_step(tmp_path, data):
    """Not those of the step that is logged alone."""
    folder = trained_folder(tmp_path, data, "fbt", *FBT, FBT_PASSES, "logging.every_steps=4")
    trained = load(folder)
    flops = {
        passes: 3 * pass_solver("unrolled", passes=passes, loss="plain_and_fed").flops_per_token(trained.model, 32)
        for passes in (1, 2, 3)
    }
    assert [int(row["step"]) for row in rows(folder)] == [4, 8, 12]
    for row in rows(folder):
        steps = range(int(row["step"]) - 3, int(row["step"]) + 1)
        expected = sum(flops[FBT_DRAWN[step]] for step in steps) / 4
        found = float(row["throughput/model_flops_per_second"]) / float(row["throughput/tokens_per_second"])
        assert found == pytest.approx(expected)


def test_solvers_of_one_order_train_their_loss(tmp_path, data):
    """Chunks have one loss and no residual; subsets have both of the plain and the refined states."""
    chunked = rows(trained_folder(tmp_path, data, "rlt", INTERVALS, SHORT))
    assert all(row["train/objective"] == row["train/loss"] for row in chunked)
    assert "solver/residual" not in chunked[0]
    folder = trained_folder(tmp_path, data, "lrt", *LRT, SHORT, name="lrt")
    for row in rows(folder):
        assert row["solver/subsets"] == "2"
        assert row["train/objective"] != row["train/loss"]
        assert 0 < float(row["solver/residual"]) < 10
    assert load(folder).solver.settings() == {"subsets": 2}


def convergence(model, batch, states):
    """Return the mean square by which the corrected embeddings of the last two passes of CRT differ."""
    tokens, starts = batch["tokens"][:, :-1], batch["starts"]
    embedding = model.embedding(tokens)
    begins = torch.arange(tokens.shape[1]) == (torch.zeros_like(tokens) if starts is None else starts)
    entered = []
    for each in states[-2:]:
        before = torch.cat([torch.zeros_like(each[:, :1]), each[:, :-1]], dim=1).masked_fill(begins[..., None], 0.0)
        entered.append(embedding + model.correction(before + embedding))
    return float((entered[1] - entered[0]).square().mean())


@torch.no_grad()
def expected_of(model, batch, recipe, passes):
    """Return loss, objective and residual of a batch, each pass computed by itself."""
    if recipe == "lrt_interleaved":
        states = [pass_states(model, batch, "parallel"), pass_states(model, batch, "interleaved", subsets=2)]
    else:
        states = [pass_states(model, batch, "unrolled", passes=count + 1) for count in range(passes)]
    each = [float(token_losses(model, found, batch["tokens"][:, 1:]).mean()) for found in states]
    fed = [model.fed_back(found) for found in states]
    residual = float((fed[-1] - fed[-2]).norm() / fed[-1].norm()) if len(fed) > 1 else math.nan
    objective = {
        "crt_drawn": lambda: each[-1] + 0.1 * convergence(model, batch, states),
        "lrt_interleaved": lambda: (each[0] + 2 * each[1]) / 3,
        "lrt_mean": lambda: sum(each) / len(each),
        "fbt_mixture": lambda: each[0] + (sum(each[1:]) / len(each[1:]) if each[1:] else 0.0),
    }[recipe]()
    return each[-1], objective, residual


@pytest.mark.parametrize("recipe", ["crt_drawn", "lrt_interleaved", "lrt_mean", "fbt_mixture"])
def test_steps_train_the_papers_objective(tmp_path, data, monkeypatch, recipe):
    """At every step of a run, from its weights and its batch: what is logged is what the equations say."""
    architecture, *settings = RECIPES[recipe]
    calm = ("model.jitter=0", "solver.prefix=0") if architecture == "fbt" else ()
    plain_step, expected = PretrainingModule.training_step, []

    def training_step(self, batch, batch_idx):
        passes = self.solver.settings().get("passes", 0)
        expected.append(expected_of(self.model, batch, recipe, passes))
        return plain_step(self, batch, batch_idx)

    monkeypatch.setattr(PretrainingModule, "training_step", training_step)
    found = rows(trained_folder(tmp_path, data, architecture, *settings, *calm, SHORT, LIVELY))
    assert len(found) == len(expected) == 8
    for row, (loss, objective, residual) in zip(found, expected, strict=True):
        assert float(row["train/loss"]) == pytest.approx(loss, rel=1e-5)
        assert float(row["train/objective"]) == pytest.approx(objective, rel=1e-5)
        assert float(row["solver/residual"]) == pytest.approx(residual, rel=1e-3, nan_ok=True)  # a difference


# ---------------------------------------------------------------- what sleeps


def dormant_names(model):
    dormant = {id(parameter) for parameter in model.dormant_parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in dormant}


def initial_weights(trained):
    """Return the weights that a run started from."""
    model = models.build(trained.config.model)
    draw_weights(model, trained.config.run.seed)
    return model.state_dict()


def optimizer_state(trained):
    """Return the optimiser's state by the names of the parameters."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for full, value in TensorReader(trained.checkpoint.path, OPTIMIZER).items():
        name, _, key = full.rpartition("/")
        found.setdefault(name, {})[key] = value
    return found


def moved(trained):
    """Return the names of the parameters that are no longer what was drawn."""
    before = initial_weights(trained)
    return {name for name, weight in trained.model.named_parameters() if not torch.equal(weight, before[name])}


ADAMW = ("optimizer.weight_decay=1",)
MUON = ("optimizer.name=muon", "optimizer.weight_decay=1", "optimizer.vector_peak=0.01")


@pytest.mark.parametrize("micro_batch", [128, 64])
@pytest.mark.parametrize(
    ("architecture", "optimizer"),
    [("fbt", ADAMW), ("crt", ADAMW), ("lrt", ADAMW), ("rlt", ADAMW), ("fbt", MUON)],
    ids=["fbt", "crt", "lrt", "rlt", "fbt_muon"],
)
def test_what_sleeps_is_left_alone_until_it_wakes(tmp_path, data, architecture, optimizer, micro_batch):
    """No decay, no moments, no steps while one pass is trained; all that from the first fed step on."""
    schedule = "schedules.passes=[{at: 0, value: 1}, {at: 0.6, value: 2}]"  # from step 9 on
    settings = (*optimizer, f"training.micro_batch_tokens={micro_batch}", "checkpoint.keep_last=3")
    folder = trained_folder(tmp_path, data, architecture, "solver.name=unrolled", schedule, *settings)
    asleep = load(folder, step=8)
    dormant = dormant_names(asleep.model)
    everything = set(dict(asleep.model.named_parameters()))
    assert dormant
    assert moved(asleep) == everything - dormant
    assert optimizer_state(asleep).keys() == everything - dormant
    awake = load(folder)
    assert moved(awake) == everything
    state = optimizer_state(awake)
    assert state.keys() == everything
    counts = {name: int(each["step"]) for name, each in state.items() if "step" in each}
    assert counts == {name: 4 if name in dormant else 12 for name in counts}
    assert counts.keys() & dormant


def test_fusion_that_is_never_fed_stays_as_drawn(tmp_path, data):
    """One pass throughout: an FBT under solver unrolled that learns like the plain transformer inside it."""
    folder = trained_folder(tmp_path, data, "fbt", "solver.name=unrolled", "solver.passes=1", *ADAMW)
    trained = load(folder)
    before = initial_weights(trained)
    fusion = {name: weight for name, weight in trained.model.state_dict().items() if name.startswith("fusion.")}
    assert len(fusion) == 4
    for name, weight in fusion.items():
        assert torch.equal(weight, before[name])
    assert not any(name.startswith("fusion.") for name in optimizer_state(trained))
    plain = trained_folder(tmp_path, data, "fbt", "solver.name=parallel", *ADAMW, name="plain")
    assert losses(plain) == losses(folder)


def test_moments_count_the_fed_steps_of_a_mixture(tmp_path, data):
    trained = load(trained_folder(tmp_path, data, "fbt", *FBT, FBT_PASSES))
    fed = sum(passes > 1 for passes in FBT_DRAWN.values())
    assert 0 < fed < 12
    for name, state in optimizer_state(trained).items():
        assert int(state["step"]) == (fed if name.startswith("fusion.") else 12)


# ---------------------------------------------------------------- other schedules are other runs


@pytest.mark.parametrize(
    "other",
    [
        "schedules.passes=[{at: 0, draw: [1, 2, 3], weights: [2, 1, 2]}]",
        "schedules.passes=[{at: 0, draw: [1, 2, 4], weights: [2, 1, 1]}]",
        "schedules.passes=[{at: 0, value: 2}]",
        "schedules.passes=[]",
    ],
)
def test_another_schedule_is_refused_on_resume(tmp_path, data, capsys, monkeypatch, other):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # the command sets its own
    config = config_of(tmp_path, data, "fbt", *FBT, FBT_PASSES, SHORT)
    folder = train(config).folder
    before = recorded(folder)
    forget_after(folder, 4)
    changed = tmp_path / "changed.yaml"
    config_files.save(config_of(tmp_path, data, "fbt", *FBT, other, SHORT), changed)
    capsys.readouterr()
    assert cli.main(["train", str(changed), "--resume", "auto"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"backfeed: {folder} belongs to another configuration: schedules.passes")
    assert train(config, "must").step == 8
    assert recorded(folder) == before


def test_a_schedule_that_was_edited_in_the_run_folder_is_refused_by_its_draws(tmp_path, data, capsys, monkeypatch):
    """What the checkpoint's last step ran with is in the checkpoint, whatever the run's config.yaml says now."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    config = config_of(tmp_path, data, "fbt", *FBT, FBT_PASSES, SHORT)
    folder = train(config).folder
    before = recorded(folder)
    forget_after(folder, 4)
    weights = [1, 1, 8]
    assert drawn([1, 2, 3], weights, 4)[4] != FBT_DRAWN[4]
    schedule = f"schedules.passes=[{{at: 0, draw: [1, 2, 3], weights: {weights}}}]"
    file = RunFolder(folder).config_file
    kept = file.read_bytes()
    changed = config_files.load(Config, [file], [schedule])
    config_files.save(changed, file)
    capsys.readouterr()
    assert cli.main(["train", str(file), "--resume", "auto"]) != 0
    line = [each for each in capsys.readouterr().err.splitlines() if each.startswith("backfeed: ")]
    assert line == [
        "backfeed: the checkpoint's step 4 ran with {'passes': 1, 'prefix': 0.0}, the schedules of this run give it "
        "{'passes': 3, 'prefix': 0.0}; restore schedules and training.tokens"
    ]
    with pytest.raises(RunError, match="restore schedules"):
        train(changed, "must")
    file.write_bytes(kept)
    assert train(config, "must").step == 8
    assert recorded(folder) == before


# ---------------------------------------------------------------- ranks


def on_two_ranks(config, record, *arguments):
    """Train on two ranks, each of which writes down what it does; return that, a list of entries for each rank."""
    line = [sys.executable, "-m", "tests.training.recorder", record, "train", config, "training.devices=2", *arguments]
    done = subprocess.run([str(each) for each in line], capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unused" not in done.stderr.lower()
    files = [record.with_name(f"{record.name}.{rank}") for rank in range(2)]
    found = [[json.loads(entry) for entry in file.read_text().splitlines()] for file in files]
    for first, second in zip(*found, strict=True):
        for key in ("step", "solver", "weights"):
            assert first[key] == second[key]
        assert not set(first["samples"]) & set(second["samples"])
    return found


@pytest.mark.parametrize(
    ("architecture", "settings", "passes", "micro_batch"),
    [
        ("fbt", (*FBT, FBT_PASSES, "model.jitter=0"), FBT_DRAWN, 32),  # accumulated
        ("crt", (*CRT, CRT_PASSES), CRT_DRAWN, 64),
        ("lrt", LRT, None, 64),
    ],
    ids=["fbt_mixture", "crt_drawn", "lrt_interleaved"],
)
def test_two_ranks_give_the_losses_of_one(tmp_path, data, architecture, settings, passes, micro_batch):
    """Where nothing is drawn within a pass. Both ranks draw the same passes and hold the same weights."""
    settings = (*settings, f"training.micro_batch_tokens={micro_batch}")
    config = config_of(tmp_path, data, architecture, *settings, name="one")
    one = train(config).folder
    config_files.save(config, tmp_path / "config.yaml")
    ranks = on_two_ranks(tmp_path / "config.yaml", tmp_path / "record", "run.name=two")
    if passes is not None:
        for entries in ranks:
            assert {entry["step"]: entry["solver"]["passes"] for entry in entries} == passes
    two = tmp_path / "runs/two"
    assert_close(losses(two), losses(one))
    for found, expected in zip(rows(two), rows(one), strict=True):
        for key in ("train/objective", "optimizer/gradient_norm", "solver/residual"):
            assert float(found[key]) == pytest.approx(float(expected[key]), rel=1e-3, nan_ok=True), key
    for found, expected in zip(rows(two, "validation"), rows(one, "validation"), strict=True):
        assert float(found["validation/loss"]) == pytest.approx(float(expected["validation/loss"]), rel=1e-5)


def test_two_ranks_that_draw_repeat_every_step_on_resume(tmp_path, data):
    """With dropout, jitter and prefixes the ranks draw apart, agree on passes and weights, and draw the same again."""
    draws = ("solver.prefix=1.0", "model.dropout=0.1", "training.micro_batch_tokens=32")
    config = config_of(tmp_path, data, "fbt", *FBT, FBT_PASSES, SHORT, *draws)
    config_files.save(config, tmp_path / "config.yaml")
    ranks = on_two_ranks(tmp_path / "config.yaml", tmp_path / "record")
    folder = tmp_path / "runs/small"
    whole = recorded(folder)
    forget_after(folder, 4)
    again = on_two_ranks(tmp_path / "config.yaml", tmp_path / "again", "--resume", "must")
    assert recorded(folder) == whole
    assert again == [entries[4:] for entries in ranks]
