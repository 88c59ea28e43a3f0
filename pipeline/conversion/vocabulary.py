"""Whether two tokenizer files give the same tokens the same ids."""

from __future__ import annotations

import json

import tokenizers

from pipeline.data.tokenizer import BYTES_FORMAT
from pipeline.errors import DataError


def vocabulary(content: bytes, where: str) -> dict[str, int]:
    """Return the tokens of a ``tokenizer.json`` and their ids.

    Args:
        content: the file's content.
        where: its name, for messages.

    Raises:
        DataError: it is no tokenizer.
    """
    try:
        description = json.loads(content)
    except ValueError:
        description = None
    if isinstance(description, dict) and description.get("format") == BYTES_FORMAT:
        return {f"byte {value}": value for value in range(256)} | {"document token": 256}
    try:
        found: dict[str, int] = tokenizers.Tokenizer.from_str(content.decode()).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{where} is not a file of the tokenizers library: {' '.join(str(error).split())}") from None
    return found
