import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import webdataset
from omegaconf import OmegaConf

from pipeline.data import groups, shards
from pipeline.data.manifest import Manifest
from pipeline.data.prepare import PrepareConfig, TokenizerConfig, prepare
from pipeline.data.shards import TokenReader
from pipeline.data.sources import SourceConfig
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.verify import verify
from pipeline.errors import ConfigError, DataError
from tests.data.small_corpora import config_for, contents, make_text, write_corpus, write_jsonl

ROOT = Path(__file__).parents[2]


def texts_of(folder, split="train"):
    """Decode the documents of a split."""
    manifest, tokenizer = Manifest.load(folder), Tokenizer.load(folder)
    reader = TokenReader(manifest, split)
    tokens = reader.read(0, reader.total)
    assert tokens[0] == tokenizer.document_id
    starts = [*np.flatnonzero(tokens == tokenizer.document_id), len(tokens)]
    return [tokenizer.decode(tokens[a:b]) for a, b in itertools.pairwise(starts)]


def test_the_documents_come_back_in_order(corpus, tmp_path):
    for kind in ("bytes", "bpe"):
        tokenizer = TokenizerConfig(kind=kind, vocab_size=400 if kind == "bpe" else None)
        manifest = prepare(config_for(tmp_path / kind, corpus, tokenizer=tokenizer))
        expected = [make_text(number) for number in range(60)]
        assert texts_of(tmp_path / kind) == expected
        split = manifest.splits["train"]
        assert split.documents == 60
        assert split.source_bytes == sum(len(text.encode()) for text in expected)
        assert len(split.shards) > 3
        assert any(len(shard.members) > 1 for shard in split.shards)
        sizes = Tokenizer.load(manifest).token_bytes
        tokens = TokenReader(manifest, "train").read(0, split.tokens)
        assert int(sizes[tokens].sum()) == split.source_bytes


def test_the_real_webdataset_reads_the_shards(prepared):
    manifest = Manifest.load(prepared)
    split = manifest.splits["train"]
    urls = [str(manifest.path(shard)) for shard in split.shards]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    tokens = np.concatenate([np.frombuffer(sample["bin"], dtype="<u2") for sample in samples])
    assert len(samples) == sum(len(shard.members) for shard in split.shards)
    assert np.array_equal(tokens, TokenReader(manifest, "train").read(0, split.tokens))


def test_the_shards_are_what_webdataset_writes(prepared, tmp_path):
    for shard in Manifest.load(prepared).splits["train"].shards:
        content = (prepared / shard.file).read_bytes()
        with webdataset.TarWriter(
            str(tmp_path / "w.tar"), user="", group="", mode=0o644, mtime=0, encoder=False
        ) as tar:
            for member in shard.members:
                data = content[member.offset : member.offset + 2 * member.tokens]
                tar.write({"__key__": member.name.removesuffix(".bin"), "bin": data})
        assert (tmp_path / "w.tar").read_bytes() == content


def test_any_number_of_workers_gives_the_same_bytes(corpus, prepared, tmp_path):
    for workers in (2, 3):
        prepare(config_for(tmp_path / str(workers), corpus, holdout={"validation": 0.2}, workers=workers))
        assert contents(tmp_path / str(workers)) == contents(prepared)
        assert sorted(os.listdir(tmp_path / str(workers))) == sorted(os.listdir(prepared))


KILLED = """
import sys

from tests.data.small_corpora import config_for
from pipeline.data.prepare import TokenizerConfig, prepare
if __name__ == "__main__":
    tokenizer = TokenizerConfig(kind="bpe", vocab_size=500)
    prepare(config_for({output!r}, {corpus!r}, tokenizer=tokenizer, workers=2, holdout={{"validation": 0.1}}))
"""


