import io
import json
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import shards as module
from pipeline.data.manifest import Manifest, check_shards
from pipeline.data.shards import TokenReader
from pipeline.data.verify import verify
from pipeline.errors import DataError


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(prepared, tmp_path / "data")


def plain_tokens(folder, split="train"):
    """Read the tokens by the tar library alone."""
    manifest = Manifest.load(folder)
    parts = []
    for shard in manifest.splits[split].shards:
        with tarfile.open(folder / shard.file) as tar:
            parts += [np.frombuffer(tar.extractfile(member).read(), dtype="<u2") for member in tar]
    return np.concatenate(parts)


def edit(folder, change):
    """Change the manifest's JSON, fingerprint check included."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def refused(action, *words):
    with pytest.raises(DataError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def read_all(folder, **settings_):
    reader = TokenReader(Manifest.load(folder), "train", **settings_)
    return reader.read(0, reader.total)


def test_reading_anywhere(prepared):
    tokens = plain_tokens(prepared)
    reader = TokenReader(Manifest.load(prepared), "train")
    assert reader.total == len(tokens)

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def check(data):
        start = data.draw(st.integers(0, len(tokens)))
        count = data.draw(st.integers(0, len(tokens) - start))
        assert np.array_equal(reader.read(start, count), tokens[start : start + count])
        length = data.draw(st.integers(1, 3000))
        starts = np.array(data.draw(st.lists(st.integers(0, len(tokens) - length), min_size=1, max_size=5)))
        rows = reader.read_rows(starts, length)
        assert rows.dtype == np.int64
        assert all(np.array_equal(row, tokens[start : start + length]) for row, start in zip(rows, starts, strict=True))

    check()
    for start, count in ((-1, 2), (0, reader.total + 1), (reader.total, 1)):
        with pytest.raises(ValueError, match="outside split"):
            reader.read(start, count)


def test_few_files_stay_open_and_a_copy_reads_too(prepared):
    reader = TokenReader(Manifest.load(prepared), "train")
    reader._most_maps = 2
    assert np.array_equal(reader.read(0, reader.total), plain_tokens(prepared))
    assert len(reader._maps) == 2
    copy = pickle.loads(pickle.dumps(reader))
    assert len(copy._maps) == 0
    assert np.array_equal(copy.read(5, 100), reader.read(5, 100))


def test_a_deleted_shard(folder):
    shard = Manifest.load(folder).splits["train"].shards[1]
    (folder / shard.file).unlink()
    for action in (lambda: read_all(folder), lambda: check_shards(Manifest.load(folder)), lambda: verify(folder)):
        refused(action, shard.file, "is missing", "restore")
    check_shards(Manifest.load(folder), ["validation"])


def test_a_truncated_shard(folder):
    shard = Manifest.load(folder).splits["train"].shards[1]
    os.truncate(folder / shard.file, shard.bytes - 512)
    for action in (lambda: read_all(folder), lambda: check_shards(Manifest.load(folder)), lambda: verify(folder)):
        refused(action, shard.file, "truncated", str(shard.bytes - 512), str(shard.bytes))


def test_swapped_shards(folder):
    found = Manifest.load(folder).splits["train"].shards
    first, second = (folder / shard.file for shard in found[:2])
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    refused(lambda: verify(folder))
    refused(lambda: read_all(folder), found[0].file)


def test_a_changed_byte_is_found_by_the_hash(folder):
    shard = Manifest.load(folder).splits["train"].shards[1]
    content = bytearray((folder / shard.file).read_bytes())
    content[shard.members[0].offset + 2] ^= 1
    (folder / shard.file).write_bytes(content)
    read_all(folder)
    refused(lambda: read_all(folder, verify_hash=True), shard.file, "damaged", shard.sha256[:16])
    refused(lambda: verify(folder), shard.file, "damaged")


def test_verify_passes_on_whole_data(prepared, capsys):
    assert verify(prepared).fingerprint == Manifest.load(prepared).fingerprint
    assert "verify" in capsys.readouterr().err
    read_all(prepared, verify_hash=True)


def test_a_token_outside_the_vocabulary(folder):
    shard = Manifest.load(folder).splits["train"].shards[1]
    content = bytearray((folder / shard.file).read_bytes())
    offset = shard.members[0].offset + 20
    content[offset : offset + 2] = (257).to_bytes(2, "little")
    (folder / shard.file).write_bytes(content)
    refused(lambda: read_all(folder), shard.file, "257", f"byte {offset}", "vocabulary of 257")
    reader = TokenReader(Manifest.load(folder), "train")
    place = Manifest.load(folder).splits["train"].shards[0].tokens
    refused(lambda: reader.read_rows(np.array([0, place]), 50), shard.file, f"byte {offset}")


class Payload:
    def __reduce__(self):
        return (os.system, (f"touch {os.environ['PAYLOAD_MARK']}",))


def evil_shard(path, name, size):
    """A tar of one member that runs a command when it is unpickled, of a given size in all."""
    data = pickle.dumps(Payload())
    data += b"\0" * (size - len(data))
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        header = tarfile.TarInfo(name)
        header.size = len(data)
        tar.addfile(header, io.BytesIO(data))


@pytest.mark.parametrize("name", ["000000.pkl", "000000.pickle", "000000.pth", "000000.pyd", "000000.bin.pkl"])
def test_a_pickle_in_a_shard_only_gives_an_error(folder, tmp_path, monkeypatch, name):
    mark = tmp_path / "ran"
    monkeypatch.setenv("PAYLOAD_MARK", str(mark))
    shard = Manifest.load(folder).splits["train"].shards[0]
    # The file alone is swapped, with the size that the manifest says.
    evil_shard(folder / shard.file, name, shard.tokens * 2)
    content = (folder / shard.file).read_bytes()
    (folder / shard.file).write_bytes(content[: shard.bytes].ljust(shard.bytes, b"\0"))
    refused(lambda: read_all(folder), shard.file, name, "000000.bin")
    refused(lambda: verify(folder), shard.file)

    # The manifest says so too.
    def change(content):
        entry = content["splits"]["train"]["shards"][0]
        entry["members"] = [[name, 512, entry["tokens"]]]

    edit(folder, change)
    refused(lambda: Manifest.load(folder), name, "refused")
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    ["pipe:touch x.tar", "../a.tar", "/etc/a.tar", "a/b.tar", ".hidden.tar", "a.tar.gz", "http://x/a.tar", "a\n.tar"],
)
def test_shard_names_that_lead_elsewhere_are_refused(folder, name):
    edit(folder, lambda content: content["splits"]["train"]["shards"][0].update(file=name))
    refused(lambda: Manifest.load(folder), "is refused", "plain file name")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.update(format=2), ["format 2", "reads format 1"]),
        (lambda content: content.pop("dtype"), ["'dtype'"]),
        (lambda content: content.update(dtype="float64"), ["float64"]),
        (lambda content: content["tokenizer"].update(vocab_size=70000), ["contradict"]),
        (lambda content: content["tokenizer"].update(vocab_size=True), ["vocab_size"]),
        (lambda content: content["splits"]["train"]["shards"][0].update(tokens=1), ["add up"]),
        (lambda content: content["splits"]["train"]["shards"][0].update(tokens=-1), ["'tokens'"]),
        (lambda content: content["splits"]["train"]["shards"][0]["members"][0].__setitem__(1, 513), ["impossible"]),
        (lambda content: content["splits"]["train"]["shards"][0]["members"][0].append(1), ["[name, offset, tokens]"]),
        (lambda content: content["splits"]["train"]["shards"].pop(), ["changed by hand"]),
        (lambda content: content["splits"].update({"a/b": content["splits"]["train"]}), ["no name of a split"]),
        (lambda content: content.clear(), ["'format'"]),
    ],
)
def test_damaged_manifests(folder, change, words):
    edit(folder, change)
    refused(lambda: Manifest.load(folder), "manifest.json", *words)


def test_missing_and_broken_manifests(folder, tmp_path):
    refused(lambda: Manifest.load(tmp_path), "does not exist", "backfeed prepare")
    (folder / "manifest.json").write_text('{"format": 1,')
    refused(lambda: Manifest.load(folder), "is damaged")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    refused(lambda: Manifest.load(folder), "folder, not a file")


def test_splits_that_are_not_there(prepared):
    manifest = Manifest.load(prepared)
    refused(lambda: TokenReader(manifest, "test"), "no split 'test'", "train, validation")


def test_the_fingerprint_is_of_the_content_alone(prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "elsewhere")
    edit(copy, lambda content: content.update(sources=[], config={}, plan=""))
    assert Manifest.load(copy).fingerprint == Manifest.load(prepared).fingerprint
    assert module.TokenReader(Manifest.load(copy), "train").total > 0
