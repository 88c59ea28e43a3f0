"""The contract of an architecture: one machine, position by position.

Position t sees its token and a state made at position t - 1:

    s_t = F(x_t, s_{t-1}, memory of positions < t)

An architecture says what F is by a few methods. ``prepare`` does all that needs tokens alone, for all positions at once
(``prepare_feedback`` what only feedback needs of it). ``advance`` is the one primitive: given inputs at some positions,
the state fed back to them and the memory of others, it returns their states. One position is decoding, B positions a
chunk, all positions a pass; so training and inference run the same code. ``readout`` maps states to logits. Solvers
decide in which order ``advance`` is called.

A new architecture is one new file that fills this contract, its FLOPs, initialisation and settings included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from omegaconf import MISSING
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.choices import Registry
from pipeline.errors import ConfigError
from pipeline.models.inputs import Inputs
from pipeline.models.layers import Readout, init_linear, rotation
from pipeline.models.memory import KeyValueMemory

Memory = Mapping[str, KeyValueMemory]


@dataclass
class ArchitectureConfig:
    """What all architectures share."""

    architecture: str = MISSING
    """Architecture: ``transformer`` or ``rlt``."""
    vocab_size: int | None = None
    """Rows of the embedding and of the readout; none takes the tokenizer's size."""
    width: int = MISSING
    """Width d of the residual stream."""
    heads: int = MISSING
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values, each shared by heads / kv_heads query heads; none takes as many as ``heads``."""
    head_dim: int | None = None
    """Width of a head; none takes width / heads."""
    ffn_width: int | None = None
    """Hidden width of the feed-forward layers; none takes 8/3 of ``width``, rounded up to a multiple of 64."""
    qk_norm: bool = True
    """RMSNorm on each head of queries and keys."""
    rope_base: float = 10_000.0
    """Base of the rotary wavelengths."""
    tied_head: bool = True
    """Read logits with the embedding matrix."""
    embedding_std: float = 0.02
    """Standard deviation of the embedding at the start."""
    hidden_std_factor: float = 0.5
    """Linear weights start from a normal of standard deviation hidden_std_factor / sqrt(fan_in)."""

    def check(self) -> None:
        """Raise ConfigError on sizes that do not fit each other."""
        for name in ("width", "heads", "kv_heads", "head_dim", "ffn_width", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.{name} is {value}; it must be at least 1")
        if self.rope_base <= 1:
            raise ConfigError(f"model.rope_base is {self.rope_base}; it must be above 1")
        for name in ("embedding_std", "hidden_std_factor"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least 0")
        if self.head_dim is None and self.width % self.heads:
            raise ConfigError(f"model.width is {self.width}; it must be a multiple of model.heads={self.heads}")
        if self.head_width % 2:
            raise ConfigError(f"a head is {self.head_width} wide; rotary positions need an even model.head_dim")
        if self.heads % self.key_value_heads:
            raise ConfigError(f"model.heads is {self.heads}; it must be a multiple of kv_heads={self.kv_heads}")

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """Hidden width of the feed-forward layers."""
        return self.ffn_width or -(-8 * self.width // 3 // 64) * 64


class Architecture(nn.Module, ABC):
    """One architecture with its weights.

    Shapes below: rows R, positions n, width d, vocabulary V.

    Attributes:
        Config: dataclass of its settings.
        feeds_back: a state is fed back, so that the solver matters.
        checkpoint_blocks: recompute each block of a position-parallel stack in backward instead of keeping its
            activations. Loops over time are checkpointed by their solver, in segments.
    """

    Config: ClassVar[type[ArchitectureConfig]]
    feeds_back: ClassVar[bool]

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size must be known before a model is built")
        self.config = config
        self.checkpoint_blocks = False
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.readout_layer = Readout(config.width, config.vocab_size, tied=config.tied_head)

    @classmethod
    @abstractmethod
    def variants(cls) -> dict[str, ArchitectureConfig]:
        """Return small settings by name that together use every option; the tests of the contract run over them."""

    @abstractmethod
    def new_memory(self, capacity: int | None = None) -> Memory:
        """Return empty memories of positions.

        Args:
            capacity: positions to set buffers aside for, for inference; None grows, under autograd too.
        """

    @abstractmethod
    def prepare(
        self, tokens: Tensor, index: Tensor, starts: Tensor | None, memory: Memory | None = None
    ) -> tuple[Inputs, Memory]:
        """Do all that needs tokens alone.

        Args:
            tokens: int64 [R, n].
            index: row index of each position, int64 [1, n], ascending without holes.
            starts: row index at which each position's document begins, int64 [R, n]; None: all at 0.
            memory: of the positions before; None: there are none, and none of these is to be kept.

        Returns:
            The inputs, and the memory with these positions added to what ``prepare`` keeps.
        """

    def prepare_feedback(self, inputs: Inputs) -> Inputs:
        """Add what needs tokens alone and feedback alone needs, so that a pass without feedback does not pay for it."""
        return inputs

    def initial_state(self, rows: int) -> Tensor:
        """Return the state fed back to the first position of a document, [R, 1, d]."""
        raise NotImplementedError(f"{type(self).__name__} feeds nothing back")

    @abstractmethod
    def advance(self, inputs: Inputs, feedback: Tensor | None, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Compute the states of some positions.

        Args:
            inputs: from ``prepare``, cut to the positions wanted.
            feedback: the state fed back to them, [R, n, d], or [R, 1, d] for one that all share; None: feedback off.
            memory: of the positions before; None: there are none, and none of these is to be kept.

        Returns:
            States [R, n, d], and the memory with these positions added.
        """

    def readout(self, states: Tensor) -> Tensor:
        """Map states [..., d] to logits [..., V]."""
        return self.readout_layer(states, self.embedding)

    @abstractmethod
    def flops_per_token(self, length: int, *, feedback: float) -> float:
        """Return the forward FLOPs of one token, averaged over a row of ``length`` tokens in one document.

        Products alone are counted, a multiply and an add as two; attention counts the keys that are visible.

        Args:
            length: tokens of the row.
            feedback: states fed back per token: 1 in the exact recurrence, 1 / B where B tokens share one, 0 without.
        """

    @abstractmethod
    def parts(self) -> dict[str, int]:
        """Return the number of parameters of each part; their sum is the model's."""

    def dormant_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that no gradient reaches while feedback is off."""
        yield from ()

    def undecayed_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that weight decay leaves alone: embeddings, and all that are no matrices."""
        yield from self.embedding.parameters()
        yield from (parameter for parameter in self.parameters() if parameter.dim() < 2)

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew, in a fixed order."""
        nn.init.normal_(self.embedding.weight, std=self.config.embedding_std, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module, self.config.hidden_std_factor, module.in_features, generator)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def embed(self, tokens: Tensor, index: Tensor, starts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return token embeddings [R, n, d] and the rotation tables of their positions as input values."""
        positions = index if starts is None else index - starts
        cos, sin = rotation(positions, self.config.head_width, self.config.rope_base, self.embedding.weight.dtype)
        return self.embedding(tokens), {"cos": cos, "sin": sin}

    def run_block(self, block: Callable[..., Any], *args: Any, parallel: bool) -> Any:
        """Call ``block``, keeping only its inputs for backward where ``checkpoint_blocks`` asks for it."""
        if self.checkpoint_blocks and parallel and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)


ARCHITECTURES: Registry[type[Architecture]] = Registry("architecture")


def build(config: ArchitectureConfig) -> Architecture:
    """Return the architecture that ``config`` names, its weights not yet drawn (see ``init_weights``).

    Under ``torch.device("meta")`` it holds no memory.
    """
    return ARCHITECTURES[config.architecture](config)


def count_parameters(*modules: nn.Module | nn.Parameter | None) -> int:
    """Return the number of distinct parameters in ``modules``."""
    found: dict[int, int] = {}
    for module in modules:
        parameters = module.parameters() if isinstance(module, nn.Module) else [module] if module is not None else []
        found.update({id(parameter): parameter.numel() for parameter in parameters})
    return sum(found.values())