def start_prepare(tmp_path, output, corpus):
    script = tmp_path / "run.py"
    script.write_text(KILLED.format(output=str(output), corpus=str(corpus)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A job in the background of a shell ignores Ctrl-C, and hands that on to all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_started_again_gives_the_same_bytes(tmp_path, how):
    corpus = write_corpus(tmp_path / "texts", 1000, 1200)  # enough that it is not done before the signal comes
    output, whole = tmp_path / "data", tmp_path / "whole"
    process = start_prepare(tmp_path, output, corpus)
    deadline = time.monotonic() + 60
    while len(list(output.glob(".prepare/group-*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert not (output / "manifest.json").exists()
    assert len(children) >= 2
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    if how == signal.SIGINT:
        assert "the same command goes on from there" in errors
        assert "SpawnProcess" not in errors
    kept = {path: path.stat().st_mtime_ns for path in output.glob("*.tar")}
    process = start_prepare(tmp_path, output, corpus)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "going on" in errors
    # What was finished was not done again.
    assert sum(path.stat().st_mtime_ns == kept.get(path) for path in output.glob("*.tar")) >= 3
    config = config_for(
        whole, corpus, tokenizer=TokenizerConfig(kind="bpe", vocab_size=500), holdout={"validation": 0.1}
    )
    prepare(config)
    assert contents(output) == contents(whole)


def test_a_finished_folder_is_left_alone(corpus, tmp_path, capsys):
    config = config_for(tmp_path / "data", corpus)
    manifest = prepare(config)
    before = contents(tmp_path / "data")
    assert prepare(config).fingerprint == manifest.fingerprint
    assert "complete already" in capsys.readouterr().err
    config.member_tokens = 999
    with pytest.raises(DataError, match="other sources or settings") as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "data") == before


def test_another_plan_in_an_unfinished_folder_is_refused(corpus, tmp_path, monkeypatch):
    config = config_for(tmp_path / "data", corpus)
    calls = []

    def one_then_none(*arguments):
        calls.append(1)
        return groups.make_group(*arguments) if len(calls) == 1 else 1 / 0

    monkeypatch.setattr("pipeline.data.prepare.make_group", one_then_none)
    with pytest.raises(ZeroDivisionError):
        prepare(config)
    monkeypatch.undo()
    other = config_for(tmp_path / "data", corpus, shard_tokens=77)
    with pytest.raises(DataError, match="unfinished preparation from other sources or settings"):
        prepare(other)
    prepare(config)
    verify(tmp_path / "data")


def test_changed_sources_are_another_plan(tmp_path):
    corpus = write_corpus(tmp_path / "texts", 5)
    config = config_for(tmp_path / "data", corpus)
    prepare(config)
    (corpus / "0003.txt").write_text(make_text(3)[::-1])
    with pytest.raises(DataError, match="other sources or settings"):
        prepare(config)


def test_a_folder_with_other_things_is_refused(corpus, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"not empty .*thesis\.tex"):
        prepare(config_for(tmp_path, corpus))
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(DataError, match=r"thesis\.tex is a file"):
        prepare(config_for(tmp_path / "thesis.tex", corpus))


def test_two_at_once_are_refused(corpus, tmp_path):
    import fcntl

    (tmp_path / "data" / ".prepare").mkdir(parents=True)
    with open(tmp_path / "data" / ".prepare" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another prepare is working"):
            prepare(config_for(tmp_path / "data", corpus))


def test_a_shard_lost_before_the_end_is_made_again(corpus, prepared, tmp_path, monkeypatch):
    config = config_for(tmp_path / "data", corpus, holdout={"validation": 0.2})
    monkeypatch.setattr(Manifest, "save", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(config)
    monkeypatch.undo()
    next((tmp_path / "data").glob("*.tar")).unlink()
    prepare(config)
    assert contents(tmp_path / "data") == contents(prepared)


def test_holdout_goes_by_the_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", 400, 20)
    prepare(config_for(tmp_path / "one", path, holdout={"validation": 0.1, "test": 0.2}))
    found = {split: texts_of(tmp_path / "one", split) for split in ("train", "validation", "test")}
    assert sorted(itertools.chain(*found.values())) == sorted(make_text(number, 20) for number in range(400))
    assert 20 <= len(found["validation"]) <= 60
    assert 50 <= len(found["test"]) <= 110
    # Twice the same text, in other files: the copies follow the originals.
    write_jsonl(tmp_path / "b.jsonl", 400, 20)
    prepare(config_for(tmp_path / "two", path, tmp_path / "b.jsonl", holdout={"validation": 0.1, "test": 0.2}))
    assert texts_of(tmp_path / "two", "test") == found["test"] * 2


def test_training_sample_of_the_tokenizer_is_bounded_and_leaves_the_holdout_out(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", 300, 100)
    seen = []
    real = Tokenizer.train.__func__

    def spy(cls, texts, *rest):
        seen.extend(texts)
        return real(cls, seen, *rest)

    monkeypatch.setattr(Tokenizer, "train", classmethod(spy))
    tokenizer = TokenizerConfig(kind="bpe", vocab_size=300, training_bytes=20_000)
    prepare(config_for(tmp_path / "data", path, tokenizer=tokenizer, holdout={"validation": 0.3}))
    assert 19_000 < sum(len(text.encode()) for text in seen) <= 20_000
    held_out = set(texts_of(tmp_path / "data", "validation"))
    assert held_out
    assert not held_out & set(seen)
    numbers = [int(found[1]) for text in seen if (found := re.match(r"Document (\d+)\.", text))]
    assert min(numbers) < 30
    assert max(numbers) > 250


def test_a_large_vocabulary_takes_four_bytes(tmp_path, corpus):
    import tokenizers

    vocab = {"<unk>": 0, **{f"w{number}": number + 1 for number in range(70_000)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>"])
    inner.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("w1 w69999 w65536")
    tokenizer = TokenizerConfig(kind="file", path=str(tmp_path / "words.json"))
    manifest = prepare(config_for(tmp_path / "data", tmp_path / "text.txt", tokenizer=tokenizer))
    assert manifest.dtype == "uint32"
    assert TokenReader(manifest, "train").read(0, 4).tolist() == [70001, 2, 70000, 65537]


def test_disk_full_is_one_line_and_can_go_on(corpus, prepared, tmp_path, monkeypatch):
    config = config_for(tmp_path / "data", corpus, holdout={"validation": 0.2})
    real, count = shards._HashedFile.write, []

    def full(self, data):
        count.append(1)
        if len(count) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(shards._HashedFile, "write", full)
    with pytest.raises(DataError, match=r"no space is left on its disk.*goes on from there") as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert not list((tmp_path / "data").rglob("*.partial"))
    prepare(config)
    assert contents(tmp_path / "data") == contents(prepared)


def test_a_real_limit_on_file_size_in_a_worker_is_one_line(tmp_path):
    corpus = write_corpus(tmp_path / "texts", 40, 3000)
    code = f"""
import resource, sys

from tests.data.small_corpora import config_for
from pipeline.data.prepare import prepare
from pipeline.errors import DataError
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    try:
        prepare(config_for({str(tmp_path / "data")!r}, {str(corpus)!r}, workers=2, group_bytes=150000))
    except DataError as error:
        print(error)
        sys.exit(2)
"""
    (tmp_path / "run.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "run.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout.count("\n") == 1
    assert "larger than the system allows" in done.stdout


def test_an_error_in_a_worker_is_the_same_one_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", 300, 100)
    content = path.read_bytes().splitlines(keepends=True)
    content[250] = b'{"text": 5}\n'
    path.write_bytes(b"".join(content))
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl, line 251: field 'text' is int, not text") as caught:
            prepare(config_for(tmp_path / f"data{workers}", path, workers=workers))
        assert "\n" not in str(caught.value)


def test_a_dead_worker_is_one_line(corpus, tmp_path, monkeypatch):
    # The worker processes see the real function; the size of the batch makes them die on their own.
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    monkeypatch.setattr("pipeline.data.prepare.work", die)
    with pytest.raises(DataError, match="a worker process died"):
        prepare(config_for(tmp_path / "data", corpus, workers=2))


def die(_group):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "sources is empty"),
        ({"member_tokens": 0}, "member_tokens is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"holdout": {"train": 0.1}}, r"holdout\.train"),
        ({"holdout": {"validation": 1.5}}, r"holdout\.validation is 1\.5"),
        ({"holdout": {"a": 0.5, "b": 0.6}}, "sum to"),
        ({"holdout": {"../a": 0.5}}, "no name of a split"),
        ({"tokenizer": TokenizerConfig(kind="bytes", vocab_size=300)}, r"tokenizer\.vocab_size has no effect"),
        ({"tokenizer": TokenizerConfig(kind="bytes", training_bytes=3)}, r"tokenizer\.training_bytes has no effect"),
        ({"tokenizer": TokenizerConfig(kind="bpe", path="x")}, r"tokenizer\.path has no effect"),
        ({"tokenizer": TokenizerConfig(kind="file")}, r"tokenizer\.path is not set"),
        ({"tokenizer": TokenizerConfig(kind="bpe", vocab_size=100)}, r"tokenizer\.vocab_size is 100"),
    ],
)
def test_settings_out_of_range_are_refused(corpus, tmp_path, change, message):
    config = config_for(tmp_path / "data", corpus)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        prepare(config)
    assert not (tmp_path / "data").exists()


def test_a_mended_file_lets_the_same_command_go_on(corpus, tmp_path):
    bad = corpus / "0003.txt"
    whole = bad.read_bytes()
    bad.write_bytes(b"\xff\xfe broken")
    with pytest.raises(DataError, match="0003"):
        prepare(config_for(tmp_path / "data", corpus, group_bytes=10**9))
    bad.write_bytes(whole)
    prepare(config_for(tmp_path / "data", corpus, group_bytes=10**9))
    prepare(config_for(tmp_path / "fresh", corpus, group_bytes=10**9))
    assert contents(tmp_path / "data") == contents(tmp_path / "fresh")


def test_holdout_without_a_training_source_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="holdout has no effect"):
        prepare(config_for(tmp_path / "data", corpus, split="test", holdout={"validation": 0.1}))
    with pytest.raises(ConfigError, match="trains on split train"):
        prepare(config_for(tmp_path / "data", corpus, split="test", kind="bpe"))


def test_the_configuration_that_ships_fits_the_schema_and_the_package():
    # make setup installs the package; where it is missing this fails, and says how to get it
    merged = OmegaConf.merge(OmegaConf.structured(PrepareConfig), OmegaConf.load(ROOT / "configs/data/sotu.yaml"))
    config = OmegaConf.to_object(merged)
    config.check()
    from pipeline.data.sources import find_units

    years = {}
    for unit in find_units(config.sources, config.group_bytes):
        years.setdefault(unit.split, []).append(int(unit.name[:4]))
    assert (min(years["train"]), max(years["train"])) == (1790, 2000)
    assert min(years["validation"]) > 2000
    assert (max(years["validation"]), min(years["test"])) == (2012, 2013)
    assert sum(len(found) for found in years.values()) == 249


def test_no_text_at_all_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no text at all"):
        prepare(config_for(tmp_path / "data", tmp_path / "a.jsonl"))


def test_empty_documents_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "full"}\n')
    manifest = prepare(config_for(tmp_path / "data", tmp_path / "a.jsonl"))
    assert manifest.splits["train"].empty_documents == 1
    assert texts_of(tmp_path / "data") == ["full"]


def test_groups_hold_every_unit_once():
    from pipeline.data.sources import Unit

    units = [Unit(str(n), str(n), "text", "train", "text", 0, -1, n * 7 % 13, 0, "") for n in range(50)]
    divided = groups.divide(units, 20)
    assert [unit for group in divided for unit in group.units] == units
    assert all(group.bytes >= 20 for group in divided[:-1])
    assert [group.number for group in divided] == list(range(len(divided)))
    assert SourceConfig().split == "train"


def test_the_processes_that_prepare_need_no_torch():
    code = "import sys, pipeline.data.prepare, pipeline.data.shards; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
