"""A corpus of random words, for benchmarks that need a stream of data and no meaning."""

from __future__ import annotations

import json
import random
from pathlib import Path

from pipeline.data.manifest import Manifest
from pipeline.data.prepare import PrepareConfig, TokenizerConfig, prepare
from pipeline.data.sources import SourceConfig

WORDS = ("state", "of", "the", "union", "and", "people", "a", "work", "peace", "nations", "in", "hope")


def prepared(folder: Path, *, documents: int = 100, words: int = 2000) -> Manifest:
    """Prepare a split ``train`` of so many documents, in bytes; the same each time."""
    draw = random.Random(0)
    text = folder / "text.jsonl"
    with text.open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=words))}) + "\n")
    return prepare(
        PrepareConfig(
            output=str(folder / "data"),
            sources=[SourceConfig(path=str(text), split="train")],
            tokenizer=TokenizerConfig(kind="bytes"),
            workers=1,
        )
    )
