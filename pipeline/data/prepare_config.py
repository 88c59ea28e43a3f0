"""Settings of ``prepare``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from pipeline.data.groups import TRAIN
from pipeline.data.manifest import SPLIT_NAME
from pipeline.data.sources import SourceConfig
from pipeline.errors import ConfigError


@dataclass
class TokenizerConfig:
    """Which tokenizer the shards are made with."""

    kind: Literal["bpe", "file", "bytes"] = "bpe"
    """``bpe`` trains a byte-level BPE on the training split, ``file`` takes a ``tokenizer.json``, ``bytes`` makes each
    byte of UTF-8 a token."""
    vocab_size: int | None = None
    """Size of the vocabulary that ``bpe`` trains, the document token included; none means 32768. For ``bpe`` only."""
    path: str | None = None
    """The ``tokenizer.json``. For ``file`` only."""
    document_token: str | None = None
    """Token that begins every document. None means ``<|bos|>``, or for ``file`` the first of the usual ones it has."""
    training_bytes: int | None = None
    """Train ``bpe`` on at most this much text, taken evenly from all over the training split; none means a gigabyte.
    For ``bpe`` only."""

    def check(self) -> None:
        """Raise ConfigError on values out of range or that the kind would ignore."""
        takes = {"bpe": {"vocab_size", "training_bytes"}, "file": {"path"}, "bytes": set()}[self.kind]
        for name in ("vocab_size", "training_bytes", "path"):
            if getattr(self, name) is not None and name not in takes:
                raise ConfigError(f"tokenizer.{name} has no effect when tokenizer.kind is {self.kind}; remove it")
        if self.kind == "file" and not self.path:
            raise ConfigError("tokenizer.path is not set; tokenizer.kind=file needs the path of a tokenizer.json")
        if self.vocab_size is not None and self.vocab_size < 257:
            raise ConfigError(f"tokenizer.vocab_size is {self.vocab_size}; it must be at least 257 (bytes and <|bos|>)")
        if self.training_bytes is not None and self.training_bytes < 1:
            raise ConfigError(f"tokenizer.training_bytes is {self.training_bytes}; it must be at least 1")
        if self.document_token == "":
            raise ConfigError("tokenizer.document_token is empty; name a token, or leave the setting out")


@dataclass
class PrepareConfig:
    """What ``prepare`` reads and how it turns it into shards."""

    output: str = MISSING
    """Folder to make; it must be new, or hold the same preparation, finished or not."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Files and folders of text."""
    holdout: dict[str, float] = field(default_factory=dict)
    """Share of the documents of the ``train`` split that goes to each other split: ``{validation: 0.005}``. Chosen by
    the hash of a document's text, so the same text always goes to the same split."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer."""
    shard_tokens: int = 67_108_864
    """A shard ends with the document in which it reaches this many tokens."""
    member_tokens: int = 262_144
    """Tokens of one member of a shard, however many documents they hold."""
    group_bytes: int = 67_108_864
    """Bytes of source files that one process works on at once. Each group makes shards of its own."""
    workers: int = 0
    """Processes; 0 takes one for each core. The result does not depend on it."""

    def check(self) -> None:
        """Raise ConfigError on values out of range or that contradict each other."""
        if not self.sources:
            raise ConfigError("sources is empty; name at least one, such as sources: [{path: texts}]")
        for name, bound in (("shard_tokens", 1), ("member_tokens", 1), ("group_bytes", 1), ("workers", 0)):
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {bound}")
        for split in [*self.holdout, *(source.split for source in self.sources)]:
            if not SPLIT_NAME.fullmatch(split):
                raise ConfigError(f"{split!r} is no name of a split; use letters, digits, _ and -")
        self._check_holdout()
        self.tokenizer.check()

    def _check_holdout(self) -> None:
        if TRAIN in self.holdout:
            raise ConfigError(f"holdout.{TRAIN} is set; name the splits that are held out of {TRAIN}")
        for name, share in self.holdout.items():
            if not 0 < share < 1:
                raise ConfigError(f"holdout.{name} is {share}; it must be above 0 and below 1")
        if sum(self.holdout.values()) >= 1:
            raise ConfigError(f"the shares in holdout sum to {sum(self.holdout.values())}; they must stay below 1")
        if self.holdout and all(source.split != TRAIN for source in self.sources):
            raise ConfigError(f"holdout has no effect, since no source has split {TRAIN}; remove it")
