"""Folders that transformers has written compute here what they compute there; what would not is refused in one line."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import cli
from pipeline.conversion.convert import convert
from pipeline.conversion.huggingface import read_folder
from pipeline.data.tokenizer import Tokenizer
from tests.conversion.support import (
    TARGETS,
    converted,
    hugging_face_logits,
    hugging_face_model,
    load,
    plain_logits,
    save_hugging_face,
)
from tests.models.cases import assert_close, random

LENGTH = 24
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
SLIDING, FULL = "sliding_attention", "full_attention"

FOLDERS = {
    "llama": ("Llama", {}),
    "llama, tied, no groups": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, one group": ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama, biases in attention": ("Llama", {"attention_bias": True}),
    "llama, biases in all": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads of another width": ("Llama", {"head_dim": 12}),
    "llama, rope_theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied, window": ("Qwen2", {"tie_word_embeddings": True, "max_window_layers": 0, **WINDOW}),
    "qwen2, window of no layer": ("Qwen2", {"max_window_layers": 3, **WINDOW}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, tied, biases": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, window in some": ("Qwen3", {"head_dim": 8, "layer_types": [SLIDING, FULL, FULL], **WINDOW}),
    "qwen3, window in all but the last": ("Qwen3", {"head_dim": 8, "layer_types": [SLIDING, SLIDING, FULL], **WINDOW}),
}


@pytest.fixture
def tokens():
    return torch.randint(300, (2, LENGTH), generator=random(1))


def make(path, name, **options):
    family, settings = FOLDERS[name]
    return save_hugging_face(hugging_face_model(family, **settings), path, **options)


def check(path, output, tokens):
    found, expected = plain_logits(converted(path, output, "transformer"), tokens), hugging_face_logits(path, tokens)
    assert expected.abs().max() > 1
    assert_close(found, expected, "logits")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_logits_of_transformers(tmp_path, tokens, name):
    check(make(tmp_path / "folder", name), tmp_path / "made", tokens)


@pytest.mark.parametrize("name", ["llama, tied, no groups", "qwen2"])
def test_several_files(tmp_path, tokens, name):
    path = make(tmp_path / "folder", name, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    check(path, tmp_path / "made", tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_of_half_precision(tmp_path, tokens, dtype):
    family, settings = FOLDERS["qwen3, tied, biases"]
    path = save_hugging_face(hugging_face_model(family, **settings).to(dtype), tmp_path / "folder")
    assert load_file(path / "model.safetensors")["model.norm.weight"].dtype == dtype
    check(path, tmp_path / "made", tokens)
    assert {tensor.dtype for tensor in load_file(tmp_path / "made/model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("name", ["mistral, window", "qwen2", "qwen3, window in some"])
@pytest.mark.parametrize("to", TARGETS)
def test_every_target(tmp_path, tokens, to, name):
    path = make(tmp_path / "folder", name)
    plain = plain_logits(converted(path, tmp_path / "plain", "transformer"), tokens)
    assert torch.equal(plain_logits(converted(path, tmp_path / "made", to), tokens), plain)


def test_an_older_config(tmp_path, tokens):
    """Before transformers 5: rope_theta by itself, rope_scaling null, num_key_value_heads left out, an old table."""
    path = make(tmp_path / "folder", "llama, tied, no groups")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    edit(path, rope_parameters=..., num_key_value_heads=..., head_dim=..., rope_theta=700, rope_scaling=None)
    expected = hugging_face_logits(path, tokens)
    made = converted(path, tmp_path / "made", "transformer")
    assert made.config.rope_base == 700
    assert_close(plain_logits(made, tokens), expected)


def test_defaults_of_the_families(tmp_path):
    """What a file leaves out is what the class of transformers takes."""
    import transformers

    left_out = [
        "num_key_value_heads",
        "head_dim",
        "rope_parameters",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
    ]
    left_out += ["layer_types", "sliding_window", "use_sliding_window", "max_window_layers"]
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        kind = getattr(transformers, f"{family}Config")
        sizes = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": kind().num_key_value_heads}
        path = save_hugging_face(hugging_face_model(family, **sizes), tmp_path / family)
        edit(path, **dict.fromkeys(left_out, ...))
        config, theirs = read_folder(path).config, kind.from_pretrained(path)
        assert config.key_value_heads == theirs.num_key_value_heads
        assert config.head_width == (theirs.head_dim if family != "Qwen2" else 2)
        assert config.rope_base == theirs.rope_parameters["rope_theta"]
        assert config.tied_head == theirs.tie_word_embeddings
        assert config.attention_window == getattr(theirs, "sliding_window", None)


def test_zero_biases_and_the_rest_are_told(tmp_path, capsys):
    for name, told in {
        "qwen2": "the source has no biases of attention's output and of feed-forward layers: they begin at zero",
        "llama, biases in attention": "the source has no biases of feed-forward layers",
        "llama": "",
    }.items():
        path = make(tmp_path / name, name)
        assert cli.main(["convert", str(path), str(tmp_path / f"made {name}"), "--to", "crt"]) == 0
        out = capsys.readouterr().out
        assert told in out
        assert ("begin at zero" in out) == bool(told)
        assert "new\n" in out
    biases = {name: value for name, value in load(tmp_path / "made qwen2").state_dict().items() if "bias" in name}
    assert not biases["blocks.0.ffn.down.bias"].any()
    assert not biases["blocks.2.attention.output.bias"].any()
    assert biases["blocks.0.attention.query_key_value.bias"].all()


def test_the_record_names_every_file(tmp_path):
    path = make(tmp_path / "folder", "llama", max_shard_size="20KB")
    convert(path, tmp_path / "made", "lrt")
    source = json.loads((tmp_path / "made/conversion.json").read_text())["source"]
    shards = {file.name for file in path.glob("*.safetensors")}
    assert set(source["files"]) == {"config.json", "tokenizer.json", "model.safetensors.index.json", *shards}
    assert (source["kind"], source["architecture"]) == ("huggingface", "LlamaForCausalLM")
    assert (tmp_path / "made/tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()


# ---------------------------------------------------------------- refusals: one line, code 2, nothing written


def edit(path, **changes):
    """Change ``config.json``; ... takes a key out."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    for name in ("llama", "llama, tied, no groups", "mistral", "qwen2"):
        make(place / name, name)
    make(place / "shards", "llama", max_shard_size="20KB")
    return place


