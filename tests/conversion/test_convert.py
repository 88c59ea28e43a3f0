"""A transformer of our own becomes an architecture that feeds back: first the same logits, then gradients that live."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from pipeline import cli, config_files
from pipeline.config import Config
from pipeline.config_files.reader import plain
from pipeline.conversion import folder
from pipeline.conversion.convert import convert
from pipeline.errors import RunError
from pipeline.models import ARCHITECTURES, CRT, LRT, Transformer
from pipeline.runs.checkpoints import CheckpointStore
from tests.conversion.support import TARGETS, converted, load, plain_logits, write_checkpoint
from tests.models.cases import assert_close, make_solver, make_starts, make_tokens, solver_config, solver_configs
from tests.support import environment, one_line

VARIANTS = Transformer.variants()
SMALL = replace(VARIANTS["plain"], width=8, layers=1)


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "run", SMALL)[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("to", TARGETS)
def test_the_plain_pass_is_the_source_to_the_last_bit(tmp_path, to, variant):
    config = VARIANTS[variant]
    path, model = write_checkpoint(tmp_path, config)
    made = converted(path, tmp_path / "made", to)
    tokens, starts = make_tokens(config), make_starts(0)
    for where in (None, starts):
        assert torch.equal(plain_logits(made, tokens, where), plain_logits(model, tokens, where))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("to", "cls"), [("crt", CRT), ("lrt", LRT)])
def test_under_every_solver_the_source(tmp_path, to, cls, variant):
    """Fed or not: the correction is zero, and the state has weight zero. In float64, for the sums have other orders."""
    config = VARIANTS[variant]
    path, model = write_checkpoint(tmp_path, config)
    made, model = converted(path, tmp_path / "made", to).double(), model.double()
    tokens, starts = make_tokens(config), make_starts(0)
    for where in (None, starts):
        expected = plain_logits(model, tokens, where)
        for settings in solver_configs(cls):
            with torch.no_grad():
                solution = make_solver(settings).run(made, tokens, where)
                for states, _ in solution.loss_terms:
                    assert_close(made.readout(states), expected, f"logits under {settings}")


def test_fbt_begins_each_document_plain(tmp_path):
    path, model = write_checkpoint(tmp_path, VARIANTS["plain"])
    made = converted(path, tmp_path / "made", "fbt")
    tokens = make_tokens(VARIANTS["plain"])
    expected = plain_logits(model, tokens)
    with torch.no_grad():
        fed = made.readout(make_solver(solver_config("unrolled", passes=2)).run(made, tokens).states)
    assert_close(fed[:, 0], expected[:, 0])
    assert not torch.allclose(fed[:, 1:], expected[:, 1:], atol=0.1)


def test_fused_vectors_of_fbt_have_the_size_of_embeddings(tmp_path):
    path, model = write_checkpoint(tmp_path, VARIANTS["plain"])
    made = converted(path, tmp_path / "made", "fbt")
    size = model.embedding.weight.square().mean().sqrt()
    assert torch.allclose(made.fusion.norm.weight, size.expand(16))


ALIVE = {
    "crt": ["correction.down.weight", "correction.down.bias"],
    "lrt": ["recurrent.0.weight", "blocks.0.memory_scale", "blocks.1.memory_scale", "blocks.1.memory_gate.weight"],
    "fbt": ["fusion.gate.weight", "fusion.value.weight", "fusion.norm.weight", "fusion.gate_norm.weight"],
}


@pytest.mark.parametrize("to", TARGETS)
def test_a_step_of_training_wakes_the_feedback(tmp_path, to):
    config = VARIANTS["plain"]
    made = converted(write_checkpoint(tmp_path, config)[0], tmp_path / "made", to).train()
    tokens = make_tokens(config)
    solver = make_solver(solver_config("unrolled", passes=3))
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)

    def loss():
        states = solver.run(made, tokens[:, :-1]).states
        return F.cross_entropy(made.readout(states).flatten(0, 1), tokens[:, 1:].flatten())

    before = {name: value.clone() for name, value in made.state_dict().items()}
    loss().backward()
    parameters = dict(made.named_parameters())
    for name in ALIVE[to]:
        assert parameters[name].grad.abs().max() > 1e-6, name
    optimizer.step()
    for name in ALIVE[to]:
        assert not torch.equal(parameters[name], before[name]), name
    optimizer.zero_grad()
    loss().backward()  # and now all that feedback uses takes part
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    with torch.no_grad():
        made.eval()
        fed = made.readout(solver.run(made, tokens).states)
        assert not torch.equal(fed, plain_logits(made, tokens))


@pytest.mark.parametrize("to", TARGETS)
def test_settings_carry_over(tmp_path, to):
    for name, config in VARIANTS.items():
        path, _ = write_checkpoint(tmp_path / name, config)
        made = converted(path, tmp_path / name / "made", to).config
        for key, value in plain(config).items():
            if key not in ("architecture", "kv_heads", "head_dim", "ffn_width"):
                assert getattr(made, key) == value, key
        assert (made.head_width, made.hidden_width) == (config.head_width, config.hidden_width)


def test_settings_of_the_target_may_be_given(source, tmp_path):
    made = converted(source, tmp_path / "a", "crt", "model.correction_width=24", "model.dropout=0.1")
    assert made.correction.up.out_features == 24
    assert made.config.dropout == 0.1
    made = converted(source, tmp_path / "b", "lrt", "model.source_layer=-1", "model.recurrent_projection=layerwise")
    assert made.source_norm is None
    assert converted(source, tmp_path / "c", "fbt", "model.jitter=0.5").jitter == 0.5


def test_the_seed_decides_what_is_new(source, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        convert(source, tmp_path / name, "crt", seed=seed)
    first, same, other = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(first[name], same[name]) for name in first)
    different = {name for name in first if not torch.equal(first[name], other[name])}
    assert different == {"correction.up.weight"}


def test_what_the_folder_holds(source, tmp_path):
    made = convert(source, tmp_path / "deep/er/made", "lrt")
    assert {path.name for path in made.folder.iterdir()} == {
        "model.safetensors",
        "tokenizer.json",
        "model.yaml",
        "conversion.json",
    }
    assert (made.folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert made.folder.joinpath("model.safetensors").stat().st_mode & 0o044 == 0o044 & ~umask()
    model, old = load(made.folder), load_file(source / "model.safetensors")
    assert made.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert made.drawn == sum(parameter.numel() for name, parameter in model.named_parameters() if name not in old)
    found = json.loads((made.folder / "conversion.json").read_text())
    assert found["source"]["step"] == 3
    assert found["source"]["path"] == str(source)
    assert set(found["source"]["files"]) == {"config.yaml", "model.safetensors", "tokenizer.json"}
    assert {"backfeed", "torch", "safetensors", "python"} <= set(found["versions"])
    assert list((tmp_path / "deep/er").iterdir()) == [made.folder]


def umask():
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_layer_of_a_configuration(source, tmp_path, monkeypatch):
    """``model.yaml`` is read as any file of settings, whatever the folder is called."""
    monkeypatch.chdir(tmp_path)
    made = convert(source, Path("a ${odd}: 'name'\n#"), "crt")
    recipe = [
        "run.name=x",
        "data.path=x",
        "solver.name=unrolled",
        "solver.passes=2",
        "optimizer.name=adamw",
        "learning_rate.name=constant",
        "learning_rate.peak=1",
        "training.tokens=2048",
        "training.batch_tokens=1024",
        "training.micro_batch_tokens=1024",
    ]
    config = config_files.load(Config, [made.folder / "model.yaml"], recipe)
    assert config.run.initial_weights == str(made.folder)
    assert config.model == made.config


# ---------------------------------------------------------------- refusals: one line, code 2, nothing written


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return a function that runs ``convert`` in vain and returns its one line."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)

    def run(*arguments):
        before = sorted(place.rglob("*"))
        assert cli.main(["convert", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert sorted(place.rglob("*")) == before
        return line

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "transformer"], "holds a transformer already"),
        (["--to", "rlt"], "--to rlt: a plain transformer has no weights for what an rlt splits off"),
        (["--to", "gru"], "unknown architecture 'gru'"),
        (["--to", "crt", "--seed", "-1"], "--seed is -1"),
        (["--to", "crt", "--step", "4"], "is the checkpoint of step 3, not 4"),
        (["--to", "crt", "model.width=16"], "model.width=16 (command line) does not fit the weights, in which it is 8"),
        (["--to", "crt", "model.layers=2"], "model.layers=2 (command line) does not fit"),
        (["--to", "crt", "model.vocab_size=30"], "model.vocab_size=30 (command line) does not fit"),
        (["--to", "crt", "model.heads=4"], "model.heads=4 (command line) does not fit"),
        (["--to", "crt", "model.linear_bias=true"], "model.linear_bias=True (command line) does not fit"),
        (["--to", "fbt", "model.depth_scaled_residuals=true"], "would change what the weights compute"),
        (["--to", "lrt", "model.rope_base=500"], "model.rope_base=500.0 (command line) would change"),
        (["--to", "lrt", "model.attention_window=5"], "model.attention_window=5 (command line) would change"),
        (["--to", "lrt", "model.source_layer=7"], "model.source_layer (command line) is 7"),
        (["--to", "lrt", "model.correction_width=7"], "it belongs to crt"),
        (["--to", "lrt", "model.source_layer=x"], "model.source_layer (command line) is the text 'x'"),
        (["--to", "lrt", "model.architecture=crt"], "the architecture is what --to says"),
        (["--to", "lrt", "run.name=x"], "'run.name=x' is not a setting of the model"),
        (["--to", "lrt", "x.yaml"], "'x.yaml' is not a setting of the model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(refused, source, arguments, message):
    assert message in refused(source, "made", *arguments)


def test_what_is_no_source(refused, tmp_path):
    (tmp_path / "file").touch()
    assert "is not a folder" in refused(tmp_path / "file", "made", "--to", "crt")
    assert "is not a folder" in refused(tmp_path / "absent", "made", "--to", "crt")
    assert "is neither a run folder" in refused(tmp_path / "place", "made", "--to", "crt")


def test_an_output_that_exists(refused, source, tmp_path):
    for name in ("empty", "full"):
        (tmp_path / "place" / name).mkdir()
    (tmp_path / "place/full/x").touch()
    (tmp_path / "place/file").touch()
    (tmp_path / "place/link").symlink_to("nowhere")
    for name in ("empty", "full", "file", "link", "."):
        assert "exists already" in refused(source, name, "--to", "crt")


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "transformer"])
def test_what_feeds_back_already(refused, tmp_path, name):
    path, _ = write_checkpoint(tmp_path / "run", ARCHITECTURES[name].variants()["plain"])
    for to in ("crt", "transformer"):
        line = refused(path, "made", "--to", to)
        assert f"holds a model of architecture {name}, which feeds back already" in line


def test_a_conversion_is_no_source(refused, source, tmp_path):
    convert(source, tmp_path / "made", "crt")
    assert "was made by a conversion itself" in refused(tmp_path / "made", "again", "--to", "lrt")


def test_damage(refused, source, tmp_path):
    os.truncate(source / "model.safetensors", 100)
    assert "has 100 bytes" in refused(source, "made", "--to", "crt")
    save_file({"x": torch.zeros(1)}, source / "model.safetensors")
    store = CheckpointStore(tmp_path / "other")
    with store.writing(1, solver={}, tokenizer={"sha256": "", "document_token": ""}) as aside:
        for name in ("config.yaml", "tokenizer.json", "model.safetensors"):
            shutil.copy(source / name, aside)
    assert "do not fit each other" in refused(store.at(1).path, "made", "--to", "crt")


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt(), RunError("x")])
@pytest.mark.parametrize("where", ["save_weights", "fsync_file", "write_atomically"])
def test_a_conversion_that_fails_leaves_nothing(source, tmp_path, monkeypatch, fault, where):
    def fail(*arguments):
        raise fault

    monkeypatch.setattr(folder, where, fail)
    (tmp_path / "place").mkdir()
    with pytest.raises(type(fault)):
        convert(source, tmp_path / "place/deep/made", "crt")
    assert list((tmp_path / "place").iterdir()) == []


def test_a_full_disk_gets_one_line(source, tmp_path, capsys):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))"
    code += "; import signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    code += "; from pipeline import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "deep/made"), "--to", "crt"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert "model.safetensors" in one_line(done)
    assert not (tmp_path / "deep").exists()


def test_the_source_must_hold_a_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    with pytest.raises(RunError, match="has no checkpoint yet"):
        convert(tmp_path / "run", tmp_path / "made", "crt")
