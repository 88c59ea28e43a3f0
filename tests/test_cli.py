"""The command as a user types it: what it prints, and one line for every mistake."""

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import tarfile

import pytest

from pipeline import cli, config_files
from pipeline.config import Config
from pipeline.errors import RunWarning
from pipeline.runs.checkpoints import CheckpointStore
from tests.support import backfeed, command, environment, one_line, prepare_data, run_config, write_text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A prepared corpus, a finished run and its configuration file."""
    folder = tmp_path_factory.mktemp("place")
    prepare_data(folder)
    config_files.save(run_config(folder / "runs", folder / "data"), folder / "config.yaml")
    done = backfeed("train", folder / "config.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copy(place, tmp_path):
    """The same, to be damaged."""
    shutil.copytree(place, tmp_path / "place")
    folder = tmp_path / "place"
    moved = [f"run.root={folder / 'runs'}", f"data.path={folder / 'data'}"]
    for path in (folder / "config.yaml", folder / "runs/small/config.yaml"):
        config_files.save(config_files.load(Config, [path], moved), path)
    return folder


@pytest.fixture
def complaint(monkeypatch, capsys):
    """Return a function that runs the command in this process and returns its one line of complaint."""

    def run(*arguments, cwd):
        monkeypatch.chdir(cwd)
        code = cli.main([str(argument) for argument in arguments])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("backfeed: ")]
        assert code != 0
        assert len(lines) == 1, lines
        return lines[0]

    return run


def test_help_and_version():
    done = backfeed("--help")
    assert done.returncode == 0
    verbs = {"prepare", "train", "evaluate", "generate", "iterate", "describe", "convert", "bench"}
    assert verbs <= set(done.stdout.split())
    assert re.fullmatch(r"backfeed \d+\.\d+\.\d+\n", backfeed("--version").stdout)
    assert backfeed().returncode == 2


def test_print_config_is_whole_and_trains_nothing(place, tmp_path):
    done = backfeed("train", place / "config.yaml", f"run.root={tmp_path}", "solver.interval=4", "--print-config")
    assert done.returncode == 0, done.stderr
    (tmp_path / "printed.yaml").write_text(done.stdout)
    again = backfeed("train", tmp_path / "printed.yaml", "--print-config")
    assert again.stdout == done.stdout
    assert "interval: 4" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["printed.yaml"]


def test_settings_may_stand_on_both_sides_of_options(place):
    done = backfeed("train", "config.yaml", "--print-config", "solver.interval=4", "run.seed=3", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "interval: 4" in done.stdout
    assert "seed: 3" in done.stdout
    for arguments in (["train", "config.yaml", "--resum", "x", "--nonsense"], ["evaluate", "runs/small", "extra"]):
        done = backfeed(*arguments, cwd=place)
        assert (done.returncode, done.stdout) == (2, "")


def test_prepare_train_evaluate_generate(tmp_path):
    """A first hour with the tool, text in, text out."""
    write_text(tmp_path / "text", 40)
    settings = ["sources=[{path: text, split: train}]", "holdout={validation: 0.2}", "output=data"]
    done = backfeed("prepare", *settings, "tokenizer.kind=bpe", "tokenizer.vocab_size=300", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"train: [\d,]+ tokens, \d+ documents", done.stdout)
    assert backfeed("prepare", "--verify", "data", cwd=tmp_path).returncode == 0

    config_files.save(run_config("runs", "data", "schedules.interval=[{at: 0, value: 4}]"), tmp_path / "config.yaml")
    done = backfeed("train", "config.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 12: validation loss" in done.stdout
    assert "Warning" not in done.stderr, done.stderr

    done = backfeed("evaluate", "runs/small", "--json", "found.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(row["mode"], row["solver"]) for row in found["rows"]] == [
        ("training", "chunked interval=4"),
        ("sequential", "chunked interval=1"),
    ]
    assert found["rows"][0]["tokens"] == found["rows"][1]["tokens"] > 0

    arguments = ["generate", "runs/small", "--prompt", "we the people", "--tokens", "20"]
    first, again = backfeed(*arguments, cwd=tmp_path), backfeed(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert first.stdout.startswith("we the people")
    assert backfeed(*arguments, "--seed", "1", cwd=tmp_path).stdout != first.stdout
    for mode in ("standard", "soft", "fused", "recurrent"):
        done = backfeed(*arguments, "--decode", mode, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("we the people")

    done = backfeed("evaluate", "runs/small", "solver.name=unrolled", "solver.passes=5", "--tokens", "64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "unrolled passes=5" in done.stdout
    assert "chunked interval=1" in done.stdout
    done = backfeed("iterate", "runs/small", "--passes", "3", "--tokens", "64", "--plot", "found.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "residual" in done.stdout
    assert (tmp_path / "found.svg").stat().st_size > 1000
    step = CheckpointStore(tmp_path / "runs/small/checkpoints").at(8)
    assert (
        backfeed(*arguments, "--step", "8", cwd=tmp_path).stdout
        == backfeed("generate", step.path, *arguments[2:], cwd=tmp_path).stdout
    )


def test_evaluate_does_not_need_the_run_beside_it(place, tmp_path):
    """A checkpoint is whole by itself: copied elsewhere it still evaluates and generates."""
    newest = CheckpointStore(place / "runs/small/checkpoints").list()[-1]
    shutil.copytree(newest.path, tmp_path / "carried")
    done = backfeed("evaluate", "carried", "--data", place / "data", "--tokens", "64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert backfeed("generate", "carried", "--tokens", "3", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "absent.yaml"], "absent.yaml"),
        (["train", "config.yaml", "solver.intervall=2"], "did you mean solver.interval"),
        (["train", "config.yaml", "solver.interval=two"], "solver.interval (command line)"),
        (["train", "config.yaml", "solver.interval=0"], "solver.interval"),
        (["train", "config.yaml", "model.layers=3"], "model.layers (command line) is not a setting of"),
        (["train", "config.yaml", "solver.segment_length=4"], "solver.segment_length (command line) is set, but"),
        (["train", "config.yaml", "schedules.window=[{at: 0, value: 1}]"], "schedules.window"),
        (["train", "config.yaml", "schedules.interval=[{at: 0.5, value: 1}]"], "they must ascend from 0"),
        (["train", "config.yaml", "schedules.interval=[{at: 0, value: x}]"], "schedules.interval"),
        (["train", "config.yaml", "training.batch_tokens=100"], "training.batch_tokens"),
        (["train", "config.yaml", "data.sequence_length=48"], "micro_batch_tokens"),
        (["train", "config.yaml", "learning_rate.peak='1e-4'"], "write it without quotes"),
        (["train", "config.yaml", "run.name=new", "data.path=nowhere"], "nowhere/manifest.json does not exist"),
        (["train", "config.yaml", "run.name=new", "data.train_split=holiday"], "holiday"),
        (["train", "config.yaml"], "already holds a run"),
        (["train", "run.name=x", "config.yaml"], "files come first"),
        (["train", "config.yaml", "run.name=../x"], "run.name (command line) is '../x'"),
        (["train", "config.yaml", "run.name=''"], "run.name"),
        (["train", "config.yaml", "run.seed=99999999999999999999"], "run.seed"),
        (["train", "config.yaml", "optimizer.eps=-1"], "optimizer.eps"),
        (["train", "config.yaml", "learning_rate.final_fraction=-5"], "learning_rate.final_fraction"),
        (["train", "config.yaml", "learning_rate.warmup_tokens=99999"], "learning_rate.warmup_tokens"),
        (["train", "config.yaml", "learning_rate.peak=.inf"], "learning_rate.peak"),
        (["train", "config.yaml", "training.threads=-1"], "training.threads"),
        (["train", "config.yaml", "training.threads=100000"], "training.threads"),
        (["train", "config.yaml", "model.rope_base=0"], "model.rope_base"),
        (["train", "config.yaml", "model.embedding_std=-1"], "model.embedding_std"),
        (
            ["train", "config.yaml", "run.name=new", "model.width=4000000"],
            "more than this machine can hold",
        ),
        (["evaluate", "nowhere"], "nowhere is not a folder"),
        (["evaluate", "data"], "neither a run folder"),
        (["evaluate", "runs/small", "--step", "5"], "has no checkpoint of step 5; it has: 8, 12"),
        (["evaluate", "runs/small", "--split", "holiday"], "has no split 'holiday'"),
        (["evaluate", "runs/small", "--tokens", "-1"], "--tokens is -1"),
        (["generate", "runs/small", "--temperature", "-1"], "temperature is -1"),
        (["generate", "runs/small", "--tokens", "0"], "--tokens is 0"),
        (["generate", "runs/small", "--device", "warp"], "device 'warp'"),
        (["generate", "runs/small", "--device", "meta"], "device 'meta'"),
        (["generate", "runs/small", "--temperature", "1e-320"], "temperature is 1e-320"),
        (["generate", "runs/small", "--seed", "-1"], "--seed is -1"),
        (["generate", "runs/small", "--prompt", "\udcff"], "--prompt is not valid UTF-8"),
        (["generate", "runs/small", "--tokens", "1000000000000"], "not enough memory"),
        (["evaluate", "runs/small", "--json", "absent/x.json"], "there is no folder"),
        (["prepare", "output=x", "sources=[{path: nowhere}]"], "nowhere"),
        (["prepare", "--verify", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else None,
)
def test_mistakes_get_one_line(place, complaint, arguments, message):
    before = sorted(place.rglob("*"))
    line = complaint(*arguments, cwd=place)
    assert message in line
    assert sorted(place.rglob("*")) == before


def test_a_mistake_in_a_process_of_its_own(place):
    done = backfeed("train", "absent.yaml", cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert "absent.yaml" in one_line(done)


def shard(folder, split="train"):
    return sorted((folder / "data").glob(f"{split}-*.tar"))[0]


@pytest.mark.parametrize("damage", ["truncated", "missing"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_damaged_shard_stops_the_run_before_it_begins(complaint, copy, damage, split):
    path = shard(copy, split)
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - 512)
    else:
        path.unlink()
    line = complaint("train", "config.yaml", "run.name=new", cwd=copy)
    assert path.name in line
    assert damage in line
    assert not (copy / "runs/new").exists()


def test_shard_with_a_pickle_does_nothing_but_fail(complaint, copy):
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {copy}/executed",)

    path = shard(copy)
    size, content = path.stat().st_size, pickle.dumps(Payload())
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("000000.pkl")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    with path.open("ab") as file:  # of the size that the manifest says, as a careful attacker would have it
        file.truncate(size)
    line = complaint("train", "config.yaml", "run.name=new", cwd=copy)
    assert path.name in line
    assert not (copy / "executed").exists()


def test_tokenizer_that_does_not_fit_the_shards(complaint, copy):
    (copy / "data/tokenizer.json").write_text((copy / "data/tokenizer.json").read_text() + " ")
    line = complaint("train", "config.yaml", "run.name=new", cwd=copy)
    assert "does not fit the shards" in line


def test_data_of_another_tokenizer_are_refused_by_evaluate(complaint, place, tmp_path):
    other = prepare_data(tmp_path, kind="bpe").folder
    line = complaint("evaluate", "runs/small", "--data", other, cwd=place)
    assert "prepared with another tokenizer" in line


def test_run_folder_from_another_config(complaint, copy):
    line = complaint("train", "config.yaml", "model.width=32", "--resume", "auto", cwd=copy)
    assert "belongs to another configuration: model.width was 16 and is now 32" in line


def test_damaged_checkpoint_is_named(complaint, copy):
    for checkpoint in CheckpointStore(copy / "runs/small/checkpoints").list():
        os.truncate(checkpoint.path / "model.safetensors", 10)
    with pytest.warns(RunWarning, match="has 10 bytes"):
        line = complaint("evaluate", "runs/small", cwd=copy)
    assert "all 2 checkpoints are damaged" in line


def test_warnings_are_one_line_too(copy):
    newest = CheckpointStore(copy / "runs/small/checkpoints").list()[-1]
    (newest.path / "training.pt").unlink()
    done = backfeed("generate", "runs/small", "--tokens", "2", cwd=copy)
    assert done.returncode == 0
    assert done.stderr.startswith("warning: ")
    assert done.stderr.count("\n") == 1
    assert "training.pt is missing" in done.stderr


def test_unreadable_file_in_the_sources(complaint, tmp_path):
    write_text(tmp_path / "text", 3)
    (tmp_path / "text/0001a.txt").symlink_to(tmp_path / "gone")
    line = complaint("prepare", "output=data", "sources=[{path: text}]", "tokenizer.kind=bytes", cwd=tmp_path)
    assert "0001a.txt" in line


def test_closed_streams(place):
    line = " ".join(command("generate", place / "runs/small", "--tokens", "2"))
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        assert subprocess.run(f"{line} {closed}", shell=True, env=environment(), timeout=120).returncode == 0


def test_output_that_nobody_reads_any_more(place):
    line = " ".join(command("generate", place / "runs/small", "--tokens", "200")) + " | head -c 5"
    done = subprocess.run(line, shell=True, capture_output=True, env=environment())
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "runs/small", "model.width=3"], "'model.width=3' is no setting of the solver"),
        (["evaluate", "runs/small", "solver.passes=3"], "solver.passes"),
        (["evaluate", "runs/small", "solver.name=unrolled", "solver.passes=0"], "is 0; a number of passes"),
        (["evaluate", "runs/small", "solver.interval=0"], "is 0; a feedback interval"),
        (["iterate", "runs/small", "--passes", "1"], "--passes is 1"),
        (["iterate", "runs/small", "--plot", "found.gif"], "must end in one of .svg, .png, .pdf"),
        (["iterate", "runs/small", "--json", "nowhere/found.json"], "there is no folder"),
        (["iterate", "runs/small", "--tokens", "-1"], "--tokens is -1"),
        (["iterate", "runs/missing"], "is not a folder"),
    ],
    ids=str,
)
def test_mistakes_with_another_solver(complaint, place, arguments, words):
    assert words in complaint(*arguments, cwd=place)


def test_results_destroy_nothing(complaint, place):
    """A result goes to a file of its own kind, never over a configuration, a folder or a link."""
    before = (place / "config.yaml").read_text()
    assert "must end in one of .json" in complaint("evaluate", "runs/small", "--json", "config.yaml", cwd=place)
    assert (place / "config.yaml").read_text() == before
    (place / "folder.json").mkdir()
    assert "no ordinary file" in complaint("describe", "config.yaml", "--json", "folder.json", cwd=place)
    (place / "link.json").symlink_to("config.yaml")
    assert "no ordinary file" in complaint("iterate", "runs/small", "--json", "link.json", cwd=place)


def test_results_are_written_though_nobody_reads(place):
    """A reader that closes the pipe at once costs no measurement."""
    arguments = command("describe", "config.yaml", "model.vocab_size=300", "--json", "found.json")
    environment_ = {**environment(), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(arguments, cwd=place, env=environment_, stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert json.loads((place / "found.json").read_text())["parameters"] > 0