@pytest.fixture
def refused(folders, tmp_path, capsys):
    """Return a function that damages a copy of a folder, converts it in vain, and returns the one line."""

    def run(damage, name="llama", *arguments):
        path = shutil.copytree(folders / name, tmp_path / "folder", dirs_exist_ok=True)
        damage(path)
        before = sorted(tmp_path.rglob("*"))
        assert cli.main(["convert", str(path), str(tmp_path / "deep/made"), "--to", "crt", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert sorted(tmp_path.rglob("*")) == before
        assert line.startswith("backfeed: ")
        assert len(line) < 600
        return line

    return run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, 'architectures is ["GemmaForCausalLM"]; it must be one of Llama'),
        ({"architectures": ["LlamaModel"]}, 'architectures is ["LlamaModel"]'),
        ({"architectures": ["LlamaForCausalLM", "QwenForCausalLM"]}, "it must be one of"),
        ({"architectures": {"x": 1}}, "it must be one of"),
        ({"architectures": ...}, "architectures is not set"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map asks for code of the folder's own"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only silu is converted'),
        ({"hidden_act": ...}, "hidden_act is not set"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "only plain rotary positions"),
        ({"rope_parameters": {"rope_type": "default", "factor": 8.0}}, "only plain rotary positions"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}, "only plain rotary positions"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]; it must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "only heads that are rotated whole"),
        ({"partial_rotary_factor": 0.5}, "only heads that are rotated whole"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "model.rope_base is 0.5"),
        ({"hidden_size": "32"}, 'hidden_size is "32"; it must be an integer of at least 1'),
        ({"hidden_size": True}, "hidden_size is true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": ...}, "num_attention_heads is not set"),
        ({"num_key_value_heads": 3}, "kv_heads=3"),
        ({"head_dim": 7}, "rotary positions need an even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; it must be a number above 0"),
        ({"rms_norm_eps": 10**301}, "it must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes"; it must be true or false'),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, but lm_head.weight is not"),
        ({"hidden_size": 64}, "model.embed_tokens.weight has shape [307, 32]; config.json asks for [307, 64]"),
        ({"num_hidden_layers": 4}, "the tensor model.layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 2}, "the tensor model.layers.2"),
        ({"attention_bias": True}, "the tensor model.layers.0.self_attn.q_proj.bias is missing"),
        ({"vocab_size": 200}, "config.json asks for [200, 32]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_configs_that_are_refused(refused, changes, message):
    assert message in refused(lambda path: edit(path, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {**WINDOW, "layer_types": ..., "max_window_layers": 1}, "only a window in all layers, or in all but"),
        ("qwen2", {**WINDOW, "layer_types": [FULL, SLIDING, SLIDING]}, "only a window in all layers, or in all but"),
        ("qwen2", {**WINDOW, "layer_types": [FULL]}, "it must be 3 times"),
        ("qwen2", {**WINDOW, "layer_types": ["chunked_attention"] * 3}, "it must be 3 times"),
        ("qwen2", {"layer_types": [SLIDING] * 3}, "but there is no window"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be an integer of at least 1"),
        ("llama, tied, no groups", {"tie_word_embeddings": ...}, "the tensor lm_head.weight is missing"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_windows_and_heads_that_are_refused(refused, name, changes, message):
    assert message in refused(lambda path: edit(path, **changes), name)


def write(name, content):
    return lambda path: (path / name).write_text(content)


def change_weights(**changes):
    def run(path):
        weights = {**load_file(path / "model.safetensors"), **changes}
        save_file({name: value for name, value in weights.items() if value is not None}, path / "model.safetensors")

    return run


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (write("config.json", "{"), "config.json holds no JSON object"),
        (write("config.json", "[" * 100_000), "config.json holds no JSON object"),
        (write("config.json", "[]"), "config.json holds no JSON object"),
        (write("tokenizer.json", "{}"), "is not a file of the tokenizers library"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json: no such file"),
        (lambda path: (path / "config.json").unlink(), "is neither a run folder"),
        (lambda path: (path / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (lambda path: os.truncate(path / "model.safetensors", 5000), "model.safetensors is damaged"),
        (write("model.safetensors", "version https://git-lfs.github.com/spec/v1"), "model.safetensors is damaged"),
        (change_weights(**{"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "model.norm.weight is of type I8"),
        (change_weights(**{"model.norm.weight": None}), "the tensor model.norm.weight is missing"),
        (change_weights(**{"model.layers.0.mlp.gate_proj.scale": torch.ones(1)}), "gate_proj.scale is none of the"),
        (change_weights(**{"model.norm.weight": torch.ones(31)}), "model.norm.weight has shape [31]"),
    ],
)
def test_damage(refused, damage, message):
    assert message in refused(damage)


def test_more_ids_than_rows(refused):
    big = Tokenizer.train(["a b c d e f g " * 9, *("x" * n for n in range(1, 90))], 340).content
    if Tokenizer(big).vocab_size <= 307:
        big = Tokenizer.train([" ".join(f"word{n}" for n in range(200))], 340).content
    assert "but the embedding has 307 rows" in refused(lambda path: (path / "tokenizer.json").write_bytes(big))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "pytorch_model-00001-of-00002.bin"])
def test_pickles_are_not_read(refused, name):
    def damage(path):
        (path / "model.safetensors").rename(path / name)

    line = refused(damage)
    assert name in line
    assert "may run code when it is read" in line


@pytest.mark.parametrize(
    "place", ["../folder/model.safetensors", "/etc/passwd", "x/model.safetensors", "model.bin", "..", 7, None]
)
def test_an_index_stays_in_its_folder(refused, place):
    def damage(path):
        file = path / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        index["weight_map"]["model.norm.weight"] = place
        file.write_text(json.dumps(index))

    assert "which is no safetensors file of the folder" in refused(damage, "shards")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ({"weight_map": {"x": "absent.safetensors"}}, "absent.safetensors is missing"),
        ({"weight_map": {"x": "model-00001-of-00010.safetensors"}}, "does not hold x"),
    ],
)
def test_an_index_that_is_wrong(refused, index, message):
    assert message in refused(write("model.safetensors.index.json", json.dumps(index)), "shards")


def test_links_of_a_cache_are_followed(folders, tmp_path):
    """Hugging Face's cache keeps files elsewhere, and links to them."""
    (tmp_path / "snapshot").mkdir()
    for file in (folders / "llama").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert convert(tmp_path / "snapshot", tmp_path / "made", "crt").drawn > 0


def test_no_code_is_run(refused):
    def damage(path):
        for name in ("modeling_llama.py", "configuration_llama.py", "__init__.py"):
            (path / name).write_text(f"open({str(path / 'executed')!r}, 'w')")
        edit(path, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})

    refused(damage)


def test_a_step_is_of_no_use(refused):
    assert "--step 3 is of no use" in refused(lambda path: None, "llama", "--step", "3")
