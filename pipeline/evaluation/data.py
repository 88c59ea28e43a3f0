"""The rows of a split on which a trained model is evaluated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.data.loader import EvaluationLoader
from pipeline.data.manifest import Manifest, check_shards
from pipeline.data.stream import EvaluationBatch, EvaluationStream
from pipeline.data.tokenizer import load_token_bytes
from pipeline.errors import DataError
from pipeline.runs.loading import TrainedModel


@dataclass(frozen=True)
class EvaluationData:
    """Rows, and what their tokens stand for.

    Attributes:
        stream: the rows.
        token_bytes: bytes that each token id stands for, 0 for special tokens, int64 [V].
    """

    stream: EvaluationStream
    token_bytes: Tensor

    @classmethod
    def open(cls, trained: TrainedModel, split: str, *, data: Path | None = None, tokens: int = 0) -> EvaluationData:
        """Open a split in rows and batches like those of the model's run.

        Args:
            trained: the model.
            split: split of the data.
            data: prepared data folder; None takes the run's own.
            tokens: at most this many tokens from the start of the split; 0 takes it whole.

        Raises:
            DataError: the data were made with another tokenizer than the model's.
        """
        manifest = Manifest.load(data or trained.config.data.path)
        if manifest.tokenizer.sha256 != trained.tokenizer.sha256:
            raise DataError(
                f"{manifest.folder} was prepared with another tokenizer than {trained.checkpoint.path} was trained "
                "with; prepare the text again with the checkpoint's tokenizer.json (tokenizer.kind=file)"
            )
        check_shards(manifest, [split])
        config = trained.config
        length = config.data.sequence_length
        stream = EvaluationStream(
            manifest,
            split,
            sequence_length=length,
            document_boundaries=config.data.document_boundaries,
            rows_per_micro_batch=(config.validation.micro_batch_tokens or config.training.micro_batch_tokens) // length,
            limit_tokens=tokens,
        )
        return cls(stream, torch.from_numpy(load_token_bytes(manifest)))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stream.rows

    def batches(self) -> Iterable[EvaluationBatch]:
        """Return the batches, from the first."""
        return EvaluationLoader(self.stream)
