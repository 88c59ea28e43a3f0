"""Runs that start from weights instead of drawing them: end to end, and each misfit in one line."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from pipeline import cli, config_files
from pipeline.config import Config
from pipeline.conversion.convert import convert
from pipeline.conversion.settings import Layer, RunLayer
from pipeline.data.manifest import Manifest
from pipeline.data.prepare import PrepareConfig, TokenizerConfig, prepare
from pipeline.data.sources import SourceConfig
from pipeline.errors import ConfigError, RunError, RunWarning, UserError
from pipeline.runs.checkpoints import CheckpointStore
from pipeline.runs.folder import RunFolder
from pipeline.runs.loading import load as load_trained
from pipeline.training.train import train
from tests.conversion.support import hugging_face_model, save_hugging_face
from tests.support import backfeed, losses, one_line, prepare_data, run_config, write_text

SOLVERS = {"crt": "unrolled", "fbt": "unrolled", "lrt": "interleaved"}


def recipe(place, name, solver, *, tokens=256):
    """Write all settings of a run but its model: steps of 128 tokens."""
    config = run_config(place / "runs", place / "data", name=name, architecture="transformer")
    plain = config_files.reader.plain(config)
    del plain["model"], plain["run"]["initial_weights"]
    plain["solver"] = {"name": solver, **({"passes": 2} if solver == "unrolled" else {})}
    plain["training"]["tokens"] = tokens
    plain["learning_rate"] = {"name": "constant", "peak": 0.01}
    path = place / f"{name}.yaml"
    path.write_text(json.dumps(plain))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Prepared data, a trained transformer, and what a conversion made of it."""
    folder = tmp_path_factory.mktemp("place")
    prepare_data(folder)
    train(run_config(folder / "runs", folder / "data", architecture="transformer"))
    for to in SOLVERS:
        convert(folder / "runs/small", folder / to, to)
    return folder


@pytest.mark.parametrize("to", SOLVERS)
def test_convert_train_evaluate(place, tmp_path, monkeypatch, capsys, to):
    shutil.copytree(place / "runs", tmp_path / "runs")
    shutil.copytree(place / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    file = recipe(tmp_path, "fed", SOLVERS[to])
    assert cli.main(["convert", "runs/small", "made", "--to", to]) == 0
    assert "backfeed train made/model.yaml RECIPE.yaml" in capsys.readouterr().out
    assert cli.main(["train", "made/model.yaml", str(file)]) == 0
    assert "starting from the weights in made" in "".join(capsys.readouterr())
    assert cli.main(["evaluate", "runs/fed", "--tokens", "64"]) == 0
    trained = load_trained(tmp_path / "runs/fed")
    assert trained.checkpoint.step == 2
    assert trained.config.run.initial_weights == "made"
    before, after = load_file(tmp_path / "made/model.safetensors"), trained.model.state_dict()
    assert {name for name, tensor in after.items() if not torch.equal(tensor, before[name])} == set(before)


def test_the_first_loss_is_that_of_the_source(place, tmp_path):
    """To the last bit: the transformer trained on, and the CRT made of it, plain and fed."""
    source = CheckpointStore(place / "runs/small/checkpoints").list()[-1].path
    config = config_files.load(Config, [source / "config.yaml"], []).model
    (place / "same.yaml").write_text(config_files.to_yaml(Layer(RunLayer(str(source)), config)))
    found = set()
    for number, (layer, solver) in enumerate(
        [("same.yaml", "parallel"), ("crt/model.yaml", "parallel"), ("crt/model.yaml", "unrolled")]
    ):
        file = recipe(place, f"first{number}", solver, tokens=128)
        train(config_files.load(Config, [place / layer, file], [f"run.root={tmp_path}"]))
        found.add(losses(tmp_path / f"first{number}")[1])
    assert len(found) == 1


def test_resuming_does_not_look_at_the_weights_again(place, tmp_path):
    shutil.copytree(place / "crt", tmp_path / "made")
    file = recipe(place, "resumed", "unrolled", tokens=1024)
    overrides = [f"run.initial_weights={tmp_path / 'made'}", f"run.root={tmp_path / 'runs'}"]
    config = config_files.load(Config, [place / "crt/model.yaml", file], overrides)
    train(config)
    whole = losses(tmp_path / "runs/resumed")
    folder = RunFolder(tmp_path / "runs/resumed")
    shutil.rmtree(folder.checkpoints.at(8).path)
    shutil.rmtree(tmp_path / "made")
    train(config, "auto")
    assert losses(tmp_path / "runs/resumed") == whole
    other = config_files.load(Config, [place / "crt/model.yaml", file], [overrides[1]])
    with pytest.raises(RunError, match=r"run\.initial_weights was .* and is now"):
        train(other, "auto")


def test_a_run_may_start_from_a_checkpoint_of_its_kind(place, tmp_path):
    found = load_trained(place / "runs/small")
    overrides = [f"run.initial_weights={found.checkpoint.path}", "learning_rate.peak=1e-9", "training.tokens=128"]
    train(
        run_config(
            tmp_path / "runs", place / "data", *overrides, "learning_rate.warmup_tokens=0", architecture="transformer"
        )
    )
    again = load_trained(tmp_path / "runs/small")
    for name, tensor in found.model.state_dict().items():
        assert torch.allclose(again.model.state_dict()[name], tensor, atol=1e-7), name


def test_a_hugging_face_folder_end_to_end(tmp_path, monkeypatch, capsys):
    """Its own tokenizer prepares the data; converted, it trains two steps and is evaluated."""
    monkeypatch.chdir(tmp_path)
    path = save_hugging_face(hugging_face_model("Qwen2"), tmp_path / "folder")
    assert cli.main(["convert", "folder", "made", "--to", "lrt", "model.source_layer=2"]) == 0
    assert "they begin at zero, and are trained from then on" in capsys.readouterr().out
    prepare_with(tmp_path, path / "tokenizer.json")
    assert cli.main(["train", "made/model.yaml", str(recipe(tmp_path, "fed", "interleaved"))]) == 0
    assert cli.main(["evaluate", "runs/fed", "--tokens", "64"]) == 0
    assert load_trained(tmp_path / "runs/fed").model.config.vocab_size == 307


def prepare_with(place, tokenizer) -> Manifest:
    text = write_text(place / "text", 40)
    return prepare(
        PrepareConfig(
            output=str(place / "data"),
            sources=[SourceConfig(path=str(text))],
            holdout={"validation": 0.2},
            tokenizer=TokenizerConfig(kind="file", path=str(tokenizer)),
            workers=1,
        )
    )


# ---------------------------------------------------------------- refusals


@pytest.fixture
def attempt(place, tmp_path, monkeypatch):
    """Return a function that begins a CRT's run with other settings."""

    def run(*overrides, layer=place / "crt/model.yaml", solver="unrolled"):
        file = recipe(place, "attempt", solver)
        config = config_files.load(Config, [layer, file], [f"run.root={tmp_path / 'runs'}", *map(str, overrides)])
        return train(config)

    return run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.initial_weights=absent"], "run.initial_weights is absent, and there is no such folder"),
        (["run.initial_weights=''"], "run.initial_weights is ., which is neither a folder that backfeed convert made"),
        (["model.width=32"], "model.width is 32, but in the weights in"),
        (["model.layers=3"], "model.layers is 3"),
        (["model.correction_width=7"], "model.correction_width is 7, but in the weights in"),
        (["model.vocab_size=300"], "model.vocab_size is 300"),
        (["model.norm=layer", "model.ffn=gelu"], "model.norm is layer, but in the weights in"),
        (["model.tied_head=false"], "model.tied_head is False"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit(attempt, tmp_path, monkeypatch, overrides, message):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        attempt(*overrides)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_another_architecture(attempt, place):
    with pytest.raises(
        Exception, match=r"model\.architecture is crt, but the weights in .* are those of architecture lrt"
    ):
        attempt(f"run.initial_weights={place / 'lrt'}")


def test_on_the_command_line(place, tmp_path):
    file = recipe(place, "typed", "unrolled")
    done = backfeed("train", place / "crt/model.yaml", file, "model.layers=1", f"run.root={tmp_path}")
    assert done.returncode == 2
    assert "model.layers is 1, but in the weights in" in one_line(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.safetensors", "does not match its hash"), ("tokenizer.json", "does not match its hash")],
)
def test_damage(attempt, place, tmp_path, name, message):
    shutil.copytree(place / "crt", tmp_path / "made")
    content = (tmp_path / "made" / name).read_bytes()
    (tmp_path / "made" / name).write_bytes(content[:-2] + b"\x01\x01")
    with pytest.raises(RunError, match=message):
        attempt(f"run.initial_weights={tmp_path / 'made'}")
    (tmp_path / "made" / name).unlink()
    with pytest.raises(RunError, match="is missing; convert again"):
        attempt(f"run.initial_weights={tmp_path / 'made'}")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ("{}", "is not of format 1"), ('{"format": 1, "files": {}}', "was changed after")],
)
def test_a_damaged_description(attempt, place, tmp_path, content, message):
    shutil.copytree(place / "crt", tmp_path / "made")
    (tmp_path / "made/conversion.json").write_text(content)
    with pytest.raises(RunError, match=message):
        attempt(f"run.initial_weights={tmp_path / 'made'}")


