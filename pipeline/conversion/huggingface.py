"""A folder as Hugging Face's ``save_pretrained`` writes it, read as a plain transformer.

Read are ``config.json``, the tensors (safetensors alone, in one file or with an index) and ``tokenizer.json``. Nothing
in the folder is executed, and no name in it leads out of the folder. Whatever would make the model compute something
else than our transformer is refused, so what is not refused is exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline.conversion.settings import shapes
from pipeline.conversion.source import Part, Source, Stored, Zeros, stored
from pipeline.conversion.vocabulary import vocabulary
from pipeline.errors import ConfigError, DataError
from pipeline.files import describe_os_error
from pipeline.models.transformer import TransformerConfig

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl")
_TABLE = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old files hold the rotation's table
_SLIDING, _FULL = "sliding_attention", "full_attention"

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Family:
    """What one class of transformers does beyond what its ``config.json`` says.

    Attributes:
        defaults: values of settings that a file leaves out.
        qkv_bias: queries, keys and values have biases: always, never, or (None) as ``attention_bias`` says.
        output_bias: the output of attention has one, likewise.
        ffn_bias: the feed-forward layers have some, likewise as ``mlp_bias`` says.
        qk_norm: heads of queries and keys are normed, before the rotation.
        layer_types: each layer may have a window of its own; otherwise ``sliding_window`` is for all.
        windows: it has windows at all.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    ffn_bias: bool | None = False
    qk_norm: bool = False
    layer_types: bool = False
    windows: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, ffn_bias=None),
    "MistralForCausalLM": Family({"num_key_value_heads": 8, "sliding_window": 4096}, windows=True),
    "Qwen2ForCausalLM": Family({"num_key_value_heads": 32}, qkv_bias=True, windows=True, layer_types=True),
    "Qwen3ForCausalLM": Family(
        {"num_key_value_heads": 32, "head_dim": 128},
        qkv_bias=None,
        output_bias=None,
        qk_norm=True,
        windows=True,
        layer_types=True,
    ),
}


class Biases(NamedTuple):
    """Which linear layers have biases.

    Attributes:
        qkv: queries, keys and values.
        output: attention's output.
        ffn: the feed-forward layers.
    """

    qkv: bool
    output: bool
    ffn: bool


