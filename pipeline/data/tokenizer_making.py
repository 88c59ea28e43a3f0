"""The tokenizer of a preparation: trained on its text, taken from a file, or plain bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.data.groups import TRAIN, Group, split_of
from pipeline.data.manifest import TOKEN_BYTES_FILE, TOKENIZER_FILE
from pipeline.data.prepare_config import PrepareConfig
from pipeline.data.sources import documents
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import ConfigError
from pipeline.files import write_atomically
from pipeline.progress import Progress

DEFAULT_VOCAB_SIZE = 32768
DEFAULT_TRAINING_BYTES = 1_000_000_000


def say(line: str) -> None:
    """Tell the user what ``prepare`` does."""
    print(f"prepare: {line}", file=sys.stderr, flush=True)


def make_tokenizer(config: PrepareConfig, output: Path, groups: list[Group]) -> Tokenizer:
    """Return the tokenizer, made once and kept in the folder from then on."""
    settings, path = config.tokenizer, output / TOKENIZER_FILE
    token = settings.document_token
    if path.exists():
        tokenizer = Tokenizer.from_file(path, token)
    elif settings.kind == "bytes":
        tokenizer = Tokenizer.bytes_tokenizer(token)
    elif settings.kind == "file":
        assert settings.path is not None
        tokenizer = Tokenizer.from_file(settings.path, token)
    else:
        tokenizer = _train(config, groups)
    if not path.exists():
        write_atomically(path, tokenizer.content)
    write_atomically(output / TOKEN_BYTES_FILE, tokenizer.token_bytes.astype("<u4").tobytes())
    return tokenizer


def _train(config: PrepareConfig, groups: list[Group]) -> Tokenizer:
    limit = config.tokenizer.training_bytes or DEFAULT_TRAINING_BYTES
    size = config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    with Progress(None, "B", "read text for the tokenizer") as progress:
        tokenizer = Tokenizer.train(
            _training_texts(groups, config.holdout, limit, config.group_bytes, progress),
            size,
            config.tokenizer.document_token,
        )
    if tokenizer.vocab_size < size:
        say(f"the text gave a vocabulary of {tokenizer.vocab_size} tokens only, tokenizer.vocab_size is {size}")
    return tokenizer


def _training_texts(
    groups: list[Group], holdout: Mapping[str, float], limit: int, group_bytes: int, progress: Progress
) -> Iterator[str]:
    """Yield training documents up to ``limit`` bytes, an even share from groups spread evenly over the data."""
    groups = [group for group in groups if any(unit.split == TRAIN for unit in group.units)]
    if not groups:
        raise ConfigError(f"tokenizer.kind=bpe trains on split {TRAIN}, which no source has; add one, or use kind=file")
    # Twice as many groups as the limit needs, so that the share of each is about half of what it holds.
    count = min(len(groups), max(64, 2 * limit // group_bytes + 1))
    chosen = [groups[place * len(groups) // count] for place in range(count)]
    for number, group in enumerate(chosen):
        share = limit // (count - number)
        for unit in group.units:
            if unit.split != TRAIN or share <= 0:
                continue
            for text in documents(unit):
                if split_of(text, unit.split, holdout) != TRAIN:
                    continue
                size = len(text.encode("utf-8"))
                if size > share:
                    text = text.encode("utf-8")[:share].decode("utf-8", errors="ignore")
                    size = share
                yield text
                share -= size
                limit -= size
                progress.advance(size)
                if share <= 0:
                    break
