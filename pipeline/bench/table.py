"""A table that grows on the screen row by row, and is kept as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: what of a row it shows.
        title: what stands above it.
        form: format of a value, as in an f-string, without its width (".3f").
        width: characters; text is set to the left, all else to the right.
        scale: a value is multiplied by this before it is shown.
        text: it holds text.
    """

    key: str
    title: str
    form: str = ""
    width: int = 10
    scale: float = 1.0
    text: bool = False

    def heading(self) -> str:
        """Return the title in its place."""
        return f"{self.title:<{self.width}}" if self.text else f"{self.title:>{self.width}}"

    def cell(self, row: Row) -> str:
        """Return a row's value in its place; a dash where there is none."""
        value = row.get(self.key)
        if value is None:
            shown = "-"
        else:
            shown = str(value) if self.text else format(value * self.scale if self.scale != 1.0 else value, self.form)
        return f"{shown:<{self.width}}" if self.text else f"{shown:>{self.width}}"


class Table:
    """A table.

    Args:
        columns: what is shown, from left to right.

    Attributes:
        rows: what has been shown, with all that its rows hold beyond the columns.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = tuple(columns)
        self.rows: list[Row] = []

    def begin(self) -> Table:
        """Print the titles."""
        print("".join(column.heading() for column in self._columns).rstrip(), flush=True)
        return self

    def add(self, row: Row) -> None:
        """Print a row and keep it."""
        self.rows.append(row)
        print("".join(column.cell(row) for column in self._columns).rstrip(), flush=True)
