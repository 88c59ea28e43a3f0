"""Layers of a configuration: a YAML file or a ``key=value`` override as plain data, with the place of every key.

Places are kept so that a mistake found after merging can still be told with its file and line. Scalars are read by
OmegaConf's rules (``1e-4`` is a number, a date is text) with a loader of our own, since OmegaConf's keeps no lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pipeline.errors import ConfigError

COMMAND_LINE = "command line"

_MERGE_TAG = "tag:yaml.org,2002:merge"
_MAPPING_TAG = "tag:yaml.org,2002:map"
_SEQUENCE_TAG = "tag:yaml.org,2002:seq"
_FLOAT_TAG = "tag:yaml.org,2002:float"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"

# As in OmegaConf: unlike YAML 1.1, an exponent needs neither a point before it nor a sign.
_FLOAT = re.compile(
    r"""^(?:
     [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    """Safe loader with OmegaConf's scalars."""


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes what ``_Loader`` would not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal objects out twice rather than as anchors and aliases."""
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Write text with line breaks of Unicode in double quotes: other styles would make plain line breaks of them."""
    style = '"' if any(mark in text for mark in "\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TIMESTAMP_TAG, _FLOAT_TAG)]
        for first, resolvers in _kind.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+0123456789."))


@dataclass
class Layer:
    """One source of settings.

    Attributes:
        data: the settings as nested dictionaries, lists and scalars.
        places: dotted key to where it stands: ``file:line`` or the command line.
    """

    data: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)


def dotted(parent: str, key: object) -> str:
    """Return the dotted name of ``key`` within ``parent`` (empty at the root)."""
    return f"{parent}.{key}" if parent else str(key)


def one_line(text: str) -> str:
    """Return ``text`` with every run of white space as one blank."""
    return " ".join(text.split())


def read_file(path: Path | str) -> Layer:
    """Return the settings of a YAML file; an empty file has none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; a YAML file is needed") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a YAML file: byte {error.start} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise ConfigError(one_line(f"{path} cannot be read: {error}")) from None
    builder = _Builder(str(path))
    data = builder.parse(text, empty={})
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {describe(data)} at its top level; it must be sections of key: value")
    return Layer(data, builder.places)


def read_override(text: str) -> Layer:
    """Return the setting of one ``key=value`` of the command line, with dots in the key for nested sections."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(one_line(f"{COMMAND_LINE}: {text!r} is not an override; write key=value"))
    if not all(key.split(".")):
        raise ConfigError(one_line(f"{COMMAND_LINE}: {text!r} has an empty key; write section.key=value"))
    builder = _Builder(None, text)
    data = builder.parse(value, key)
    parts = key.split(".")
    for depth in range(len(parts)):
        builder.places[".".join(parts[: depth + 1])] = COMMAND_LINE
    for part in reversed(parts):
        data = {part: data}
    return Layer(data, builder.places)


def merge(base: Any, layer: Any) -> Any:
    """Return ``base`` with ``layer`` on top: mappings key by key, everything else (lists too) replaced."""
    if not isinstance(base, Mapping) or not isinstance(layer, Mapping):
        return layer
    return {**base, **{key: merge(base[key], value) if key in base else value for key, value in layer.items()}}


def scalar(text: str) -> Any:
    """Return what ``text`` would be as an unquoted YAML value; text that is not valid YAML stays as it is."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return text


def dump(data: Any, *, flow: bool = False) -> str:
    """Return plain data as YAML that this module reads back as it was; ``flow`` puts it on one line."""
    width = float("inf") if flow else 120
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=width
    )
    return text.removesuffix("...\n").rstrip("\n") if flow else text


def describe(value: Any) -> str:
    """Return what a value is, in words for a message."""
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return f"the text {shortened(repr(value))}"
    return "null" if value is None else shortened(dump(value, flow=True))


def shortened(text: str, limit: int = 60) -> str:
    """Return ``text``, cut in its middle where it is longer than ``limit``."""
    half = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


class _Builder:
    """Turns YAML text into plain data and notes the place of every key.

    Args:
        file: name of the file, or None for an override.
        override: the whole override, for messages.
    """

    def __init__(self, file: str | None, override: str = "") -> None:
        self.file = file
        self.override = override
        self.places: dict[str, str] = {}

    def parse(self, text: str, path: str = "", empty: Any = None) -> Any:
        """Return the plain data of ``text``, whose dotted key is ``path``; ``empty`` where it holds nothing."""
        try:
            self._loader = _Loader(text)
            node = self._loader.get_single_node()
            return empty if node is None else self._build(node, path)
        except yaml.reader.ReaderError as error:
            self._invalid(f"character {error.position} ({error.character:#x}) is not allowed", None)
        except yaml.MarkedYAMLError as error:
            self._invalid(error.problem or error.context or "", error.problem_mark or error.context_mark)
        except RecursionError:
            self._invalid("it is nested too deeply, or an anchor holds itself", None)

    def _build(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING_TAG:
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQUENCE_TAG:
            return self._sequence(node, path)
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                data = {**self._merged(value_node, path), **data}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self._key(key_node)
            if key in lines:
                self._fail(f"{dotted(path, key)} is set twice, first in line {lines[key]}", key_node.start_mark)
            lines[key] = key_node.start_mark.line + 1
            data[key] = self._child(value_node, dotted(path, key), key_node.start_mark)
        return data

    def _merged(self, node: yaml.Node, path: str) -> dict[str, Any]:
        """Return the keys that ``<<: *anchor`` or ``<<: [*first, *second]`` brings in; the first one wins."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        data: dict[str, Any] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                self._fail("<< needs a mapping, or a list of mappings", source.start_mark)
            data.update(self._mapping(source, path))
        return data

    def _sequence(self, node: yaml.SequenceNode, path: str) -> list[Any]:
        return [self._child(item, dotted(path, index), item.start_mark) for index, item in enumerate(node.value)]

    def _child(self, node: yaml.Node, path: str, mark: yaml.Mark) -> Any:
        self.places[path] = self._place(mark)
        return self._build(node, path)

    def _key(self, node: yaml.Node) -> str:
        """Return a key as it is written, so that ``on`` and ``1`` are keys of that name."""
        if not isinstance(node, yaml.ScalarNode):
            self._fail("a key must be text", node.start_mark)
        key = str(node.value)
        if not key.strip():
            self._fail("a key is empty", node.start_mark)
        if "." in key:
            nested = key.replace(".", ": {") + ": ..." + "}" * key.count(".")
            self._fail(f"the key {shortened(repr(key))} holds a dot; write {shortened(nested)}", node.start_mark)
        return key

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self._loader.construct_object(node, deep=True)
        except ValueError as error:
            self._fail(str(error), node.start_mark)
        if not isinstance(value, str | bool | int | float | None):
            self._fail(f"values of YAML type {node.tag} are not supported", node.start_mark)
        return value

    def _place(self, mark: yaml.Mark | None, *, column: bool = False) -> str:
        if self.file is None:
            return COMMAND_LINE
        if mark is None:
            return self.file
        return f"{self.file}:{mark.line + 1}:{mark.column + 1}" if column else f"{self.file}:{mark.line + 1}"

    def _fail(self, what: str, mark: yaml.Mark | None) -> NoReturn:
        where = self._place(mark)
        raise ConfigError(one_line(f"{where}: {self.override}: {what}" if self.override else f"{where}: {what}"))

    def _invalid(self, problem: str, mark: yaml.Mark | None) -> NoReturn:
        where = self._place(mark, column=True)
        what = f"{self.override} is not valid YAML" if self.override else "not valid YAML"
        raise ConfigError(one_line(f"{where}: {what}: {problem}")) from None
