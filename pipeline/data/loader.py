"""Loaders: streams in processes of their own, and the position of a run that a checkpoint keeps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from pipeline.data.stream import Batch, EvaluationBatch, EvaluationStream, Failure, RowStream, TrainStream
from pipeline.errors import DataError

STATE_FORMAT = 1

# What must be the same for a position to mean the same tokens.
_IDENTITY = {
    "fingerprint": "the data (manifest fingerprint)",
    "split": "the split",
    "seed": "the seed",
    "sequence_length": "the sequence length",
    "document_boundaries": "document_boundaries",
}

# Signals by which a terminal or a cluster speaks to a run, besides SIGTERM.
_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class RowLoader(DataLoader):
    """A DataLoader of a stream's micro-batches, in the same order for any number of processes.

    It draws nothing from torch's global random generator, and an error of the data reaches the caller as it was
    raised, from whichever process.

    Args:
        stream: the stream.
        workers: loader processes; 0 reads in this process.
        pin_memory: copy batches into page-locked memory, for a GPU.
        prefetch: micro-batches that each process prepares ahead.
    """

    def __init__(self, stream: RowStream, workers: int = 0, *, pin_memory: bool = False, prefetch: int = 4) -> None:
        self.stream = stream
        super().__init__(
            stream,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_is,
            pin_memory=pin_memory,
            worker_init_fn=start_loader_process if workers else None,
            generator=torch.Generator().manual_seed(0),
            persistent_workers=workers > 0,
            prefetch_factor=max(2, prefetch) if workers else None,
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # Processes started here inherit the mask, so that no signal hits them before they are set up; this process
        # gets signals that came meanwhile right afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [*_SIGNALS, signal.SIGTERM])
        try:
            batches = super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._raising(batches)

    def _raising(self, batches: Iterator[Any]) -> Iterator[Batch]:
        """Pass batches on, and raise an error that a loader process sent in place of one."""
        error = None
        for batch in batches:
            if isinstance(batch, Failure):
                error = batch.error()
                break
            yield batch
        if error is not None:
            # Without this the error's traceback keeps the processes alive, and their late end takes seconds.
            self._iterator = None
            del batches
            raise error


class StreamLoader(RowLoader):
    """The training loader: it knows how far the run is, and starts from there.

    The training module calls ``advance`` after every optimizer step. What was prefetched but not trained on does not
    count, so a run that resumes from ``state_dict`` neither repeats nor skips a sample.

    Args:
        stream: the training stream; its ``first_sample`` is where the run begins.
        workers: loader processes; 0 reads in this process.
        pin_memory: copy batches into page-locked memory, for a GPU.
        prefetch: micro-batches that each process prepares ahead.
    """

    stream: TrainStream

    def __init__(self, stream: TrainStream, workers: int = 0, *, pin_memory: bool = False, prefetch: int = 4) -> None:
        super().__init__(stream, workers, pin_memory=pin_memory, prefetch=prefetch)
        self.consumed = stream.first_sample
        self._running_from: int | None = None

    def advance(self, samples: int) -> None:
        """Count ``samples`` more, over all ranks, as trained on."""
        self.consumed += samples

    def __len__(self) -> int:
        """Return the micro-batches of the whole run on this rank: those trained on and those to come.

        It stays the same over the run, so a trainer that asks before it restores the position is not misled.
        """
        left = self.stream.micro_batches_from(self.consumed)
        if left is None:
            raise TypeError("the stream has no end: give it total_samples")
        return self.micro_batches_done + left

    @property
    def micro_batches_done(self) -> int:
        """Micro-batches trained on by this rank, in units of the present micro-batch and number of ranks.

        A trainer that counts micro-batches must go on from this number where ranks or micro-batch have changed.
        """
        return self.consumed // (self.stream.rows_per_micro_batch * self.stream.world_size)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # Processes that still run hold a copy of the stream at its old position.
        if self._running_from != self.consumed:
            self._iterator = None
        self.stream.first_sample = self._running_from = self.consumed
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values, the same on every rank."""
        return {
            "format": STATE_FORMAT,
            **self._identity(),
            "samples": self.consumed,
            "tokens": self.consumed * self.stream.sequence_length,
            "left_out": self.stream.skips.passed(self.consumed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position; refuses one that means other tokens here.

        Ranks, loader processes, micro-batch and batch may differ from those that wrote it, and so may samples to leave
        out that are still ahead.
        """
        if state.get("format") != STATE_FORMAT:
            raise DataError(f"the saved position has format {state.get('format')!r}; this version reads {STATE_FORMAT}")
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise DataError(
                    f"cannot resume at {describe_position(state)}: {_IDENTITY[key]} was {state.get(key)!r} and is now "
                    f"{here!r}; resume with what the run began with"
                )
        consumed = int(state["samples"])
        before, here = state.get("left_out", "[]"), self.stream.skips.passed(consumed)
        if before != here:
            raise DataError(
                f"data.skip_samples names {here} of what lies behind {describe_position(state)}, where the run has "
                f"left out {before}; only what is ahead can be changed: restore those ranges, or remove the "
                "checkpoints after the place to change, so that the run goes on from before it"
            )
        self.consumed = consumed

    def position(self) -> str:
        """Describe the position for a message."""
        return describe_position(self.state_dict(), self.stream.count)

    def _identity(self) -> dict[str, Any]:
        stream = self.stream
        return {
            "fingerprint": stream.manifest.fingerprint,
            "split": stream.split,
            "seed": stream.seed,
            "sequence_length": stream.sequence_length,
            "document_boundaries": stream.document_boundaries,
        }


class EvaluationLoader(RowLoader):
    """The loader of an evaluation: the same micro-batches each time it is gone through."""

    stream: EvaluationStream

    def __iter__(self) -> Iterator[EvaluationBatch]:  # type: ignore[override]
        return super().__iter__()  # type: ignore[return-value]

    def __len__(self) -> int:
        """Return the micro-batches of this rank, the same on every rank."""
        return self.stream.micro_batches


def describe_position(state: Mapping[str, Any], count: int | None = None) -> str:
    """Describe a saved position for a message; with the number of rows of the split, also the epoch, from 0."""
    samples, tokens = state.get("samples", 0), state.get("tokens", 0)
    epoch = f"epoch {samples // count}, " if count else ""
    return f"{epoch}sample {samples}, tokens {tokens}"


def start_loader_process(worker: int) -> None:
    """Set up a loader process: signals meant for the run are the main process's business.

    Slurm and a terminal send their signals to every process. A loader process that died of one would take the run
    down before it has saved, and handlers inherited from the main process would act twice.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        # SIGTERM stays blocked (see RowLoader) and is waited for, which tells who sent it.
        threading.Thread(target=_end_when_parent_says, args=(os.getppid(),), daemon=True).start()
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_when_parent_says(parent: int) -> None:
    """Obey SIGTERM from the main process, which ends its children so, and from nobody else."""
    while True:
        if signal.sigwaitinfo([signal.SIGTERM]).si_pid == parent:
            os._exit(0)


def _as_is(batch: Any) -> Any:
    return batch
