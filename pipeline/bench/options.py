"""What of a benchmark is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.errors import ConfigError

Shape = TypeVar("Shape")

TINY = "tiny"
"""Beginning of the names of shapes for trying a benchmark out, which say nothing about speed."""


@dataclass(frozen=True)
class Options:
    """What of a benchmark is wanted.

    Attributes:
        shapes: names of sizes; none for all that measure something.
        repeats: timed runs of each, of which the median counts; None for the benchmark's own number.
        data: prepared corpus, for the benchmark that trains on text; None for the embedded one.
        install: install what is missing of other projects first.
    """

    shapes: tuple[str, ...] = ()
    repeats: int | None = None
    data: Path | None = None
    install: bool = False

    def choose(self, known: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the sizes that are wanted, by name and in the order of ``known``.

        Raises:
            ConfigError: there is no size of that name.
        """
        for name in self.shapes:
            if name not in known:
                raise ConfigError(f"--shape {name}: there is no such shape; choose from {', '.join(known)}")
        wanted = self.shapes or [name for name in known if not name.startswith(TINY)]
        return {name: shape for name, shape in known.items() if name in wanted}
