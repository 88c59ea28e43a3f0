import bz2
import gzip
import json
import lzma
import os

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from pipeline.data.prepare import prepare
from pipeline.data.readers import documents_of_jsonl
from pipeline.data.sources import SourceConfig, documents, find_units, kind_of, resolve
from pipeline.errors import ConfigError, DataError
from tests.data.small_corpora import config_for, make_text, write_corpus, write_jsonl

COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read(*sources, range_bytes=1 << 20):
    return [text for unit in find_units(list(sources), range_bytes) for text in documents(unit)]


def source(path, **settings):
    return SourceConfig(path=str(path), **settings)


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_kinds_go_by_name():
    assert [kind_of(name) for name in ("a.txt", "a.MD", "b.txt.gz", "c.jsonl.zst", "c.json", "d.parquet")] == [
        *["text"] * 3,
        *["jsonl"] * 2,
        "parquet",
    ]
    assert [kind_of(name) for name in ("a.pdf", "d.parquet.gz", "a.gz", "txt")] == [None] * 4


def test_text_files_keep_every_character(tmp_path):
    text = "Ünïcode\r\nline\rtwo\n\n  🙂\x00\u2028end"
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "a.md").write_bytes(b"# first")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_bytes(b"third")
    (tmp_path / "notes.pdf").write_bytes(b"not text")
    assert read(source(tmp_path)) == ["# first", text, "third"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files(tmp_path, suffix):
    lines = b"".join(json.dumps({"text": make_text(number)}).encode() + b"\n" for number in range(300))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix](lines))
    # Two streams one after the other in a file are one text.
    (tmp_path / f"b.txt{suffix}").write_bytes(COMPRESS[suffix](b"one ") + COMPRESS[suffix](b"two"))
    assert read(source(tmp_path)) == [make_text(number) for number in range(300)] + ["one two"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_damaged_compressed_files_are_one_line(tmp_path, suffix, name):
    content = COMPRESS[suffix](b"".join(json.dumps({"text": make_text(n)}).encode() + b"\n" for n in range(300)))
    path = tmp_path / f"{name}{suffix}"
    for damage in (content[: len(content) * 2 // 3], b"garbage" + content):
        path.write_bytes(damage)
        with pytest.raises(DataError, match="is damaged or not of the kind") as caught:
            read(source(path))
        assert str(path) in one_line(caught)


def test_jsonl_with_blank_lines_and_a_last_line_without_end(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"body": 1, "text": "two\\u00e9"}')
    assert read(source(tmp_path / "a.jsonl")) == ["one", "twoé"]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12), min_size=1, max_size=8
    ),
    border=st.integers(1, 40),
)
def test_ranges_of_bytes_divide_the_lines_exactly(tmp_path_factory, lines, border):
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": line}).encode() + b"\n" for line in lines))
    assert read(source(path), range_bytes=border) == lines
    assert sum(unit.bytes for unit in find_units([source(path)], border)) == path.stat().st_size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"body": "a"}', "no field 'text'; it has 'body'"),
        (b'{"text": null}', "field 'text' is NoneType"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b"[" * 100_000, "JSON"),
    ],
)
@pytest.mark.parametrize("range_bytes", [1 << 20, 40])
def test_bad_lines_name_file_and_line(tmp_path, line, message, range_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' * 6 + line + b"\n" + b'{"text": "fine"}\n')
    with pytest.raises(DataError, match=message) as caught:
        read(source(path), range_bytes=range_bytes)
    assert f"{path}, line 7: " in one_line(caught)


def test_invalid_utf8_names_file_and_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nbad \xff\n")
    with pytest.raises(DataError, match=r"a\.txt, line 3: byte 14 is not valid UTF-8") as caught:
        read(source(tmp_path))
    one_line(caught)


def write_parquet(path, texts, **settings):
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path, **settings)