def test_settings_that_change_what_the_weights_compute_are_told(attempt, capsys):
    with pytest.warns(RunWarning, match=r"not trained as this run is: model\.rope_base is 500\.0 and was 10000\.0"):
        attempt("model.rope_base=500", "model.dropout=0.1")


def test_settings_of_drawing_are_not(attempt, recwarn):
    attempt("model.embedding_std=0.5", "model.dropout=0.1", "model.kv_heads=null", "model.correction_width=null")
    assert not [each for each in recwarn if issubclass(each.category, RunWarning)]


def test_data_of_another_tokenizer(attempt, tmp_path):
    prepare_data(tmp_path, kind="bpe")
    with pytest.raises(ConfigError, match="whose tokenizer is not that of the weights") as caught:
        attempt(f"data.path={tmp_path / 'data'}", "model.vocab_size=null")
    assert "tokenizer.kind=file tokenizer.path=" in str(caught.value)
    with pytest.raises(ConfigError, match=r"300 ids; prepare the data with the tokenizer of the weights, .*/crt/token"):
        attempt(f"data.path={tmp_path / 'data'}")


def test_the_same_tokens_in_another_file(tmp_path, place):
    path = save_hugging_face(hugging_face_model("Llama"), tmp_path / "folder")
    convert(path, tmp_path / "made", "crt")
    (tmp_path / "other.json").write_text(json.dumps(json.loads((path / "tokenizer.json").read_text())))
    prepare_with(tmp_path, tmp_path / "other.json")
    file = recipe(tmp_path, "fed", "unrolled")
    config = config_files.load(Config, [tmp_path / "made/model.yaml", file])
    with pytest.warns(RunWarning, match="are not the same file; their tokens are"):
        train(config)


def test_the_layer_is_the_users_to_edit(attempt, place, tmp_path):
    shutil.copytree(place / "crt", tmp_path / "made")
    file = tmp_path / "made/model.yaml"
    file.write_text(file.read_text().replace(str(place / "crt"), str(tmp_path / "made")) + "\n# mine\n")
    assert attempt(layer=file).step == 2
