"""Configurations: YAML files and overrides in, typed dataclasses out, and back to YAML.

OmegaConf resolves the interpolations. Types are checked by ``reader`` and strictly, because OmegaConf converts
in silence (the text ``"5"`` to a number, a number to text) and knows neither the line of a value nor sections whose
dataclass is chosen by a name they hold (``choices.Choice``). Each mistake is one ``ConfigError`` of one line.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config_files.layers import dotted, dump, merge, one_line, read_file, read_override
from pipeline.config_files.reader import Reader, defaults, leaves, plain
from pipeline.errors import ConfigError
from pipeline.files import write_atomically

T = TypeVar("T")

Scalar = bool | int | float | str | None


class _Absent:
    """Stands for the value of a key that a configuration does not have."""

    def __repr__(self) -> str:
        return "(not set)"


ABSENT = _Absent()


def load(schema: type[T], files: Sequence[Path | str], overrides: Sequence[str] = ()) -> T:
    """Return the configuration that YAML files and overrides describe.

    Args:
        schema: the dataclass of the whole configuration.
        files: YAML files, merged left to right: sections key by key, lists and values replaced.
        overrides: ``key=value`` with dotted keys and YAML values, applied last.

    Raises:
        ConfigError: any mistake, in one line with the key and where it was set.
    """
    given: dict[str, Any] = {}
    places: dict[str, str] = {}
    for layer in [*map(read_file, files), *map(read_override, overrides)]:
        given = merge(given, layer.data)
        places.update(layer.places)
    base = defaults(schema, given)
    tree = _resolve(merge(base, given), places)
    config = Reader(places, [key for key, _ in leaves(base)]).read(schema, tree)
    _check(config, places)
    return typing.cast(T, config)


def _resolve(tree: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """Return ``tree`` with its interpolations resolved, and add them to the places of their keys."""
    found = {key: text for key, text in leaves(tree, lists=True) if isinstance(text, str) and "${" in text}
    if not found:
        return tree
    for key, text in found.items():
        places[key] = f"{places.get(key, 'default')}, from {text}"
    try:
        return typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(tree), resolve=True))
    except OmegaConfBaseException as error:
        key = re.sub(r"\[(\d+)\]", r".\1", str(error.full_key or ""))
        where = f"{key} ({places[key]})" if key in places else key
        reason = str(error).partition("\n")[0]
        raise ConfigError(one_line(f"{where} cannot be resolved: {reason}")) from None


def _check(value: Any, places: Mapping[str, str]) -> None:
    """Call ``check`` of every dataclass, the inner ones first, and add to a complaint where its key was set."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check(item, places)
        return
    if not dataclasses.is_dataclass(value):
        return
    for field in dataclasses.fields(value):
        _check(getattr(value, field.name), places)
    check = getattr(value, "check", None)
    if check is None:
        return
    try:
        check()
    except ConfigError as error:
        message = one_line(str(error))
        key = message.partition(" ")[0]
        if key not in places:
            raise ConfigError(message) from error
        raise ConfigError(f"{key} ({places[key]}){message.removeprefix(key)}") from error


def to_yaml(config: Any) -> str:
    """Return the whole configuration as YAML; loading it gives an equal one."""
    return dump(_escaped(plain(config)))


def _escaped(value: Any) -> Any:
    """Return plain data with ``${`` in text marked as no interpolation, and the backslashes before it doubled."""
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def save(config: Any, path: Path | str) -> None:
    """Write the whole configuration to a YAML file, all of it or nothing."""
    write_atomically(Path(path), to_yaml(config))


def differences(first: Any, second: Any) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value in ``first``, value in ``second``) wherever two configurations differ.

    A key that only one of them has, because another choice was made or an entry added, is ABSENT in the other.
    """
    return list(_differences(plain(first), plain(second), ""))


def _differences(first: Any, second: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    sides = [side for side in (first, second) if side is not ABSENT]
    if all(isinstance(side, Mapping) for side in sides) and any(sides):
        for key in dict.fromkeys(key for side in sides for key in side):
            inner = [ABSENT if side is ABSENT else side.get(key, ABSENT) for side in (first, second)]
            yield from _differences(inner[0], inner[1], dotted(path, key))
    elif first != second:
        yield path, first, second


def is_changeable(key: str, allowed: Sequence[str]) -> bool:
    """Return whether a dotted key is one of ``allowed`` or lies within one of them."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in allowed)


def flatten(config: Any) -> dict[str, Scalar]:
    """Return dotted keys and scalars, for experiment trackers; lists and empty mappings become JSON text."""
    return {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
        for key, value in leaves(plain(config))
    }
