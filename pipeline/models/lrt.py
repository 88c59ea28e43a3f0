"""LRT, the Latent Recurrent Transformer (2026, arXiv 2605.26797).

A state m of position t - 1, taken from the middle of the stack, enters every block at position t: its residual stream,
and its keys and values:

    x = alpha x + beta x0 + gamma m;  n = norm(x)
    k = g_loc W_k n + g_rec W_k' m;  v = g_loc W_v n + g_rec W_v' m;  (g_loc, g_rec) = 2 sigmoid(W n)

m is zero at a document's start and in a plain pass. W_k', W_v' are one pair for all blocks (LRT-shared, the paper's) or
one pair each (LRT-layerwise). The paper trains with solver ``interleaved`` over 2 subsets, or ``unrolled`` with a loss
on each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models.base import ARCHITECTURES, ArchitectureConfig, Flops, Memory, count_parameters
from pipeline.models.feedback import Feedback
from pipeline.models.functions import rotate
from pipeline.models.inputs import Inputs
from pipeline.models.layers import LayerNorm, Linear, PackedLinear, RMSNorm, make_norm, matmul_flops, normed
from pipeline.models.memory import KeyValueMemory, Step
from pipeline.models.stack import Block, StackArchitecture, StackConfig


@dataclass
class LRTConfig(StackConfig):
    """LRT: a middle block's state enters the residual stream, keys and values of all blocks."""

    source_layer: int | None = None
    """Block whose output is fed back, normed, counted from 1; -1 feeds back what the readout reads; none takes 0.6 of
    ``layers``."""
    recurrent_projection: Literal["shared", "layerwise"] = "shared"
    """One projection of the state to keys and values for all blocks, or one each."""
    memory_gates: bool = True
    """Gates, from the block's normed input, on its own keys and values and on those of the state."""

    def check(self) -> None:
        """Raise ConfigError on sizes out of range."""
        super().check()
        if self.source_layer is not None and self.source_layer != -1 and not 1 <= self.source_layer <= self.layers:
            raise ConfigError(
                f"model.source_layer is {self.source_layer}; it must be a block from 1 to layers={self.layers}, or -1"
            )

    @property
    def source(self) -> int:
        """The block whose output is fed back, counted from 1; -1 for what the readout reads."""
        return self.source_layer if self.source_layer is not None else max(1, round(0.6 * self.layers))


class Recurrent(NamedTuple):
    """What a block is fed of the state.

    Attributes:
        state: m, [R, n or 1, d]; None in a plain pass.
        key_value: m projected to keys and values, [R, n or 1, 2 kv_heads, head_dim]; None likewise.
        step: takes the block's own part of keys and values, and the gate, to make them anew later; None: not wanted.
        layer: the block, counted from 0.
    """

    state: Tensor | None
    key_value: Tensor | None
    step: tuple[Step, Step] | None
    layer: int


class LRTBlock(Block):
    """A block whose residual stream, keys and values take in the state."""

    mixes = True

    def __init__(self, config: LRTConfig) -> None:
        super().__init__(config, config)
        self.memory_scale = nn.Parameter(torch.empty(1))
        self.input_scale = config.input_scale
        self.memory_gate: nn.Linear | None = None
        if config.memory_gates:
            self.memory_gate = Linear(config.width, 2 * config.key_value_heads, bias=False)

    def init_own(self, generator: torch.Generator | None) -> None:
        """Let the state enter the stream with a tenth of its size, and the gates begin at one."""
        super().init_own(generator)
        nn.init.constant_(self.memory_scale, 0.1 * self.input_scale)
        if self.memory_gate is not None:
            nn.init.zeros_(self.memory_gate.weight)

    def enter(self, x: Tensor, extra: Recurrent) -> Tensor:
        """Add the state to the stream."""
        return x if extra.state is None else x + self.memory_scale * extra.state

    def mix(
        self, inner: Tensor, key: Tensor, value: Tensor, token_value: Tensor | None, extra: Recurrent
    ) -> tuple[Tensor, Tensor]:
        """Gate the block's own keys and values, and add those of the state."""
        gate = None
        if self.memory_gate is not None:
            own, gate = (2 * torch.sigmoid(self.memory_gate(inner)))[..., None].chunk(2, dim=2)
            key, value = own * key, own * value
        key, value = super().mix(inner, key, value, token_value, extra)
        if extra.step is not None:
            local, gates = extra.step
            local.join(extra.layer, key.transpose(1, 2), value.transpose(1, 2))
            held = torch.ones_like(key[..., :1]) if gate is None else gate
            gates.join(extra.layer, held.transpose(1, 2), held.transpose(1, 2))
        if extra.key_value is None:
            return key, value
        return add_recurrent(key, value, extra.key_value, gate)


