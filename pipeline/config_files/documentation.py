"""The text under each field of a configuration dataclass, out of its source."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap

from pipeline.config_files.layers import one_line


@functools.cache
def field_documentation(schema: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, inherited fields included, with white space folded.

    Raises:
        OSError: the source is not at hand.
    """
    documented: dict[str, str] = {}
    for owner in reversed([parent for parent in schema.__mro__ if dataclasses.is_dataclass(parent)]):
        documented.update(_own_documentation(owner))
    return documented


def _own_documentation(schema: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(definition, ast.ClassDef)
    documented = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            documented[field.target.id] = one_line(text.value.value)
    return documented
