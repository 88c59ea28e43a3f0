"""The baseline: a pre-norm decoder-only transformer. Nothing is fed back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from omegaconf import MISSING
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models.base import ARCHITECTURES, Architecture, ArchitectureConfig, Memory, count_parameters
from pipeline.models.inputs import Inputs, Visibility, visibility
from pipeline.models.layers import HeadNorms, RMSNorm, SelfAttention, SwiGLU, attend, matmul_flops
from pipeline.models.memory import KeyValueMemory, Step

Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Pre-norm block: x + attention(norm x), then x + feed-forward(norm x)."""

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = SelfAttention(config.width, config.heads, config.key_value_heads, config.head_width)
        self.head_norms = HeadNorms(config.head_width) if config.qk_norm else None
        self.ffn_norm = RMSNorm(config.width)
        self.ffn = SwiGLU(config.width, config.hidden_width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Visibility, join: Join | None) -> Tensor:
        """Map x [rows, n, width] to the same shape; ``join`` adds the keys and values of earlier positions."""
        query, key, value = self.attention.project(self.attention_norm(x), cos, sin, self.head_norms)
        if join is not None:
            key, value = join(key, value)
        x = x + self.attention.output(attend(query, key, value, visible))
        return x + self.ffn(self.ffn_norm(x))


class Stack(nn.ModuleList):
    """Blocks over one residual stream, all with full causal attention."""

    def run(
        self, model: Architecture, x: Tensor, inputs: Inputs, memory: KeyValueMemory | None
    ) -> tuple[Tensor, KeyValueMemory | None]:
        """Run x [rows, n, width] through all blocks; return it and the memory with these positions added."""
        step = None if memory is None else memory.step(inputs)
        visible = stack_visibility(inputs, step, None)
        tables = inputs.values["cos"], inputs.values["sin"]
        for block in self:
            join = None if step is None else step.join
            x = model.run_block(block, x, *tables, visible, join, parallel=step is None)
        return x, None if step is None else step.close()


def stack_visibility(inputs: Inputs, step: Step | None, window: int | None) -> Visibility:
    """Return what the positions of ``inputs`` see of themselves and of the memory opened as ``step``."""
    if step is None:
        return visibility(inputs, inputs.key_index, window, same=True, exact=False)
    return visibility(inputs, step.key_index, window, same=step.same, exact=not step.gaps)


@dataclass
class TransformerConfig(ArchitectureConfig):
    """Transformer: RMSNorm, rotary positions, QK-norm, SwiGLU."""

    layers: int = MISSING
    """Blocks."""

    def check(self) -> None:
        """Raise ConfigError on sizes out of range."""
        super().check()
        if self.layers < 1:
            raise ConfigError(f"model.layers is {self.layers}; it must be at least 1")


@ARCHITECTURES.register("transformer")
class Transformer(Architecture):
    """Decoder-only transformer; the state of a position is the last block's output."""

    Config = TransformerConfig
    feeds_back = False

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.blocks = Stack(Block(config) for _ in range(config.layers))

    @classmethod
    def variants(cls) -> dict[str, ArchitectureConfig]:
        """Return small settings; see ``Architecture.variants``."""
        base = TransformerConfig(architecture="transformer", vocab_size=29, width=16, heads=2, layers=2)
        return {
            "plain": base,
            "grouped": replace(base, heads=4, kv_heads=2, head_dim=6, ffn_width=24),
            "untied": replace(base, tied_head=False, qk_norm=False, rope_base=100.0),
        }

    def new_memory(self, capacity: int | None = None) -> Memory:
        """Return an empty memory for all blocks."""
        return {"blocks": KeyValueMemory(capacity=capacity)}

    def prepare(
        self, tokens: Tensor, index: Tensor, starts: Tensor | None, memory: Memory | None = None
    ) -> tuple[Inputs, Memory]:
        """Embed the tokens; see ``Architecture.prepare``."""
        x, values = self.embed(tokens, index, starts)
        stop = tokens.shape[1] + (0 if memory is None else memory["blocks"].length)
        return Inputs(index, starts, stop, {"x": x, **values}), memory or {}

    def advance(self, inputs: Inputs, feedback: Tensor | None, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Run the blocks; see ``Architecture.advance``. ``feedback`` must be None."""
        if feedback is not None:
            raise ValueError("a transformer takes no feedback")
        x, kept = self.blocks.run(self, inputs.values["x"], inputs, None if memory is None else memory["blocks"])
        return x, {} if kept is None else {"blocks": kept}

    def flops_per_token(self, length: int, *, feedback: float) -> float:
        """Return the forward FLOPs of a token; see ``Architecture.flops_per_token``."""
        return stack_flops(self.blocks, self.config, length) + readout_flops(self)

    def parts(self) -> dict[str, int]:
        """Return the number of parameters of each part."""
        return {
            "embedding": count_parameters(self.embedding),
            "blocks": count_parameters(self.blocks),
            "readout": count_parameters(self.readout_layer),
        }


def attention_flops(config: ArchitectureConfig, keys: float) -> float:
    """Return the FLOPs of one query over ``keys`` keys: scores and the weighted sum of values."""
    return 4.0 * config.heads * config.head_width * keys


def mean_visible(length: int, window: int | None = None) -> float:
    """Return the mean number of keys a position of a row of ``length`` sees, itself included."""
    reach = min(length, window or length)
    return reach - reach * (reach - 1) / (2 * length)


def stack_flops(blocks: nn.ModuleList, config: ArchitectureConfig, length: int) -> float:
    """Return the forward FLOPs of a token in ``blocks`` with full causal attention."""
    return matmul_flops(blocks) + len(blocks) * attention_flops(config, mean_visible(length))


def readout_flops(model: Architecture) -> float:
    """Return the FLOPs of a token's logits."""
    return 2.0 * model.embedding.weight.numel()
