"""Benchmark of the training stream beside a plain numpy memory map that reads the same rows in the same order.

Run it with ``python -m pipeline.bench.data``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from pipeline.data.loader import StreamLoader
from pipeline.data.manifest import Manifest, Split, TokenizerEntry
from pipeline.data.order import GlobalOrder
from pipeline.data.shards import ShardWriter, TokenReader
from pipeline.data.stream import TrainStream

VOCAB_SIZE = 32768
DOCUMENT_ID = 0
SHARD_TOKENS = 1 << 22


def run(
    tokens: int = 1 << 24,
    *,
    sequence_lengths: tuple[int, ...] = (256, 1024),
    tokens_per_micro_batch: int = 16384,
    rounds: int = 5,
    folder: str | Path | None = None,
) -> dict[int, float]:
    """Measure, print a table, and return the stream's rate over the memory map's for each sequence length.

    The two alternate in one process. Both return int64 tensors [rows, T + 1]; the stream also checks every token's
    range and marks the documents.

    Args:
        tokens: tokens of the random data (documents of about 1,000 tokens, vocabulary 32,768, uint16).
        sequence_lengths: values of T.
        tokens_per_micro_batch: inputs of a micro-batch.
        rounds: timings of each, of which the median counts.
        folder: where to put the data; a temporary folder by default.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        manifest, plain = _make_data(Path(place), tokens)
        print(f"{'T':>6} {'rows':>5} {'memmap Mtok/s':>14} {'stream Mtok/s':>14} {'ratio':>6} {'2 workers Mtok/s':>17}")
        result = {}
        for length in sequence_lengths:
            rows = max(1, tokens_per_micro_batch // length)
            result[length] = _compare(manifest, plain, length, rows, rounds)
        return result


def _compare(manifest: Manifest, plain: Path, length: int, rows: int, rounds: int) -> float:
    count = (manifest.split("train").tokens - 1) // length
    samples = count // rows * rows

    def stream() -> TrainStream:
        return TrainStream(
            manifest,
            sequence_length=length,
            seed=0,
            rows_per_batch=rows,
            rows_per_micro_batch=rows,
            total_samples=samples,
        )

    reused = stream()
    mapped, streamed = [], []
    for _ in range(rounds + 1):
        mapped.append(_rate(lambda: _memmap_rows(plain, count, length, rows, samples), samples * length))
        streamed.append(_rate(lambda: (batch["tokens"] for batch in reused), samples * length))
    workers = _rate_running((batch["tokens"] for batch in StreamLoader(stream(), 2)), rows * length)
    # The first round of each warms the page cache.
    base, ours = statistics.median(mapped[1:]), statistics.median(streamed[1:])
    print(f"{length:6} {rows:5} {base / 1e6:14.1f} {ours / 1e6:14.1f} {ours / base:6.2f} {workers / 1e6:17.1f}")
    return ours / base


def _rate(batches: Callable[[], Iterator[torch.Tensor]], tokens: int) -> float:
    iterator = batches()
    start = time.perf_counter()
    for _ in iterator:
        pass
    return tokens / (time.perf_counter() - start)


def _rate_running(batches: Iterator[torch.Tensor], tokens_per_batch: int) -> float:
    """Measure from the first batch on, when all processes have started."""
    next(batches)
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return count * tokens_per_batch / (time.perf_counter() - start)


def _memmap_rows(path: Path, count: int, length: int, rows: int, samples: int) -> Iterator[torch.Tensor]:
    """Yield the same rows in the usual way: slices of a memory map, stacked and cast."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    order = GlobalOrder(0, count).sequence(np.arange(samples)) * length
    for first in range(0, samples, rows):
        chosen = [tokens[start : start + length + 1] for start in order[first : first + rows].tolist()]
        yield torch.from_numpy(np.stack(chosen).astype(np.int64))


def _make_data(folder: Path, tokens: int) -> tuple[Manifest, Path]:
    """Write random tokens as shards and as one plain file."""
    generator = np.random.default_rng(0)
    values = generator.integers(1, VOCAB_SIZE, tokens, dtype=np.uint16)
    values[generator.random(tokens) < 1e-3] = DOCUMENT_ID
    plain = folder / "tokens.bin"
    values.tofile(plain)
    shards = []
    for number, first in enumerate(range(0, tokens, SHARD_TOKENS)):
        writer = ShardWriter(folder / f"train-{number:05d}-000.tar", folder, "uint16", 1 << 18)
        writer.add_document(values[first : first + SHARD_TOKENS], 0)
        shards.append(writer.finish())
    entry = TokenizerEntry("bytes", "", VOCAB_SIZE, "<|bos|>", DOCUMENT_ID, "", False)
    manifest = Manifest(folder, entry, "uint16", {"train": Split(tuple(shards))})
    if not np.array_equal(TokenReader(manifest, "train").read(0, tokens), values):
        raise AssertionError("the shards do not hold the tokens of the plain file")
    return manifest, plain


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run(options.tokens, rounds=options.rounds)