def test_parquet_by_row_groups(tmp_path):
    texts = [make_text(number) for number in range(100)] + [""]
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=30)
    assert len(find_units([source(tmp_path)], 1)) == 4
    assert read(source(tmp_path)) == texts
    table = pyarrow.table(
        {"words": pyarrow.array(texts).dictionary_encode(), "more": pyarrow.array(texts, "large_string")}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read(source(tmp_path, text_field="words")) == texts
    assert read(source(tmp_path, text_field="more")) == texts


def test_parquet_faults_are_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, ["a", None, "b"])
    cases = [({}, r"a\.parquet, row 2: field 'text' is NoneType")]
    cases += [
        ({"text_field": "words"}, "no column 'words'; it has 'id', 'text'"),
        ({"text_field": "id"}, "int64, not text"),
    ]
    for settings_, message in cases:
        with pytest.raises(DataError, match=message) as caught:
            read(source(path, **settings_))
        one_line(caught)
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff\xfe"], pyarrow.binary()).buffers())
    parquet.write_table(pyarrow.table({"text": bad}), path)
    with pytest.raises(DataError, match="row 1: column 'text' is not valid UTF-8") as caught:
        read(source(path))
    one_line(caught)
    write_parquet(path, [])
    with pytest.raises(DataError, match="has no rows"):
        read(source(path))
    for content in (b"PAR1 not a parquet file PAR1", b"x"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is damaged or not of the kind") as caught:
            read(source(path))
        one_line(caught)


def test_files_that_cannot_be_read_are_never_passed_over(tmp_path):
    write_corpus(tmp_path, 2)
    (tmp_path / "bad.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"bad\.txt: it is a broken link") as caught:
        read(source(tmp_path))
    one_line(caught)
    (tmp_path / "bad.txt").unlink()
    (tmp_path / "bad.txt").mkdir()
    with pytest.raises(DataError, match=r"bad\.txt is a folder"):
        read(source(tmp_path))
    (tmp_path / "bad.txt").rmdir()
    os.mkfifo(tmp_path / "bad.txt")
    with pytest.raises(DataError, match=r"bad\.txt: it is no regular file"):
        read(source(tmp_path))
    (tmp_path / "bad.txt").unlink()
    (tmp_path / "bad.txt").touch()
    with pytest.raises(DataError, match=r"bad\.txt is empty"):
        read(source(tmp_path))


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    corpus = write_corpus(tmp_path / "real", 2)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(corpus)
    assert len(read(source(tmp_path / "data"))) == 2
    (corpus / "back").symlink_to(tmp_path / "data")
    with pytest.raises(DataError, match="is a link to a folder that is already part"):
        read(source(tmp_path / "data"))


def test_patterns(tmp_path):
    write_corpus(tmp_path, 12)
    assert len(read(source(tmp_path, files=["000[0-3].txt", "001?.txt"]))) == 6
    with pytest.raises(DataError, match=r"no file in .* matches '\*\.jsonl'"):
        read(source(tmp_path, files=["*.txt", "*.jsonl"]))
    (tmp_path / "a.pdf").touch()
    with pytest.raises(DataError, match=r"'a\.pdf', which is of no supported kind"):
        read(source(tmp_path, files=["*"]))
    with pytest.raises(ConfigError, match=r"text_field has no effect"):
        read(source(tmp_path, text_field="body", files=["*.txt"]))
    with pytest.raises(ConfigError, match="files has no effect"):
        read(source(tmp_path / "0000.txt", files=["*"]))


def test_places_that_hold_nothing(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read(source(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="holds no file of a supported kind"):
        read(source(tmp_path))
    (tmp_path / "a.pdf").touch()
    with pytest.raises(DataError, match="of no supported kind"):
        read(source(tmp_path / "a.pdf"))


def test_one_file_in_two_splits_is_refused(tmp_path):
    write_corpus(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"0002\.txt is in two splits, 'train' and 'test'"):
        read(source(tmp_path), source(tmp_path / "0002.txt", split="test"))


def test_folders_of_packages():
    assert resolve("package://pipeline/data", "sources[0]").name == "data"
    with pytest.raises(DataError, match=r"'no_such_package' is not installed; install it with `pip install --no-deps"):
        resolve("package://no_such_package/data", "sources[0]")
    for path in ("package:///etc", "package://os.path/x", "package://pipeline/../../x"):
        with pytest.raises(ConfigError, match="must"):
            resolve(path, "sources[0]")


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", 5)
    units = find_units([source(path)], 1 << 20)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(DataError, match="changed from"):
        list(documents(units[0]))
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        list(documents(units[0]))


def test_every_kind_makes_the_same_tokens(tmp_path):
    texts = [make_text(number) for number in range(60)]
    write_corpus(tmp_path / "txt", 60)
    write_jsonl(tmp_path / "a.jsonl", 60)
    (tmp_path / "b.jsonl.zst").write_bytes(COMPRESS[".zst"]((tmp_path / "a.jsonl").read_bytes()))
    write_parquet(tmp_path / "c.parquet", texts, row_group_size=7)
    made = set()
    for number, name in enumerate(("txt", "a.jsonl", "b.jsonl.zst", "c.parquet")):
        manifest = prepare(config_for(tmp_path / str(number), tmp_path / name, group_bytes=10**9))
        made.add(manifest.fingerprint)
    assert len(made) == 1
    assert list(documents_of_jsonl(tmp_path / "a.jsonl", "text", 0, -1)) == texts
