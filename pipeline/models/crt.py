"""CRT, the Context-Ready Transformer (Godavarti 2026, arXiv 2606.27538).

The last block's output at position t - 1 corrects the embedding of token t before it enters the blocks:

    c_t = W_2 gelu(W_1 LN(z_{t-1} + e_t) + b_1) + b_2;  x_t = e_t + c_t;  z_t = blocks(x_t)              (1-4)

The correction is never cumulative: it starts from e_t each time. At a document's start z is zero and the correction
applies. Without feedback x = e, the plain transformer. The paper trains K passes (5) with solver ``unrolled``; with
solver ``chunked`` at interval 1 this is its model with full backpropagation through time.

The author states that a patent on the method is pending; see docs/architectures/crt.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models import links
from pipeline.models.base import ARCHITECTURES, MOST, ArchitectureConfig, Flops, count_parameters
from pipeline.models.collector import Collector
from pipeline.models.feedback import Feedback
from pipeline.models.inputs import Inputs
from pipeline.models.layers import Linear, make_norm, matmul_flops
from pipeline.models.stack import StackArchitecture, StackConfig


@dataclass
class CRTConfig(StackConfig):
    """CRT: the stack's output corrects the next token's embedding."""

    correction_width: int | None = None
    """Hidden width of the correction; none takes four times ``width``."""

    def check(self) -> None:
        """Raise ConfigError on sizes out of range."""
        super().check()
        if self.correction_width is not None and not 1 <= self.correction_width <= MOST:
            raise ConfigError(f"model.correction_width is {self.correction_width}; it must be from 1 to {MOST}")


class Correction(nn.Module):
    """The correction network (1): one for the model."""

    def __init__(self, config: CRTConfig) -> None:
        super().__init__()
        self.norm = make_norm(config.norm, config.width, config.norm_eps)
        self.up = Linear(config.width, config.correction_width or 4 * config.width)
        self.down = Linear(self.up.out_features, config.width)
        self.scale = config.input_scale

    def init_own(self, generator: torch.Generator | None) -> None:
        """Let the correction start in proportion to the embedding."""
        with torch.no_grad():
            self.down.weight.mul_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map x = z + e [R, n, d] to the correction."""
        found = links.collected(self)
        if found is not None:
            return links.run(x, found)
        return self.down(F.gelu(self.up(self.norm(x))))

    def links(self, collector: Collector) -> list[links.Link] | None:
        """Return the network for a loop; see ``links.collected``."""
        norm, into, out = (links.links_of(each, collector) for each in (self.norm, self.up, self.down))
        return None if norm is None or into is None or out is None else [*norm, *into, links.GELULink(), *out]


@ARCHITECTURES.register("crt")
class CRT(StackArchitecture):
    """Context-Ready Transformer; the state of a position is the last block's output, not normed."""

    Config = CRTConfig
    feeds_back = True

    def __init__(self, config: CRTConfig) -> None:
        super().__init__(config)
        self.correction = Correction(config)

    @classmethod
    def variants(cls) -> dict[str, ArchitectureConfig]:
        """Return small settings; see ``Architecture.variants``."""
        base = CRTConfig(architecture="crt", vocab_size=29, width=16, heads=2, layers=2)
        return {**cls.stack_variants(base), "narrow": replace(base, layers=1, correction_width=24)}

    def initial_feedback(self, rows: int) -> Feedback:
        """Return z = 0, [R, 1, d]."""
        weight = self.correction.down.weight
        return Feedback(weight.new_zeros(rows, 1, self.config.width))

    def fed_input(self, inputs: Inputs, feedback: Feedback | None) -> Tensor:
        """Return the corrected embedding; see ``Architecture.fed_input``."""
        x = inputs.values["x"]
        if feedback is None:
            return x
        return feedback.choose(x + self.correction(x + feedback.states), x)

    def mute_feedback(self) -> None:
        """Let the correction be zero until it is trained; see ``Architecture.mute_feedback``."""
        nn.init.zeros_(self.correction.down.weight)
        nn.init.zeros_(self.correction.down.bias)

    def dormant_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the correction."""
        yield from self.correction.parameters()

    def flops(self, length: int) -> Flops:
        """Return the forward FLOPs of a token; see ``Architecture.flops``."""
        return replace(super().flops(length), fed_position=matmul_flops(self.correction))

    def parts(self) -> dict[str, int]:
        """Return the number of parameters of each part."""
        return {**super().parts(), "correction": count_parameters(self.correction)}
