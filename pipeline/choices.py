"""Choice by name: registries, and configuration sections whose shape depends on a name they hold.

An architecture, a solver, an optimiser is chosen by one key of its section (``model.architecture``, ``solver.name``).
Each choice has a dataclass of its own for its settings, so that a setting which the choice would ignore is an unknown
key rather than a silent no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pipeline.errors import ConfigError

T = TypeVar("T")

CHOICE = "choice"  # the key of a field's metadata under which its Choice stands


class Registry(Mapping[str, T], Generic[T]):
    """Names and what they stand for, in order of registration.

    Args:
        kind: what one entry is, in the singular, for messages ("architecture").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that files its argument under ``name``; a name taken already is a programmer's error."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of {', '.join(self._entries)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class Choice:
    """How a configuration section finds its dataclass.

    Attributes:
        key: the key within the section that holds the name ("architecture").
        table: returns the dataclass of every name; a function, so that it is looked up after all have registered.
    """

    key: str
    table: Callable[[], Mapping[str, type]]


def chosen_by(base: type, key: str, table: Callable[[], Mapping[str, type]]) -> Any:
    """Return a dataclass field for a section of type ``base`` whose real dataclass its own ``key`` chooses."""
    return field(default_factory=base, metadata={CHOICE: Choice(key, table)})
