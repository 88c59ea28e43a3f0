"""Plain data into dataclasses: every type checked, every mistake told with its key, its place and what is right."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from pathlib import Path
from typing import Any, Literal, Union

from omegaconf import MISSING

from pipeline.choices import CHOICE, Choice
from pipeline.config_files.documentation import field_documentation
from pipeline.config_files.layers import COMMAND_LINE, describe, dotted, dump, one_line, scalar
from pipeline.errors import ConfigError

Field = dataclasses.Field[Any]

_EXACT_FLOATS = 2**53  # up to here every whole number is a float of its own
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "text (a path)",
    types.NoneType: "null",
    Any: "any value",
}


# The schema: dataclasses and their fields


def fields_of(schema: type) -> dict[str, Field]:
    """Return the fields that a configuration may set, by name, in order."""
    return {item.name: item for item in dataclasses.fields(schema) if item.init}


@functools.cache
def types_of(schema: type) -> dict[str, Any]:
    """Return the type of every field, by name, in order."""
    hints = typing.get_type_hints(schema)
    return {name: hints[name] for name in fields_of(schema)}


def section_type(hint: Any) -> type | None:
    """Return the dataclass of a field that is a section, optional or not; None for every other field."""
    members = [member for member in _members(hint) if member is not types.NoneType]
    alone = members[0] if len(members) == 1 else None
    return alone if isinstance(alone, type) and dataclasses.is_dataclass(alone) else None


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def wanted(hint: Any) -> str:
    """Return what values of a type are, in words: "an integer", "a list (text)"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin in (Union, types.UnionType):
        return " or ".join(wanted(member) for member in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        return f"a list ({', '.join(wanted(member) for member in arguments if member is not Ellipsis)})"
    if origin is dict:
        return f"a mapping from names to values ({wanted(arguments[1])})"
    if dataclasses.is_dataclass(hint):
        return f"a section with {', '.join(types_of(typing.cast(type, hint)))}"
    raise TypeError(f"configurations cannot hold fields of type {hint}")


def field_default(item: Field) -> Any:
    """Return the default of a field as it stands in the dataclass; MISSING where there is none."""
    if item.default_factory is not NO_DEFAULT:
        return item.default_factory()
    return MISSING if item.default is NO_DEFAULT else item.default


def choice_name(base: type, data: Any, choice: Choice) -> Any:
    """Return the name that decides a choice: from the section's ``data``, else its default, else MISSING."""
    if isinstance(data, Mapping) and choice.key in data:
        return data[choice.key]
    fields = fields_of(base)
    return field_default(fields[choice.key]) if choice.key in fields else MISSING


def defaults(schema: type, given: Any) -> dict[str, Any]:
    """Return the defaults of ``schema`` as plain data, with the choices that the plain data ``given`` makes."""
    return _defaults(schema, given, {name: field_default(item) for name, item in fields_of(schema).items()})


def _defaults(schema: type, given: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    given = given if isinstance(given, Mapping) else {}
    return {name: _default(schema, name, given.get(name), value) for name, value in values.items()}


def _default(schema: type, name: str, given: Any, value: Any) -> Any:
    """Return one field's default ``value`` as plain data; for a section, what the choices in ``given`` make of it."""
    section = section_type(types_of(schema)[name])
    if section is None or value is None or value == MISSING:
        return plain(value)
    choice: Choice | None = fields_of(schema)[name].metadata.get(CHOICE)
    if choice is not None:
        chosen = choice_name(section, given, choice)
        if not isinstance(chosen, str) or chosen not in choice.table():
            return {}  # the reader says what is wrong with the name
        section = choice.table()[chosen]
    if type(value) is section:
        return _defaults(section, given, {key: getattr(value, key) for key in fields_of(section)})
    return defaults(section, given)


def plain(value: Any) -> Any:
    """Return dataclasses, paths and tuples as dictionaries, text and lists, in the schema's order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in fields_of(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def leaves(value: Any, path: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of all that is not a section; with ``lists``, of the items of lists instead."""
    if isinstance(value, Mapping) and value:
        items: Iterable[tuple[Any, Any]] = value.items()
    elif lists and isinstance(value, list):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, dotted(path, key), lists=lists)


# Reading


class Reader:
    """Turns merged plain data into dataclasses.

    Args:
        places: where each dotted key was set.
        known: dotted keys that the schema has, to suggest from.
    """

    def __init__(self, places: Mapping[str, str], known: Sequence[str]) -> None:
        self.places = places
        self.known = known
        self.missing: list[str] = []

    def read(self, schema: type, data: Mapping[str, Any]) -> Any:
        """Return an instance of ``schema`` with the settings of ``data``.

        Raises:
            ConfigError: the first unknown key or wrong value, or else all mandatory values that are missing.
        """
        config = self._section(schema, data, "", None)
        if self.missing:
            count = "1 value is" if len(self.missing) == 1 else f"{len(self.missing)} values are"
            raise ConfigError(one_line(f"{count} missing: {'; '.join(self.missing)}"))
        return config

    def _section(self, base: type, data: Any, path: str, choice: Choice | None) -> Any:
        """Return an instance of ``base``, or of the dataclass that ``choice`` finds; None while values are missing."""
        if not isinstance(data, Mapping):
            raise self._not_a_section(base, data, path, choice)
        schema = base if choice is None else self._chosen(base, data, path, choice)
        undecided = choice is not None and choice_name(base, data, choice) == MISSING
        for key in data:
            if key not in types_of(schema) and not undecided:
                raise self._unknown(key, schema, path, choice, data)
        before = len(self.missing)
        data = {**defaults(schema, data), **{key: data[key] for key in data if key in types_of(schema)}}
        values = {name: self._field(schema, name, value, dotted(path, name), choice) for name, value in data.items()}
        return None if len(self.missing) > before else schema(**values)

    def _field(self, schema: type, name: str, value: Any, path: str, choice: Choice | None) -> Any:
        """Return the value of one field; ``choice`` is that of the section which holds it."""
        hint = types_of(schema)[name]
        if value == MISSING:
            text = first_sentence(schema, name)
            if choice is not None and name == choice.key:
                text += f" [one of {', '.join(choice.table())}]"
            self.missing.append(f"{path}: {text}" if text else path)
            return None
        section = section_type(hint)
        if section is None or (value is None and types.NoneType in _members(hint)):
            return self._value(hint, value, path)
        return self._section(section, value, path, fields_of(schema)[name].metadata.get(CHOICE))

    def _value(self, hint: Any, value: Any, path: str) -> Any:
        """Return ``value`` as the type ``hint`` wants it."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if value == MISSING:
            self.missing.append(path)
            return None
        if hint is Any:
            return value
        if origin in (Union, types.UnionType):
            return self._union(hint, value, path)
        if origin is Literal:
            return self._literal(hint, value, path)
        if origin in (list, tuple):
            return self._list(hint, value, path)
        if origin is dict:
            if not isinstance(value, Mapping):
                raise self._error(path, value, wanted(hint))
            return {key: self._value(arguments[1], item, dotted(path, key)) for key, item in value.items()}
        if dataclasses.is_dataclass(hint):
            return self._section(typing.cast(type, hint), value, path, None)
        return self._scalar(hint, value, path)

    def _scalar(self, hint: Any, value: Any, path: str) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if hint in (str, Path):
            if isinstance(value, str):
                return hint(value)
            raise self._error(path, value, wanted(hint), self._quoted(value, path))
        if hint is bool and isinstance(value, bool):
            return value
        if hint is float and is_number:
            return self._float(value, path)
        if hint is int and is_number:
            return self._integer(value, path)
        raise self._error(path, value, wanted(hint), self._unquoted(hint, value, path))

    def _float(self, value: float, path: str) -> float:
        try:
            number = float(value)
        except OverflowError:
            raise self._error(path, value, "a number that a float can hold") from None
        if not math.isfinite(number):
            raise self._error(path, value, "a finite number")
        return number

    def _integer(self, value: float, path: str) -> int:
        """Return an integer, also one that was written as 2e9."""
        if isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 63:
                raise self._error(path, value, "an integer of 64 bits")
            return value
        if not value.is_integer():
            raise self._error(path, value, "an integer")
        if abs(value) > _EXACT_FLOATS:
            raise self._error(
                path, value, "an integer", "write all its digits, since floats of this size are not exact"
            )
        return int(value)

    def _quoted(self, value: Any, path: str) -> str:
        """Return how to write text that was taken for a number or boolean, or nothing."""
        if not isinstance(value, bool | int | float):
            return ""
        on_command_line = COMMAND_LINE in self._where(path)
        return "put it in quotes inside the shell's: '\"...\"'" if on_command_line else "put it in quotes"

    def _unquoted(self, hint: Any, value: Any, path: str) -> str:
        """Return how to write the number or boolean that was given as text, or nothing."""
        meant = scalar(value) if isinstance(value, str) else None
        if type(meant) not in ((bool,) if hint is bool else (int, float)):
            return ""
        if "${" in self._where(path):
            return "wrap the interpolation in ${oc.decode:...}"
        return f"write it without quotes: {one_line(value)}"

    def _literal(self, hint: Any, value: Any, path: str) -> Any:
        choices = typing.get_args(hint)
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return choice
        advice = did_you_mean(value, [choice for choice in choices if isinstance(choice, str)])
        if isinstance(value, bool):
            advice = "unquoted on, off, yes and no are booleans"
        raise self._error(path, value, wanted(hint), advice)

    def _union(self, hint: Any, value: Any, path: str) -> Any:
        members = [member for member in _members(hint) if member is not types.NoneType]
        if value is None and types.NoneType in _members(hint):
            return None
        if len(members) == 1:
            return self._value(members[0], value, path)
        for member in members:
            try:
                return self._value(member, value, path)
            except ConfigError:
                continue
        raise self._error(path, value, wanted(hint))

    def _list(self, hint: Any, value: Any, path: str) -> list[Any] | tuple[Any, ...]:
        members = typing.get_args(hint)
        if not isinstance(value, list):
            advice = "" if value is None or isinstance(value, Mapping) else f"write {dump([value], flow=True)}"
            raise self._error(path, value, wanted(hint), advice)
        if typing.get_origin(hint) is list or members[-1] is Ellipsis:
            members = (members[0],) * len(value)
        elif len(value) != len(members):
            raise self._error(path, value, f"{wanted(hint)} of length {len(members)}", f"its length is {len(value)}")
        pairs = enumerate(zip(members, value, strict=True))
        items = [self._value(member, item, dotted(path, index)) for index, (member, item) in pairs]
        return items if typing.get_origin(hint) is list else tuple(items)

    def _chosen(self, base: type, data: Mapping[str, Any], path: str, choice: Choice) -> type:
        """Return the dataclass of the name under the choice's key, or ``base`` while that name is missing."""
        name, table = choice_name(base, data, choice), choice.table()
        if name == MISSING:
            return base
        if not isinstance(name, str) or name not in table:
            raise self._error(
                dotted(path, choice.key), name, f"one of {', '.join(table)}", did_you_mean(name, list(table))
            )
        return table[name]

    def _unknown(
        self, key: str, schema: type, path: str, choice: Choice | None, data: Mapping[str, Any]
    ) -> ConfigError:
        name, of = path or "the configuration", ""
        keys, others = list(types_of(schema)), []
        if choice is not None:
            name = data.get(choice.key, name)
            of = f" of {path.rpartition('.')[2] if choice.key == 'name' else choice.key} '{name}'"
            others = [other for other, settings in choice.table().items() if key in types_of(settings)]
        elsewhere = [known for known in self.known if known.rpartition(".")[2] == key]
        near = [dotted(path, match) for match in difflib.get_close_matches(key, keys)] or elsewhere[:3]
        advice = ";"
        if others:
            advice = f"; it belongs to {', '.join(others)};"
        elif near:
            advice = f"; did you mean {' or '.join(near)}?"
        full = dotted(path, key)
        start = f"{full}{self._where(full)} is not a setting{of}"
        return ConfigError(one_line(f"{start}{advice} {name} has: {', '.join(keys)}"))

    def _not_a_section(self, base: type, value: Any, path: str, choice: Choice | None) -> ConfigError:
        advice = "leave the key out to take its defaults" if value is None else ""
        if choice is not None and isinstance(value, str) and value in choice.table():
            advice = f"did you mean {dotted(path, choice.key)}={value}?"
        return self._error(path, value, wanted(base), advice)

    def _where(self, path: str) -> str:
        """Return where ``path``, or the nearest key above it, was set, in brackets; nothing for a default."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return f" ({self.places[path]})" if path else ""

    def _error(self, path: str, value: Any, expected: str, advice: str = "") -> ConfigError:
        message = f"{path}{self._where(path)} is {describe(value)}; it must be {expected}"
        return ConfigError(one_line(f"{message}: {advice}" if advice else message))


def first_sentence(schema: type, name: str) -> str:
    """Return the first sentence of a field's documentation; nothing where the source is not at hand."""
    try:
        text = field_documentation(schema).get(name, "")
    except OSError:
        return ""
    return re.split(r"[.](?:\s|$)", text, maxsplit=1)[0]


def did_you_mean(name: Any, names: Sequence[str]) -> str:
    """Return a question with the nearest of ``names``, or nothing where none is near."""
    near = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"did you mean {near[0]}?" if near else ""
