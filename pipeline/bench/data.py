"""Benchmark of the training stream beside a plain numpy memory map that reads the same rows in the same order.

The two alternate in one process. Both return int64 tensors [rows, T + 1]; the stream also checks every token's range
and marks the documents.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.bench.options import Options
from pipeline.bench.table import Column, Row, Table
from pipeline.data.loader import StreamLoader
from pipeline.data.manifest import Manifest, Split, TokenizerEntry
from pipeline.data.order import GlobalOrder
from pipeline.data.shards import ShardWriter, TokenReader
from pipeline.data.stream import TrainStream

VOCAB_SIZE = 32768
DOCUMENT_ID = 0
SHARD_TOKENS = 1 << 22
REPEATS = 5


@dataclass(frozen=True)
class Shape:
    """Rows that are read.

    Attributes:
        length: inputs of a row, T.
        rows: rows of a micro-batch.
        tokens: tokens of the random data (documents of about 1,000 tokens, vocabulary 32,768, uint16).
    """

    length: int
    rows: int
    tokens: int


SHAPES = {
    "t256": Shape(256, 64, 1 << 24),
    "t1024": Shape(1024, 16, 1 << 24),
    "tiny": Shape(16, 2, 1 << 12),
}

COLUMNS = (
    Column("shape", "shape", width=8, text=True),
    Column("length", "T", width=6),
    Column("rows", "rows", width=6),
    Column("memmap_tokens_per_second", "memmap Mtok/s", ".1f", width=15, scale=1e-6),
    Column("stream_tokens_per_second", "stream Mtok/s", ".1f", width=15, scale=1e-6),
    Column("ratio", "ratio", ".2f", width=7),
    Column("workers_tokens_per_second", "2 workers Mtok/s", ".1f", width=18, scale=1e-6),
)


def run(options: Options) -> list[Row]:
    """Measure, print a table, return its rows.

    A row holds shape, length, rows, memmap_tokens_per_second, stream_tokens_per_second, their ratio, and
    workers_tokens_per_second: the stream's rate from two loader processes.
    """
    table = Table(COLUMNS).begin()
    for name, shape in options.choose(SHAPES).items():
        with tempfile.TemporaryDirectory() as folder:
            manifest, plain = _make_data(Path(folder), shape.tokens)
            table.add({"shape": name, **_compare(manifest, plain, shape, options.repeats or REPEATS)})
    return table.rows


def _compare(manifest: Manifest, plain: Path, shape: Shape, rounds: int) -> Row:
    length, rows = shape.length, shape.rows
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
    return {
        "length": length,
        "rows": rows,
        "memmap_tokens_per_second": base,
        "stream_tokens_per_second": ours,
        "ratio": ours / base,
        "workers_tokens_per_second": workers,
    }


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
