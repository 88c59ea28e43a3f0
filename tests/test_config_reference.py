"""The generated reference of settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest
from omegaconf import MISSING

from pipeline.choices import CHOICE, Choice
from pipeline.config_reference import PATH, document, field_documentation, reference


@dataclass
class Optimizer:
    """What all share."""

    name: str = MISSING
    """Which one."""
    rate: float = 0.1
    """Rate."""


@dataclass
class Plain(Optimizer):
    """Plain descent."""


@dataclass
class Adam(Optimizer):
    """Adam.

    More that is not shown.
    """

    rate: float = 1e-3
    beta: float | None = None
    """Decay of the
    moment."""


@dataclass
class Point:
    """A point."""

    at: float = MISSING
    """Where."""


@dataclass
class Root:
    """All."""

    seed: int = 2_000_000
    """Seed."""
    mode: Literal["on", "fast"] = "fast"
    """Mode."""
    points: dict[str, list[Point]] = field(default_factory=dict)
    """Points."""
    optimizer: Optimizer = field(default_factory=Optimizer, metadata={CHOICE: Choice("name", lambda: TABLE)})
    """The optimiser."""


TABLE: Mapping[str, type] = {"plain": Plain, "adam": Adam}


def test_reference():
    assert reference(Root, "Title", "Text.") == (
        "## Title\n\nText.\n\n"
        "- `seed` (an integer; default `2000000`): Seed.\n"
        "- `mode` (one of `'on'`, `fast`; default `fast`): Mode.\n"
        "- `points` (a mapping from names to values (a list (a section with at)); default `{}`): Points.\n"
        "  - `at` (a number; **required**): Where.\n\n"
        "### `optimizer`\n\nThe optimiser.\n\n"
        "- `optimizer.name` (text; **required**): Which one.\n"
        "- `optimizer.rate` (a number; default `0.1`): Rate.\n\n"
        "#### `optimizer.name=plain`\n\nPlain descent.\n\nNo settings of its own.\n\n"
        "#### `optimizer.name=adam`\n\nAdam.\n\n"
        "- `optimizer.rate` (a number; default `0.001`): Rate.\n"
        "- `optimizer.beta` (a number or null; default `null`): Decay of the moment.\n"
    )


def test_inherited_documentation():
    assert field_documentation(Adam) == {"name": "Which one.", "rate": "Rate.", "beta": "Decay of the moment."}


def test_a_field_without_documentation_is_an_error():
    @dataclass
    class Bare:
        """Bare."""

        first: int = 0
        """First."""
        second: int = 0

    with pytest.raises(ValueError, match=r"Bare\.second has no documentation under it"):
        reference(Bare, "Bare")


def test_a_choice_without_docstring_is_an_error(monkeypatch):
    @dataclass
    class Silent(Optimizer):
        pass

    monkeypatch.setitem(TABLE, "silent", Silent)
    with pytest.raises(ValueError, match="Silent has no docstring"):
        reference(Root, "Root")


def test_the_document_is_up_to_date():
    text = document()
    assert PATH.read_text(encoding="utf-8") == text, "run: python -m pipeline.config_reference"
    for expected in ("`run.name` (text; **required**)", "`model.architecture=rlt`", "--print-config", "## Data"):
        assert expected in text
