"""The baseline: a pre-norm decoder-only transformer. Nothing is fed back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pipeline.models.base import ARCHITECTURES, ArchitectureConfig
from pipeline.models.feedback import Feedback
from pipeline.models.inputs import Inputs
from pipeline.models.stack import StackArchitecture, StackConfig


@dataclass
class TransformerConfig(StackConfig):
    """Transformer: by default RMSNorm, rotary positions, QK-norm, SwiGLU."""


@ARCHITECTURES.register("transformer")
class Transformer(StackArchitecture):
    """Decoder-only transformer; the state of a position is the last block's output."""

    Config = TransformerConfig
    feeds_back = False

    @classmethod
    def variants(cls) -> dict[str, ArchitectureConfig]:
        """Return small settings; see ``Architecture.variants``."""
        base = TransformerConfig(architecture="transformer", vocab_size=29, width=16, heads=2, layers=2)
        return cls.stack_variants(base)

    def fed_input(self, inputs: Inputs, feedback: Feedback | None) -> Tensor:
        """Raise ValueError: a transformer takes no feedback."""
        raise ValueError("a transformer takes no feedback")