class HuggingFaceConfig:
    """``config.json``, read with care.

    Args:
        path: the file.

    Attributes:
        values: what it holds.
        family: class of the model, whose defaults stand in for what the file leaves out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)
        self.family = self._find_family()

    def _find_family(self) -> Family:
        names = self.values.get("architectures")
        name = names[0] if isinstance(names, list) and len(names) == 1 else names
        if not isinstance(name, str) or name not in FAMILIES:
            raise self.refuse("architectures", names, f"it must be one of {', '.join(FAMILIES)}")
        if self.values.get("auto_map") is not None:
            raise DataError(f"{self.path}: auto_map asks for code of the folder's own, which is never run")
        return FAMILIES[name]

    def refuse(self, key: str, value: Any, reason: str) -> DataError:
        """Return one line on a setting that cannot be converted."""
        shown = json.dumps(value) if key in self.values else "not set"
        return DataError(f"{self.path}: {key} is {shown if len(shown) < 200 else shown[:200] + ' ...'}; {reason}")

    def get(self, key: str) -> Any:
        """Return a value, the family's default where the key is missing, or None."""
        return self.values.get(key, self.family.defaults.get(key))

    def integer(self, key: str, otherwise: int | None = None) -> int:
        """Return a number of something; ``otherwise`` where there is none."""
        value = self.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not int or value < 1:
            raise self.refuse(key, value, "it must be an integer of at least 1")
        return value

    def number(self, key: str, value: Any) -> float:
        """Return ``value`` of the setting ``key`` as a positive number."""
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise self.refuse(key, value, "it must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a switch, off where it is not set."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self.refuse(key, value, "it must be true or false")
        return bool(value)

    def bias(self, own: bool | None, key: str) -> bool:
        """Return whether a kind of layer has biases: ``own`` if the family knows, else what ``key`` says."""
        return self.flag(key) if own is None else own


def read_folder(path: Path) -> Source:
    """Return the plain transformer in a folder of Hugging Face's.

    Raises:
        DataError: it is damaged, incomplete, or not exactly a transformer of ours.
    """
    config = HuggingFaceConfig(path / CONFIG)
    settings, biased = read_settings(config)
    files = weight_files(path)
    tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
    made = recipe(settings, biased, tensors, path)
    try:
        content = (path / TOKENIZER).read_bytes()
    except OSError as error:
        raise DataError(f"{describe_os_error(error, path / TOKENIZER)}; save the fast tokenizer there") from None
    last = max(vocabulary(content, str(path / TOKENIZER)).values(), default=-1)
    assert settings.vocab_size is not None
    if last >= settings.vocab_size:
        raise DataError(f"{path / TOKENIZER} has ids up to {last}, but the embedding has {settings.vocab_size} rows")
    named = [CONFIG, TOKENIZER, *([INDEX] if len(files) > 1 or WEIGHTS not in files else []), *files]
    remarks = []
    if settings.linear_bias and not all(biased):
        lacking = zip(("queries, keys and values", "attention's output", "feed-forward layers"), biased, strict=True)
        kinds = " and of ".join(kind for kind, has in lacking if not has)
        remarks.append(f"the source has no biases of {kinds}: they begin at zero, and are trained from then on")
    return Source(
        path=path,
        origin={"kind": "huggingface", "architecture": config.values["architectures"][0]},
        config=settings,
        tokenizer=content,
        document_token=None,
        tensors=made,
        files={name: path / name for name in named},
        remarks=tuple(remarks),
    )


def read_settings(config: HuggingFaceConfig) -> tuple[TransformerConfig, Biases]:
    """Return our settings, and which linear layers have biases."""
    if config.get("quantization_config") is not None:
        raise DataError(f"{config.path}: quantization_config is set; only float weights are converted")
    activation = config.get("hidden_act")
    if activation not in ("silu", "swish"):
        raise config.refuse("hidden_act", activation, "only silu is converted")
    heads, layers, width = (config.integer(key) for key in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
    family = config.family
    biased = Biases(
        qkv=config.bias(family.qkv_bias, "attention_bias"),
        output=config.bias(family.output_bias, "attention_bias"),
        ffn=config.bias(family.ffn_bias, "mlp_bias"),
    )
    window, full_every = read_windows(config, layers)
    settings = TransformerConfig(
        architecture="transformer",
        vocab_size=config.integer("vocab_size"),
        width=width,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", max(1, width // heads)),
        ffn_width=config.integer("intermediate_size"),
        layers=layers,
        norm="rms",
        norm_eps=config.number("rms_norm_eps", config.get("rms_norm_eps")),
        ffn="swiglu",
        linear_bias=any(biased),
        qk_norm=family.qk_norm,
        rope="geometric",
        rope_base=read_rope_base(config),
        tied_head=config.flag("tie_word_embeddings"),
        attention_window=window,
        full_attention_every=full_every,
    )
    try:
        settings.check()
    except ConfigError as error:
        raise DataError(f"{config.path}: {error}") from None
    return settings, biased


def read_rope_base(config: HuggingFaceConfig) -> float:
    """Return the base of the rotary wavelengths; DataError where they are scaled."""
    base: Any = None
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise config.refuse(key, given, "it must be an object")
        kind = given.get("rope_type", given.get("type", "default"))
        plain = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if kind != "default" or set(given) - plain:
            raise config.refuse(key, given, "only plain rotary positions (rope_type default) are converted")
        if given.get("partial_rotary_factor", 1) != 1:
            raise config.refuse(key, given, "only heads that are rotated whole are converted")
        base = given.get("rope_theta", base)
    if config.get("partial_rotary_factor") not in (None, 1):
        value = config.get("partial_rotary_factor")
        raise config.refuse("partial_rotary_factor", value, "only heads that are rotated whole are converted")
    if base is None:
        base = config.get("rope_theta")
    return config.number("rope_theta", 10_000.0 if base is None else base)


def read_windows(config: HuggingFaceConfig, layers: int) -> tuple[int | None, int]:
    """Return ``attention_window`` and ``full_attention_every``; DataError where they cannot say the same."""
    family = config.family
    if not family.windows:
        return None, 0
    used = config.flag("use_sliding_window") if family.layer_types else True
    window = config.integer("sliding_window") if used and config.get("sliding_window") is not None else None
    if not family.layer_types:
        return window, 0
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 28) if window is not None else layers
        kinds = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise config.refuse("layer_types", kinds, f"it must be {layers} times {_FULL} or {_SLIDING}")
    if _SLIDING not in kinds:
        return None, 0
    if window is None:
        raise config.refuse("layer_types", kinds, "but there is no window (use_sliding_window, sliding_window)")
    for every in (0, *range(2, layers + 1)):
        settings = TransformerConfig(layers=layers, attention_window=window, full_attention_every=every)
        if [_FULL if settings.window(layer) is None else _SLIDING for layer in range(layers)] == kinds:
            return window, every
    raise config.refuse("layer_types", kinds, "only a window in all layers, or in all but every n-th, is converted")


def weight_files(path: Path) -> dict[str, dict[str, Stored]]:
    """Return the tensors of each safetensors file, by file name; content not yet read.

    Raises:
        DataError: they are missing, damaged, or of a kind that is not read.
    """
    if (path / WEIGHTS).is_file():
        return {WEIGHTS: stored(path / WEIGHTS)}
    if not (path / INDEX).is_file():
        pickles = sorted(found.name for pattern in _PICKLES for found in path.glob(pattern))
        if pickles:
            raise DataError(
                f"{path / pickles[0]} may run code when it is read, so it is not; save the model as safetensors"
            )
        raise DataError(f"{path} holds neither {WEIGHTS} nor {INDEX}")
    places = read_json(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise DataError(f"{path / INDEX} has no weight_map; the folder is damaged")
    for name, file in places.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise DataError(
                f"{path / INDEX}: {name} lies in {json.dumps(file)}, which is no safetensors file of the folder"
            )
    found: dict[str, dict[str, Stored]] = {}
    for file in sorted(set(places.values())):
        there = stored(path / file)
        wanted = [name for name, place in places.items() if place == file]
        lost = [name for name in wanted if name not in there]
        if lost:
            raise DataError(f"{path / file} does not hold {lost[0]}, which {INDEX} says; the folder is damaged")
        found[file] = {name: there[name] for name in wanted}
    return found


def recipe(
    settings: TransformerConfig, biased: Biases, tensors: Mapping[str, Stored], path: Path
) -> dict[str, tuple[Part, ...]]:
    """Return what each tensor of our state dict is made of.

    Raises:
        DataError: a tensor is missing, of another shape than the settings say, or one too many.
    """
    made: dict[str, tuple[Part, ...]] = {}
    used: set[str] = set()
    expected = shapes(settings)
    for name, sources in names(settings, biased):
        parts: list[Part] = []
        for source, rows in sources:
            shape = (rows, *expected[name][1:])
            if source is None:
                parts.append(Zeros(shape))
                continue
            if source not in tensors:
                raise DataError(f"{path}: the tensor {source} is missing")
            if tensors[source].shape != shape:
                raise DataError(
                    f"{path}: {source} has shape {list(tensors[source].shape)}; {CONFIG} asks for {list(shape)}"
                )
            parts.append(tensors[source])
            used.add(source)
        made[name] = tuple(parts)
    assert made.keys() == expected.keys()
    if settings.tied_head and HEAD in tensors:
        if not torch.equal(tensors[HEAD].read(), tensors[EMBEDDING].read()):
            raise DataError(f"{path}: tie_word_embeddings is true, but {HEAD} is not {EMBEDDING}")
        used.add(HEAD)
    strangers = [name for name in tensors if name not in used and not _TABLE.fullmatch(name)]
    if strangers:
        raise DataError(f"{path}: the tensor {strangers[0]} is none of the architecture's")
    return made


def names(settings: TransformerConfig, biased: Biases) -> Iterator[tuple[str, list[tuple[str | None, int]]]]:
    """Yield each name of our state dict, and Hugging Face's names for its parts with the rows of each; None: zeros."""
    assert settings.vocab_size is not None
    width, hidden, head_dim = settings.width, settings.hidden_width, settings.head_width
    queries, keys = settings.heads * head_dim, settings.key_value_heads * head_dim
    yield "embedding.weight", [(EMBEDDING, settings.vocab_size)]
    yield "readout_layer.norm.weight", [("model.norm.weight", width)]
    if not settings.tied_head:
        yield "readout_layer.head.weight", [(HEAD, settings.vocab_size)]
    for layer in range(settings.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield f"{ours}.attention_norm.weight", [(f"{theirs}.input_layernorm.weight", width)]
        yield f"{ours}.ffn_norm.weight", [(f"{theirs}.post_attention_layernorm.weight", width)]
        if settings.qk_norm:
            for name in ("query", "key"):
                yield f"{ours}.head_norms.{name}.weight", [(f"{theirs}.self_attn.{name[0]}_norm.weight", head_dim)]
        for kind in ("weight", "bias") if settings.linear_bias else ("weight",):
            for name, has, parts in (
                ("attention.query_key_value", biased.qkv, (("q", queries), ("k", keys), ("v", keys))),
                ("attention.output", biased.output, (("o", width),)),
                ("ffn.gate_up", biased.ffn, (("gate", hidden), ("up", hidden))),
                ("ffn.down", biased.ffn, (("down", width),)),
            ):
                module = "self_attn" if name.startswith("attention") else "mlp"
                is_there = has or kind == "weight"
                yield (
                    f"{ours}.{name}.{kind}",
                    [(f"{theirs}.{module}.{part}_proj.{kind}" if is_there else None, rows) for part, rows in parts],
                )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; DataError where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(describe_os_error(error, path)) from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object; the folder is damaged")
    return found
