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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.choices import Registry
from pipeline.errors import ConfigError
from pipeline.models.feedback import Feedback
from pipeline.models.inputs import Inputs
from pipeline.models.layers import (
    MLP,
    CrossAttention,
    FFNKind,
    LayerNorm,
    NormKind,
    Readout,
    RMSNorm,
    Rope,
    Rotations,
    SelfAttention,
    SwiGLU,
    init_linear,
    init_matrix,
    make_norm,
)
from pipeline.models.memory import KeyValueMemory

Memory = Mapping[str, KeyValueMemory]
Whole = Callable[..., AbstractContextManager[None]]


def in_place(*parameters: nn.Parameter) -> AbstractContextManager[None]:
    """Open parameters that are held whole where they are; see ``Architecture.init_weights``."""
    return nullcontext()


MOST = 1 << 24
"""Widths and vocabularies beyond which a size is a slip."""
MOST_LAYERS = 1 << 12
"""Likewise layers."""


@dataclass
class ArchitectureConfig:
    """What all architectures share."""

    architecture: str = MISSING
    """Architecture: ``transformer``, ``crt``, ``lrt``, ``rlt`` or ``fbt``."""
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
    """Hidden width of the feed-forward layers; none takes 8/3 of ``width``, rounded up to a multiple of 64, for
    ``swiglu``, and four times ``width`` for the others."""
    norm: NormKind = "rms"
    """Norms: ``rms`` (RMSNorm with a learned weight), ``rms_unlearned`` (without), or ``layer`` (LayerNorm with weight
    and bias)."""
    norm_eps: float = 1e-6
    """Added to the mean square (or variance) in every norm."""
    ffn: FFNKind = "swiglu"
    """Feed-forward layers: ``swiglu``, ``gelu``, or ``relu2`` (squared ReLU)."""
    linear_bias: bool = False
    """Biases in the linear layers of attention and feed-forward."""
    qk_norm: bool = True
    """RMSNorm on each head of queries and keys; its weight is learned unless ``norm`` is ``rms_unlearned``."""
    rope: Rope = "geometric"
    """Rotary angles: ``geometric`` wavelengths, or position times ``integer`` channel number (the CRT author's)."""
    rope_base: float = 10_000.0
    """Base of the geometric wavelengths."""
    dropout: float = 0.0
    """Share set to zero in training: of the embedding, attention weights, and outputs of attention and feed-forward."""
    tied_head: bool = True
    """Read logits with the embedding matrix."""
    head_bias: bool = False
    """A bias for each logit; needs a head of its own (``tied_head: false``)."""
    logit_softcap: float = 0.0
    """Logits are bounded by this: c tanh(logits / c). 0 leaves them as they are."""
    embedding_std: float = 0.02
    """Standard deviation of the embedding at the start."""
    hidden_init: Literal["normal", "uniform"] = "normal"
    """Distribution from which linear weights start."""
    hidden_std_factor: float = 0.5
    """Linear weights start with standard deviation hidden_std_factor / sqrt(fan_in)."""
    head_std: float | None = None
    """Standard deviation of a head of its own at the start; none takes that of linear weights."""
    zero_init_outputs: bool = False
    """The last matrix of every attention and feed-forward layer starts from zero."""

    def check(self) -> None:
        """Raise ConfigError on sizes that do not fit each other."""
        for name in ("width", "heads", "kv_heads", "head_dim", "ffn_width", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.{name} is {value}; it must be at least 1")
            if value is not None and value > MOST:
                raise ConfigError(f"model.{name} is {value}; it must be at most {MOST}")
        if self.rope == "integer" and self.rope_base != 10_000.0:
            raise ConfigError(f"model.rope_base is {self.rope_base}; it has no use with model.rope=integer")
        if self.rope_base <= 1:
            raise ConfigError(f"model.rope_base is {self.rope_base}; it must be above 1")
        for name in ("embedding_std", "hidden_std_factor", "head_std", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"model.{name} is {value}; it must be at least 0")
        if self.norm_eps <= 0:
            raise ConfigError(f"model.norm_eps is {self.norm_eps}; it must be above 0")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout is {self.dropout}; it must be at least 0 and below 1")
        for name in ("head_bias", "head_std"):
            if getattr(self, name) and self.tied_head:
                raise ConfigError(f"model.{name} is set; it needs a head of its own: set model.tied_head=false")
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
        if self.ffn_width is not None:
            return self.ffn_width
        return -(-8 * self.width // 3 // 64) * 64 if self.ffn == "swiglu" else 4 * self.width


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs of one token, averaged over a row; a multiply and an add count two, and products alone count.

    Attributes:
        prepare: what needs tokens alone, once.
        prepare_feedback: what needs tokens alone and feedback alone needs, once.
        advance: one pass over the position; attention counts the keys that are visible.
        fed_position: for every position that is fed a state, each time.
        fed_state: for every state that is fed, however many positions share it.
        readout: the logits of one state.
    """

    prepare: float = 0.0
    prepare_feedback: float = 0.0
    advance: float = 0.0
    fed_position: float = 0.0
    fed_state: float = 0.0
    readout: float = 0.0


class Architecture(nn.Module, ABC):
    """One architecture with its weights.

    Shapes below: rows R, positions n, width d, width of a state s (``state_width``), vocabulary V.

    A submodule may have a method ``init_own(generator)``, which ``init_weights`` calls after it has drawn all linear
    layers, norms and embeddings.

    Attributes:
        Config: dataclass of its settings.
        feeds_back: a state is fed back, so that the solver matters.
        begins_plain: a document's first position is computed alike with feedback and without.
        refreshes: keys and values can be made anew when the state that they hold changes (``refresh``).
        checkpoint_blocks: recompute each block of a position-parallel stack in backward instead of keeping its
            activations. Loops over time are checkpointed by their solver, in segments.
        checkpoint_finely: beyond that, go through it a few positions at a time (``recomputed``), and hold fewer logits
            at once. Sums of gradients are then taken over other groups of positions.
    """

    Config: ClassVar[type[ArchitectureConfig]]
    feeds_back: ClassVar[bool]
    begins_plain: ClassVar[bool] = False
    refreshes: ClassVar[bool] = False

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size must be known before a model is built")
        self.config = config
        self.checkpoint_blocks = self.checkpoint_finely = False
        self.rotations = Rotations(config.head_width, config.rope_base, config.rope)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.readout_layer = Readout(
            make_norm(config.norm, config.width, config.norm_eps),
            config.width,
            config.vocab_size,
            tied=config.tied_head,
            bias=config.head_bias,
            softcap=config.logit_softcap,
        )

    @property
    def draws(self) -> bool:
        """In training something is drawn at random in every pass."""
        return self.config.dropout > 0

    @property
    def state_width(self) -> int:
        """Width of a state."""
        return self.config.width

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

    def initial_feedback(self, rows: int) -> Feedback:
        """Return what is fed back to the first position of a document, states [R, 1, d]."""
        raise NotImplementedError(f"{type(self).__name__} feeds nothing back")

    @abstractmethod
    def advance(self, inputs: Inputs, feedback: Feedback | None, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Compute the states of some positions.

        Args:
            inputs: from ``prepare``, cut to the positions wanted.
            feedback: what is fed back to them; None: nothing, the plain pass.
            memory: of the positions before; None: there are none, and none of these is to be kept.

        Returns:
            States [R, n, s], and the memory with these positions added.
        """

    def fed_back(self, states: Tensor) -> Tensor:
        """Return what of states [R, n, s] is fed back, [R, n, d]."""
        return states

    def fed_input(self, inputs: Inputs, feedback: Feedback | None) -> Tensor:
        """Return what the recurrent part takes in at some positions, [R, n, d]; see ``advance`` for the arguments."""
        raise NotImplementedError(f"{type(self).__name__} feeds nothing back")

    def rewritable_memory(self, *, refreshes: bool = False) -> Memory:
        """Return empty memories in which positions may be computed again.

        Args:
            refreshes: keep what ``refresh`` needs as well.
        """
        return {name: memory.rewritable() for name, memory in self.new_memory().items()}

    def refresh(self, inputs: Inputs, feedback: Feedback, memory: Memory, where: Tensor) -> Memory:
        """Make keys and values anew from what they were made of, and the states fed back now.

        Args:
            inputs: all positions that the memory holds.
            feedback: what is fed back to them now, states [R, n, d].
            memory: rewritable, with what ``refresh`` needs.
            where: bool [R or 1, n]; the others keep theirs.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot make keys and values anew")

    def readout(self, states: Tensor) -> Tensor:
        """Map states [..., s] to logits [..., V]."""
        return self.readout_layer(states, self.embedding)

    @abstractmethod
    def flops(self, length: int) -> Flops:
        """Return the forward FLOPs of a token, averaged over a row of ``length`` tokens in one document."""

    @abstractmethod
    def parts(self) -> dict[str, int]:
        """Return the number of parameters of each part; their sum is the model's."""

    def mute_feedback(self) -> None:
        """Set the weights that feedback alone uses so that it changes nothing, or as little as the architecture allows.

        A plain transformer that becomes this architecture begins so.
        """
        raise NotImplementedError(f"a plain transformer cannot become {type(self).__name__}")

    def dormant_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that no gradient reaches while feedback is off."""
        yield from ()

    def undecayed_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that weight decay leaves alone: embeddings, and all that are no matrices."""
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                yield from module.parameters()
        yield from (parameter for parameter in self.parameters() if parameter.dim() < 2)

    def init_weights(self, generator: torch.Generator | None = None, whole: Whole = in_place) -> None:
        """Draw all weights anew, in a fixed order.

        Args:
            generator: on the weights' device; None: torch's own.
            whole: opens parameters that are held elsewhere, or in parts, while they are drawn. It may put others into
                their modules meanwhile; what is drawn twice has its first value again.
        """
        config = self.config
        with whole(self.embedding.weight):
            nn.init.normal_(self.embedding.weight, std=config.embedding_std, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                with whole(*module.parameters()):
                    init_linear(module, config.hidden_std_factor, module.in_features, generator, config.hidden_init)
            elif isinstance(module, nn.Embedding) and module is not self.embedding:
                std = config.hidden_std_factor / config.width**0.5
                with whole(module.weight):
                    init_matrix(module.weight, std, generator, config.hidden_init)
            elif isinstance(module, RMSNorm | LayerNorm) and module.weight is not None:
                with whole(*module.parameters()):
                    nn.init.ones_(module.weight)
                    if isinstance(module, LayerNorm):
                        nn.init.zeros_(module.bias)
        if self.readout_layer.head is not None and config.head_std is not None:
            with whole(self.readout_layer.head.weight):
                nn.init.normal_(self.readout_layer.head.weight, std=config.head_std, generator=generator)
        for module in self.modules():
            if config.zero_init_outputs:
                self._zero_output(module, whole)
            init_own = getattr(module, "init_own", None)
            if init_own is not None:
                with whole(*module.parameters()):
                    init_own(generator)

    @staticmethod
    def _zero_output(module: nn.Module, whole: Whole) -> None:
        if isinstance(module, SelfAttention | CrossAttention):
            output: nn.Module = module.output
        elif isinstance(module, SwiGLU | MLP):
            output = module.down
        else:
            return
        assert isinstance(output, nn.Linear)
        with whole(output.weight):
            nn.init.zeros_(output.weight)

    def embed(
        self, tokens: Tensor, index: Tensor, starts: Tensor | None, stop: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return token embeddings [R, n, d] and the rotation tables of their positions as input values.

        ``stop`` is the row index after the last position; for the others see ``prepare``.
        """
        dtype = self.embedding.weight.dtype
        if starts is None:
            cos, sin = self.rotations.between(stop - tokens.shape[1], stop, index.device, dtype)
        else:
            cos, sin = self.rotations.at(index - starts, stop, dtype)
        return self.drop(self.embedding(tokens)), {"cos": cos, "sin": sin}

    def drop(self, x: Tensor) -> Tensor:
        """Apply dropout in training."""
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def run_block(self, block: Callable[..., Any], *args: Any, parallel: bool) -> Any:
        """Call ``block``, keeping only its inputs for backward where ``checkpoint_blocks`` asks for it."""
        if self.checkpoint_blocks and parallel and torch.is_grad_enabled():
            make: Any = getattr(block, "layers", None)
            layers = make(*args) if make is not None and self.checkpoint_finely else None
            if layers is not None:
                return layers.run(args[0])[0]
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)


ARCHITECTURES: Registry[type[Architecture]] = Registry("architecture")


def build(config: ArchitectureConfig) -> Architecture:
    """Return the architecture that ``config`` names, its weights not yet drawn (see ``init_weights``).

    Under ``torch.device("meta")`` it holds no memory.
    """
    return ARCHITECTURES[config.architecture](config)


def build_on_meta(config: ArchitectureConfig) -> Architecture:
    """Return the architecture without memory for its weights."""
    with torch.device("meta"):
        return build(config)


def count_parameters(*modules: nn.Module | nn.Parameter | None) -> int:
    """Return the number of distinct parameters in ``modules``."""
    found: dict[int, int] = {}
    for module in modules:
        parameters = module.parameters() if isinstance(module, nn.Module) else [module] if module is not None else []
        found.update({id(parameter): parameter.numel() for parameter in parameters})
    return sum(found.values())