def add_recurrent(key: Tensor, value: Tensor, key_value: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the state's part [R, n or 1, 2 kv_heads, head_dim] to keys and values [R, n, kv_heads, head_dim]."""
    keys, values = key_value.chunk(2, dim=2)
    if gate is None:
        return key + keys, value + values
    return torch.addcmul(key, gate, keys), torch.addcmul(value, gate, values)


@ARCHITECTURES.register("lrt")
class LRT(StackArchitecture):
    """Latent Recurrent Transformer; a state is the last block's output and, behind it, the source block's."""

    Config = LRTConfig
    feeds_back = True
    begins_plain = True
    refreshes = True
    settings: LRTConfig
    source_norm: RMSNorm | LayerNorm | None

    def __init__(self, config: LRTConfig) -> None:
        super().__init__(config)
        parts = (config.key_value_heads * config.head_width,) * 2
        count = 1 if config.recurrent_projection == "shared" else config.layers
        self.recurrent = nn.ModuleList(PackedLinear(config.width, parts) for _ in range(count))
        self.source_norm = None if config.source == -1 else make_norm(config.norm, config.width, config.norm_eps)

    def make_block(self, layer: int) -> Block:
        """Return a block of the stack."""
        assert isinstance(self.config, LRTConfig)
        return LRTBlock(self.config)

    @classmethod
    def variants(cls) -> dict[str, ArchitectureConfig]:
        """Return small settings; see ``Architecture.variants``."""
        base = LRTConfig(architecture="lrt", vocab_size=29, width=16, heads=2, layers=2)
        return {
            **cls.stack_variants(base),
            "layerwise": replace(base, recurrent_projection="layerwise", source_layer=-1),
            "ungated": replace(
                base, memory_gates=False, source_layer=2, heads=4, kv_heads=2, recurrent_projection="layerwise"
            ),
        }

    @property
    def state_width(self) -> int:
        """Width of a state: twice that of the stream, unless what is fed back is made of the last block's output."""
        return self.config.width * (1 if self.source_norm is None else 2)

    def initial_feedback(self, rows: int) -> Feedback:
        """Return m = 0, [R, 1, d]."""
        return Feedback(self.embedding.weight.new_zeros(rows, 1, self.config.width))

    def fed_back(self, states: Tensor) -> Tensor:
        """Return m of states [R, n, s]."""
        if self.source_norm is None:
            return self.readout_layer.norm(states)
        return self.source_norm(states[..., self.config.width :])

    def fed_input(self, inputs: Inputs, feedback: Feedback | None) -> Tensor:
        """Return m, zero where nothing is fed."""
        if feedback is None:
            return torch.zeros_like(inputs.values["x"])
        return feedback.choose(feedback.states, torch.zeros_like(feedback.states))

    def advance(self, inputs: Inputs, feedback: Feedback | None, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Run the blocks with the state in each; see ``Architecture.advance``."""
        state, projected = None, []
        if feedback is not None:
            state = self.fed_input(inputs, feedback)
            projected = self._projected(state)
        opened = None
        if memory is not None and "local" in memory:
            opened = memory["local"].step(inputs), memory["gates"].step(inputs)

        def extras(layer: int) -> Recurrent:
            return Recurrent(state, projected[layer % len(projected)] if projected else None, opened, layer)

        x, tapped, kept = self.blocks.run(
            self,
            inputs.values["x"],
            inputs,
            None if memory is None else memory["blocks"],
            stack=self.settings,
            extras=extras,
            tap=self.settings.source,
        )
        if self.source_norm is not None:
            assert tapped is not None
            x = torch.cat([x, tapped], dim=-1)
        if kept is None:
            return x, {}
        if opened is None:
            return x, {"blocks": kept}
        return x, {"blocks": kept, "local": opened[0].close(), "gates": opened[1].close()}

    def _projected(self, state: Tensor) -> list[Tensor]:
        """Return keys and values of the state, one for all blocks or one each."""
        head_dim = self.config.head_width
        return [projection(state).unflatten(-1, (-1, head_dim)) for projection in self.recurrent]

    def readout(self, states: Tensor) -> Tensor:
        """Map states [..., s] to logits."""
        return super().readout(states[..., : self.config.width])

    def rewritable_memory(self, *, refreshes: bool = False) -> Memory:
        """Return empty memories; with ``refreshes``, of the blocks' own keys, values and gates too."""
        memory = super().rewritable_memory()
        if not refreshes:
            return memory
        return {**memory, "local": KeyValueMemory(rewrites=True), "gates": KeyValueMemory(rewrites=True)}

    def refresh(self, inputs: Inputs, feedback: Feedback, memory: Memory, where: Tensor) -> Memory:
        """Make keys and values anew with the states fed back now; see ``Architecture.refresh``."""
        projected = self._projected(self.fed_input(inputs, feedback))
        where = where[:, None, :, None]
        held, local, gates = memory["blocks"], memory["local"], memory["gates"]
        old = held.length - inputs.length
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer, block in enumerate(self.lrt_blocks()):
            own, own_value, gate = (
                tensor.transpose(1, 2) for tensor in (local.keys[layer], local.values[layer], gates.keys[layer])
            )
            key, value = add_recurrent(own, own_value, projected[layer % len(projected)], gate)
            key = rotate(normed(key, block.head_norms, "key"), inputs.values["cos"], inputs.values["sin"])
            for made, before, after in (
                (key, held.keys[layer], keys),
                (value, held.values[layer], values),
            ):
                made = torch.where(where, made.transpose(1, 2), before[:, :, old : held.length])
                after.append(torch.cat([before[:, :, :old], made, before[:, :, held.length :]], dim=2))
        return {**memory, "blocks": replace(held, keys=keys, values=values)}

    def mute_feedback(self) -> None:
        """Let the state enter with weight zero until it is trained; see ``Architecture.mute_feedback``."""
        for parameter in self.recurrent.parameters():
            nn.init.zeros_(parameter)
        for block in self.lrt_blocks():
            nn.init.zeros_(block.memory_scale)

    def dormant_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the projections of the state, its norm and its scales."""
        yield from self.recurrent.parameters()
        if self.source_norm is not None:
            yield from self.source_norm.parameters()
        for block in self.lrt_blocks():
            yield block.memory_scale

    def lrt_blocks(self) -> Iterator[LRTBlock]:
        """Yield the blocks."""
        for block in self.blocks:
            assert isinstance(block, LRTBlock)
            yield block

    def flops(self, length: int) -> Flops:
        """Return the forward FLOPs of a token; see ``Architecture.flops``."""
        return replace(super().flops(length), fed_state=matmul_flops(self.recurrent))

    def parts(self) -> dict[str, int]:
        """Return the number of parameters of each part."""
        parts = super().parts()
        own = count_parameters(*(block.memory_scale for block in self.lrt_blocks()))
        own += count_parameters(*(block.memory_gate for block in self.lrt_blocks()))
        parts["blocks"] -= own
        return {**parts, "recurrence": own + count_parameters(self.recurrent, self.source_norm)}
