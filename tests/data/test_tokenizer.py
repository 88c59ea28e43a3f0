import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import tokenizer as module
from pipeline.data.manifest import Manifest
from pipeline.data.prepare import TokenizerConfig, prepare
from pipeline.data.tokenizer import Tokenizer, load_token_bytes
from pipeline.errors import ConfigError, DataError
from tests.data.small_corpora import config_for, make_text

TRAINED = Tokenizer.train([make_text(number) for number in range(40)], 350)
BYTES = Tokenizer.bytes_tokenizer()
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.sampled_from(["<|bos|>", "the ", "🙂", "\n", " ", "ñ", "don't", "\ufffd"])).map("".join),
)


@pytest.mark.parametrize("tokenizer", [TRAINED, BYTES], ids=["bpe", "bytes"])
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_round_trip_bytes_and_special_tokens(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode("utf-8"))
    assert tokenizer.document_id not in ids
    assert tokenizer.exact_bytes
    assert tokenizer.token_bytes[tokenizer.document_id] == 0
    assert tokenizer.decode([tokenizer.document_id, *ids, tokenizer.document_id]) == text


@pytest.mark.parametrize("tokenizer", [TRAINED, BYTES], ids=["bpe", "bytes"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stream_decoder_gives_the_same_text_in_whole_characters(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    decoder = tokenizer.stream_decoder()
    parts = [decoder.push(number) for number in ids]
    assert "".join([*parts, decoder.flush()]) == tokenizer.decode(ids)
    whole = data.draw(texts)
    decoder = tokenizer.stream_decoder()
    shown = "".join(decoder.push(number) for number in tokenizer.encode(whole))
    assert shown == whole
    assert decoder.flush() == ""


def test_training_is_deterministic_and_counts_the_document_token():
    again = Tokenizer.train([make_text(number) for number in range(40)], 350)
    assert again.sha256 == TRAINED.sha256
    assert TRAINED.vocab_size == 350
    assert len(TRAINED.token_bytes) == 350


def test_long_texts_are_cut_without_a_change(monkeypatch):
    text = " ".join(make_text(number) for number in range(30))
    whole = TRAINED.encode(text)
    monkeypatch.setattr(module, "_PIECE", 50)
    assert len(list(module._cut(text))) > 20
    assert TRAINED.encode(text) == whole


def write_tokenizer(path, special=("<|endoftext|>",), ordinary=(), **changes):
    inner = tokenizers.Tokenizer.from_str(TRAINED.content.decode())
    content = json.loads(inner.to_str())
    content["added_tokens"] = []
    content["model"]["vocab"] = {k: v for k, v in content["model"]["vocab"].items() if k != "<|bos|>"}
    content.update(changes)
    inner = tokenizers.Tokenizer.from_str(json.dumps(content))
    inner.add_special_tokens(list(special))
    inner.add_tokens(list(ordinary))
    inner.save(str(path))
    return path


def test_a_file_with_truncation_and_padding_gives_whole_texts(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.enable_truncation(4)
    inner.enable_padding(length=16)
    inner.save(str(path))
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.decode(tokenizer.encode("the war and the peace of the treasury")).endswith("treasury")


def test_the_usual_document_token_is_found(tmp_path):
    tokenizer = Tokenizer.from_file(write_tokenizer(tmp_path / "tokenizer.json", special=("<pad>", "<|endoftext|>")))
    assert tokenizer.document_token == "<|endoftext|>"
    assert tokenizer.document_id not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.encode("<pad>") != [tokenizer.document_id - 1]


def test_an_unusual_document_token_must_be_named(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", special=("<doc>",))
    with pytest.raises(ConfigError, match=r"none of the usual .*tokenizer\.document_token"):
        Tokenizer.from_file(path)
    assert Tokenizer.from_file(path, "<doc>").document_token == "<doc>"
    with pytest.raises(ConfigError, match="not in the vocabulary"):
        Tokenizer.from_file(path, "<other>")


def test_a_document_token_that_text_can_produce_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", special=(), ordinary=("<|bos|>",))
    with pytest.raises(ConfigError, match="ordinary text"):
        Tokenizer.from_file(path)


def test_other_kinds_of_tokenizer_work_with_estimated_bytes(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<unk>"], show_progress=False)
    inner.train_from_iterator(["the cat sat on the mat"] * 10, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert not tokenizer.exact_bytes
    ids = tokenizer.encode("the cat sat")
    assert abs(int(tokenizer.token_bytes[ids].sum()) - len("the cat sat")) <= 1
    decoder = tokenizer.stream_decoder()
    assert "".join(decoder.push(number) for number in ids) + decoder.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not") as caught:
        Tokenizer.from_file(path)
    assert "\n" not in str(caught.value)


def test_ids_outside_the_vocabulary_are_refused():
    for tokenizer in (TRAINED, BYTES):
        with pytest.raises(DataError, match="outside the vocabulary"):
            tokenizer.decode([tokenizer.vocab_size])
        with pytest.raises(DataError, match="outside the vocabulary"):
            tokenizer.stream_decoder().push(-1)


def test_a_tokenizer_that_does_not_fit_the_shards_is_refused(corpus, tmp_path):
    output = tmp_path / "data"
    prepare(config_for(output, corpus, tokenizer=TokenizerConfig(kind="bpe", vocab_size=300)))
    tokenizer = Tokenizer.load(output)
    manifest = Manifest.load(output)
    assert np.array_equal(load_token_bytes(manifest), tokenizer.token_bytes)
    (output / "tokenizer.json").write_bytes(TRAINED.content)
    with pytest.raises(DataError, match="does not fit the shards"):
        Tokenizer.load(output)
    (output / "token_bytes.bin").write_bytes(b"1234")
    with pytest.raises(DataError, match="damaged"):
        load_token_bytes(manifest)
