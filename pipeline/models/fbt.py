"""FBT, the Full-bandwidth Transformer (Wang et al. 2026, arXiv 2608.08888).

The top state of position t - 1 takes the place of token t's embedding, gated by it (4):

    x_t = norm(W_U h_{t-1} * sigmoid(W_G norm(e_t)));  h_t = readout norm(blocks(x_t))

The state is the only path for values: the token acts through the gate alone, without a bypass. A document's first
position, and every position of a plain pass, takes its embedding. The paper trains mixtures of 1, 2 and 3 passes with
solver ``unrolled``, boundaries drawn before which a pass stays plain, and jitter on the fed state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models.base import ARCHITECTURES, ArchitectureConfig, Flops, Memory, count_parameters
from pipeline.models.feedback import Feedback
from pipeline.models.inputs import Inputs
from pipeline.models.layers import Linear, make_norm, matmul_flops
from pipeline.models.stack import StackArchitecture, StackConfig


@dataclass
class FBTConfig(StackConfig):
    """FBT: the top state, gated by the token, enters the stack in the token's place."""

    jitter: float = 0.02
    """In training, uniform noise of this size either way is added to the states that are fed back."""
    depth_scaled_residuals: bool = True
    """Outputs of attention and feed-forward are scaled by 1 / sqrt(2 layers)."""

    def check(self) -> None:
        """Raise ConfigError on sizes out of range."""
        super().check()
        if self.jitter < 0:
            raise ConfigError(f"model.jitter is {self.jitter}; it must be at least 0")


class Fusion(nn.Module):
    """The gated linear unit through which the state enters (4).

    Args:
        config: sizes.

    Attributes:
        norm: norm of the fused vector; None where the stack norms all that enters it.
    """

    def __init__(self, config: FBTConfig) -> None:
        super().__init__()
        self.gate_norm = make_norm(config.norm, config.width, config.norm_eps)
        self.gate = Linear(config.width, config.width, bias=False)
        self.value = Linear(config.width, config.width, bias=False)
        self.norm = None if config.embedding_norm else make_norm(config.norm, config.width, config.norm_eps)

    def gates(self, embedding: Tensor) -> Tensor:
        """Return the gates of tokens, [R, n, d]."""
        return torch.sigmoid(self.gate(self.gate_norm(embedding)))


@ARCHITECTURES.register("fbt")
class FBT(StackArchitecture):
    """Full-bandwidth Transformer; the state of a position is the readout's normed input."""

    Config = FBTConfig
    feeds_back = True
    begins_plain = True
    reads_embedding = True

    def __init__(self, config: FBTConfig) -> None:
        super().__init__(config)
        self.jitter = config.jitter
        self.fusion = Fusion(config)

    @classmethod
    def variants(cls) -> dict[str, ArchitectureConfig]:
        """Return small settings; see ``Architecture.variants``."""
        base = FBTConfig(architecture="fbt", vocab_size=29, width=16, heads=2, layers=2)
        return {
            **cls.stack_variants(base),
            "shared_norm": replace(base, embedding_norm=True, attention_gate=True, jitter=0.5),
        }

    @property
    def draws(self) -> bool:
        """In training something is drawn at random in every pass."""
        return super().draws or self.jitter > 0

    def initial_feedback(self, rows: int) -> Feedback:
        """Return nothing: a document's first position takes its embedding, [R, 1, d]."""
        weight = self.fusion.value.weight
        states = weight.new_zeros(rows, 1, self.config.width)
        return Feedback(states, torch.zeros(1, 1, 1, dtype=torch.bool, device=weight.device))

    def prepare_feedback(self, inputs: Inputs) -> Inputs:
        """Add the tokens' gates; see ``Architecture.prepare_feedback``."""
        return inputs.with_values(gate=self.fusion.gates(inputs.values["embedding"])).without("embedding")

    def fed_input(self, inputs: Inputs, feedback: Feedback | None) -> Tensor:
        """Return the fused vectors; see ``Architecture.fed_input``."""
        plain = inputs.values["x"]
        if feedback is None:
            return plain
        norm = self.fusion.norm or self.input_norm
        assert norm is not None
        return feedback.choose(norm(self.fusion.value(feedback.states) * inputs.values["gate"]), plain)

    def advance(self, inputs: Inputs, feedback: Feedback | None, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Run the blocks and the readout's norm; see ``Architecture.advance``."""
        if feedback is not None and self.training and self.jitter:
            noise = torch.empty_like(feedback.states).uniform_(-self.jitter, self.jitter)
            feedback = replace(feedback, states=feedback.states + noise)
        x, memory = super().advance(inputs, feedback, memory)
        return self.readout_layer.norm(x), memory

    def readout(self, states: Tensor) -> Tensor:
        """Map states, which are normed, to logits."""
        return self.readout_layer.logits(states, self.embedding)

    def mute_feedback(self) -> None:
        """Let the state through as it is, at the size of embeddings; see ``Architecture.mute_feedback``."""
        nn.init.eye_(self.fusion.value.weight)
        if self.fusion.norm is None:
            return
        if self.fusion.norm.weight is None:
            raise ConfigError(
                "model.norm is rms_unlearned, so that fused vectors cannot be given the size of embeddings; a plain "
                "transformer becomes an FBT only with a learned norm, or with model.embedding_norm"
            )
        with torch.no_grad():
            self.fusion.norm.weight.fill_(float(self.embedding.weight.square().mean().sqrt()))

    def dormant_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the fusion."""
        yield from self.fusion.parameters()

    def flops(self, length: int) -> Flops:
        """Return the forward FLOPs of a token; see ``Architecture.flops``."""
        return replace(
            super().flops(length),
            prepare_feedback=matmul_flops(self.fusion.gate),
            fed_state=matmul_flops(self.fusion.value),
        )

    def parts(self) -> dict[str, int]:
        """Return the number of parameters of each part."""
        return {**super().parts(), "fusion": count_parameters(self.fusion)}
