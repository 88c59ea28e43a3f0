"""The full check of a prepared data folder."""

from __future__ import annotations

from pathlib import Path

from pipeline.data.manifest import Manifest, check_hash, check_size
from pipeline.data.tokenizer import Tokenizer, load_token_bytes
from pipeline.progress import Progress


def verify(folder: str | Path) -> Manifest:
    """Check a data folder in full: the hash of every shard, and the tokenizer; shows progress.

    Returns:
        The manifest, all of whose files are whole.
    """
    manifest = Manifest.load(folder)
    Tokenizer.load(manifest)
    load_token_bytes(manifest)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    for shard in shards:
        check_size(manifest, shard)
    with Progress(sum(shard.bytes for shard in shards), "B", "verify") as progress:
        for shard in shards:
            check_hash(manifest, shard)
            progress.advance(shard.bytes)
    return manifest
