"""Rows of tokens for training and evaluation, as pure functions of a position.

Row i of a split is its tokens [i T, i T + T + 1): T inputs and the targets one further on. Training sample number g
(over all ranks and steps, from 0, without end) is the row that ``GlobalOrder`` puts there; a run takes the samples in
turn, but for those that ``Skips`` leaves out. Nothing else decides what is read: not the number of ranks or loader
processes, nor where a run was stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from pipeline.data.manifest import Manifest, check_shards
from pipeline.data.order import GlobalOrder
from pipeline.data.shards import TokenReader
from pipeline.data.skips import Skips
from pipeline.errors import ConfigError, DataError, UserError
from pipeline.files import describe_os_error

Boundaries = Literal["restart", "continue"]
I64 = NDArray[np.int64]

# Rows whose places are computed at once; it bounds memory and has no effect on the order.
_BLOCK_ROWS = 4096


class Batch(TypedDict):
    """One micro-batch.

    Keys:
        tokens: int64 [rows, T + 1]; inputs are all but the last, targets all but the first.
        starts: int64 [rows, T]: for every input position, the position at which its document begins, where position 0
            counts as a beginning whatever its token; None where no document begins after position 0, or where
            boundaries are not observed.
        samples: int64 [rows]: global sample numbers.
    """

    tokens: torch.Tensor
    starts: torch.Tensor | None
    samples: torch.Tensor


class EvaluationBatch(Batch):
    """One micro-batch of an evaluation; ``samples`` are row numbers of the split, -1 for rows that only fill up.

    Keys:
        valid: bool [rows, T]: which targets count. False where the split's last row is short, and in filling rows.
    """

    valid: torch.Tensor


class Failure:
    """An error on its way from a loader process to the main process, which must see one line and no traceback."""

    def __init__(self, error: UserError) -> None:
        self.kind = type(error)
        self.message = str(error)

    def error(self) -> UserError:
        """Return the error anew."""
        return self.kind(self.message)


class RowStream(IterableDataset):
    """What training and evaluation share: micro-batches by number, dealt out to the loader's processes.

    Args:
        data: a data folder or its manifest.
        split: name of the split.
        sequence_length: T, positions in a row.
        document_boundaries: ``restart`` to mark where documents begin, ``continue`` to take no notice.
        rows_per_micro_batch: rows of a micro-batch.
        rank: this process's number.
        world_size: number of processes that share the work.
        verify_hash: also check the hash of each shard when it is first opened.
    """

    def __init__(
        self,
        data: Manifest | str | Path,
        split: str,
        *,
        sequence_length: int,
        document_boundaries: Boundaries = "restart",
        rows_per_micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        verify_hash: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {world_size - 1}")
        if sequence_length < 1 or rows_per_micro_batch < 1:
            raise ConfigError("the sequence length and the rows of a micro-batch must be at least 1")
        self.manifest = data if isinstance(data, Manifest) else Manifest.load(data)
        self.split = split
        self.sequence_length = sequence_length
        self.document_boundaries = document_boundaries
        self.document_id = self.manifest.tokenizer.document_id
        self.rows_per_micro_batch = rows_per_micro_batch
        self.rank = rank
        self.world_size = world_size
        check_shards(self.manifest, [split])
        self.reader = TokenReader(self.manifest, split, verify_hash=verify_hash)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        if info is None:
            yield from self._batches(0, 1)
            return
        try:
            yield from self._batches(info.id, info.num_workers)
        except UserError as error:
            yield Failure(error)  # type: ignore[misc]
        except OSError as error:
            yield Failure(DataError(describe_os_error(error)))  # type: ignore[misc]

    def _batches(self, worker: int, workers: int) -> Iterator[Batch]:
        """Yield micro-batches number ``worker``, ``worker + workers``, ... of this rank."""
        raise NotImplementedError

    def _starts(self, tokens: I64, count: I64 | None = None) -> torch.Tensor | None:
        if self.document_boundaries != "restart":
            return None
        starts = document_starts(tokens, self.document_id, count)
        return None if starts is None else torch.from_numpy(starts)


class TrainStream(RowStream):
    """Endless rows in random order, a new permutation every epoch, from any global sample number on.

    Step k of the optimizer takes places [first + k G, first + (k + 1) G) of the run. Of them, micro-batch m on rank r
    of R takes rows [(m R + r) b, (m R + r) b + b). The sample at place p is number p, or a later one where samples
    before it are left out.

    Args:
        data: a data folder or its manifest.
        split: name of the split.
        sequence_length: T, positions in a row.
        seed: seed of the order.
        document_boundaries: ``restart`` to mark where documents begin, ``continue`` to take no notice.
        rows_per_batch: G, rows of one optimizer step over all ranks.
        rows_per_micro_batch: b, rows that a rank takes at once.
        rank: r, this process's number.
        world_size: R, number of processes.
        total_samples: samples of the whole run, from place 0; a last partial step is left out. None goes on for ever.
        first_sample: place to start from; read when an iteration begins.
        skips: samples to leave out.
        verify_hash: also check the hash of each shard when it is first opened.
    """

    def __init__(
        self,
        data: Manifest | str | Path,
        split: str = "train",
        *,
        sequence_length: int,
        seed: int,
        document_boundaries: Boundaries = "restart",
        rows_per_batch: int,
        rows_per_micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        total_samples: int | None = None,
        first_sample: int = 0,
        skips: Skips | None = None,
        verify_hash: bool = False,
    ) -> None:
        super().__init__(
            data,
            split,
            sequence_length=sequence_length,
            document_boundaries=document_boundaries,
            rows_per_micro_batch=rows_per_micro_batch,
            rank=rank,
            world_size=world_size,
            verify_hash=verify_hash,
        )
        if rows_per_batch < 1 or rows_per_batch % (rows_per_micro_batch * world_size):
            raise ConfigError(
                f"a batch has {rows_per_batch} rows; it must be a multiple of rows of a micro-batch x ranks = "
                f"{rows_per_micro_batch} x {world_size}"
            )
        self.count = count_rows(self.reader.total, sequence_length)
        if self.count < 1:
            raise DataError(
                f"split {split!r} of {self.manifest.folder} has {self.reader.total} tokens, too few for one row of "
                f"{sequence_length} and the target after it"
            )
        self.seed = seed
        self.order = GlobalOrder(seed, self.count)
        self.rows_per_batch = rows_per_batch
        self.total_samples = total_samples
        self.first_sample = first_sample
        self.skips = skips or Skips()

    def micro_batches_from(self, sample: int) -> int | None:
        """Return the micro-batches that this rank yields from a place on; None without end."""
        if self.total_samples is None:
            return None
        steps = max(0, self.total_samples - sample) // self.rows_per_batch
        return steps * self.rows_per_batch // (self.rows_per_micro_batch * self.world_size)

    def _batches(self, worker: int, workers: int) -> Iterator[Batch]:
        # A whole number of micro-batches to a step makes this one formula for all steps and micro-batches.
        rows, start = self.rows_per_micro_batch, self.first_sample
        left = self.micro_batches_from(start)
        per_block = max(1, _BLOCK_ROWS // rows)
        for block in itertools.count():
            numbers = worker + workers * np.arange(block * per_block, (block + 1) * per_block, dtype=np.int64)
            if left is not None:
                numbers = numbers[numbers < left]
            if not len(numbers):
                return
            firsts = start + (numbers * self.world_size + self.rank) * rows
            yield from self._block(self.skips.sample(firsts[:, None] + np.arange(rows, dtype=np.int64)))

    def _block(self, samples: I64) -> Iterator[Batch]:
        """Yield a micro-batch for each row of global sample numbers."""
        length = self.sequence_length + 1
        firsts = self.order.sequence(samples) * self.sequence_length
        shards, places = self.reader.locate(firsts, length)
        for number in range(len(samples)):
            tokens = np.empty((samples.shape[1], length), dtype=np.int64)
            self.reader.gather(firsts[number], shards[number], places[number], tokens)
            yield {
                "tokens": torch.from_numpy(tokens),
                "starts": self._starts(tokens),
                "samples": torch.from_numpy(samples[number].copy()),
            }


class EvaluationStream(RowStream):
    """The rows of a split in order, each once, the last and shorter one included.

    Micro-batch m on rank r of R takes rows [(m R + r) b, (m R + r) b + b). All ranks yield the same number of
    micro-batches of b rows; where rows run out, rows without valid targets fill up.

    Args:
        data: a data folder or its manifest.
        split: name of the split.
        sequence_length: T, positions in a row.
        document_boundaries: ``restart`` to mark where documents begin, ``continue`` to take no notice.
        rows_per_micro_batch: b, rows that a rank takes at once.
        rank: r, this process's number.
        world_size: R, number of processes.
        limit_tokens: take at most this many targets from the start of the split, in whole rows, but at least one row;
            0 takes the whole split.
        verify_hash: also check the hash of each shard when it is first opened.
    """

    def __init__(
        self,
        data: Manifest | str | Path,
        split: str,
        *,
        sequence_length: int,
        document_boundaries: Boundaries = "restart",
        rows_per_micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        limit_tokens: int = 0,
        verify_hash: bool = False,
    ) -> None:
        super().__init__(
            data,
            split,
            sequence_length=sequence_length,
            document_boundaries=document_boundaries,
            rows_per_micro_batch=rows_per_micro_batch,
            rank=rank,
            world_size=world_size,
            verify_hash=verify_hash,
        )
        targets = self.reader.total - 1
        if targets < 1:
            raise DataError(f"split {split!r} of {self.manifest.folder} has one token only, nothing to predict")
        self.rows = -(-targets // sequence_length)
        if limit_tokens:
            self.rows = min(self.rows, max(1, limit_tokens // sequence_length))
        self.targets = min(targets, self.rows * sequence_length)
        self.micro_batches = -(-self.rows // (rows_per_micro_batch * world_size))

    def _batches(self, worker: int, workers: int) -> Iterator[EvaluationBatch]:
        for number in range(worker, self.micro_batches, workers):
            first = (number * self.world_size + self.rank) * self.rows_per_micro_batch
            yield self._batch(np.arange(first, first + self.rows_per_micro_batch, dtype=np.int64))

    def _batch(self, rows: I64) -> EvaluationBatch:
        length = self.sequence_length
        # Targets of each row: none in filling rows, fewer in a last short row.
        count = np.clip(self.targets - rows * length, 0, length)
        whole = int((count == length).sum())
        tokens = np.full((len(rows), length + 1), self.document_id, dtype=np.int64)
        self.reader.read_rows(rows[:whole] * length, length + 1, tokens[:whole])
        if whole < len(rows) and count[whole]:
            size = int(count[whole]) + 1
            tokens[whole, :size] = self.reader.read(int(rows[whole]) * length, size)
        return {
            "tokens": torch.from_numpy(tokens),
            "starts": self._starts(tokens, count),
            "samples": torch.from_numpy(np.where(count > 0, rows, -1)),
            "valid": torch.from_numpy(np.arange(length) < count[:, None]),
        }


def count_rows(total: int, sequence_length: int) -> int:
    """Return how many whole rows, targets included, a split of ``total`` tokens has."""
    return max(0, total - 1) // sequence_length


def document_starts(tokens: I64, document_id: int, count: I64 | None = None) -> I64 | None:
    """Return where the document of every input position begins, or None if none begins after position 0.

    Args:
        tokens: rows of tokens [rows, T + 1].
        document_id: the token that begins a document.
        count: input positions of each row that hold text; all by default.
    """
    begins = tokens[:, :-1] == document_id
    if count is not None:
        begins &= np.arange(begins.shape[1]) < count[:, None]
    begins[:, 0] = True
    places = np.flatnonzero(begins)
    if len(places) == len(begins):
        return None
    # Each beginning holds until the next; this is several times faster than a running maximum.
    spans = np.diff(places, append=begins.size)
    return np.repeat(places % begins.shape[1], spans).reshape(begins.shape)
