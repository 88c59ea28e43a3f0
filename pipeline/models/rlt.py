"""RLT, the Recurrent Looped Transformer (Zhang, Feng and Qin 2026).

A causal encoder E turns tokens into e_t and, once, into a memory of keys and values. A decoder reads e_t merged with
the last position's decoder output, its own last W positions, and the encoder's memory:

    r_t = RMSNorm(s_{t-1});  g_t = sigmoid(W_g [e_t; r_t] + b_g);  u_t = e_t + alpha g_t * (W_s r_t)      (2.9-2.11)
    s_t = decoder(u_t, window of the last W decoder positions, memory of positions <= t)                 (2.12-2.16)

RLT-1 feeds back at every position, RLT-2 once every B positions (solver ``chunked``), RLT-0 never (solver ``parallel``:
the merge is left out, z = e_t). All three have the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import MISSING
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models import links
from pipeline.models.attending import Attended
from pipeline.models.base import (
    ARCHITECTURES,
    MOST_LAYERS,
    Architecture,
    ArchitectureConfig,
    Flops,
    Memory,
    Whole,
    count_parameters,
    in_place,
)
from pipeline.models.collector import Collector
from pipeline.models.feedback import Feedback
from pipeline.models.inputs import Inputs, Visibility, visibility
from pipeline.models.layers import (
    MLP,
    CrossAttention,
    HeadNorms,
    Linear,
    PackedLinear,
    SelfAttention,
    SwiGLU,
    add_branch,
    attend_same,
    init_linear,
    init_matrix,
    make_ffn,
    make_norm,
    matmul_flops,
    turned,
)
from pipeline.models.memory import Attends, KeyValueMemory, Recalls, Shared
from pipeline.models.recomputed import Layers, callable_by_rows, of_rows
from pipeline.models.stack import (
    Block,
    Stack,
    attention_flops,
    make_head_norms,
    mean_visible,
    readout_flops,
    stack_flops,
    stack_visibility,
)


@dataclass
class RLTConfig(ArchitectureConfig):
    """RLT: a causal encoder and a recurrent decoder."""

    encoder_layers: int = MISSING
    """Blocks of the encoder (L_E)."""
    decoder_layers: int = MISSING
    """Blocks of the decoder (L_D); 0 lets the merge alone recur, without a memory."""
    window: int = 8
    """Decoder positions that decoder self-attention sees (W), the current one included."""
    alpha: float = 0.1
    """Factor of the gated state in the merge, a constant."""
    memory_groups: int = 1
    """Memories of the encoder's output (G); decoder block l reads memory l G / L_D, rounded down."""
    tied_stacks: bool = False
    """Decoder block l uses the self-attention and feed-forward weights of encoder block l. Norms, cross-attention and
    the merge stay its own. Needs as many decoder as encoder blocks."""

    def check(self) -> None:
        """Raise ConfigError on sizes that do not fit each other."""
        super().check()
        for name, bound in (("encoder_layers", 1), ("decoder_layers", 0), ("window", 1), ("memory_groups", 1)):
            if getattr(self, name) < bound:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least {bound}")
        for name in ("encoder_layers", "decoder_layers"):
            if getattr(self, name) > MOST_LAYERS:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at most {MOST_LAYERS}")
        if self.memory_groups > max(1, self.decoder_layers):
            raise ConfigError(
                f"model.memory_groups is {self.memory_groups}; with decoder_layers={self.decoder_layers} no more than "
                f"{max(1, self.decoder_layers)} can be read"
            )
        if self.tied_stacks and self.encoder_layers != self.decoder_layers:
            raise ConfigError(
                f"model.tied_stacks needs as many decoder as encoder blocks; encoder_layers is {self.encoder_layers}, "
                f"decoder_layers {self.decoder_layers}"
            )


Branch = Sequence[links.Link]
"""A branch of a residual stream; see ``links.residual``."""


class Merge(nn.Module):
    """The gate through which the state enters (2.9-2.11)."""

    def __init__(self, config: RLTConfig) -> None:
        super().__init__()
        width = config.width
        self.alpha = config.alpha
        self.norm = make_norm(config.norm, width, config.norm_eps)
        # W_g acts on [e; r]: its halves lie apart, since the first needs no state and is applied to all positions at
        # once. The second reads r as W_s does: one product for both.
        self.entry_gate = Linear(width, width)
        self.state = PackedLinear(width, (width, width))
        self.factor, self.kind = config.hidden_std_factor, config.hidden_init

    def init_own(self, generator: torch.Generator | None) -> None:
        """Draw W_g by its fan-in, that of [e; r], and W_s by its own."""
        width = self.entry_gate.in_features
        init_linear(self.entry_gate, self.factor, 2 * width, generator, self.kind)
        init_linear(self.state, self.factor, width, generator, self.kind)
        with torch.no_grad():
            init_matrix(self.state.weight[:width], self.factor / math.sqrt(2 * width), generator, self.kind)

    def forward(self, entry: Tensor, gate: Tensor, state: Tensor) -> Tensor:
        """Merge entry [R, n, d], with its half of the gate, and state [R, n or 1, d]."""
        found = links.collected(self.norm, self.state)
        if found is not None and state.dtype is entry.dtype is gate.dtype:
            return links.gated(state, entry, gate, found, self.alpha)
        state_gate, value = self.state(self.norm(state)).chunk(2, dim=-1)
        return torch.addcmul(entry, torch.sigmoid(gate + state_gate), value, value=self.alpha)


class EncoderMemory(nn.Module):
    """Keys and values that the decoder reads of the encoder's output (2.2), G groups."""

    def __init__(self, config: RLTConfig) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = config.key_value_heads, config.head_width
        self.norm = make_norm(config.norm, config.width, config.norm_eps)
        parts, bias = (self.kv_heads * self.head_dim,) * 2, config.linear_bias
        groups = range(config.memory_groups)
        self.key_value = nn.ModuleList(PackedLinear(config.width, parts, bias=bias) for _ in groups)
        norms = [make_head_norms(config, query=False) for _ in groups]
        self.qk_norm = config.qk_norm
        self.head_norms = nn.ModuleList(norm for norm in norms if norm is not None)

    def forward(self, entry: Tensor, cos: Tensor, sin: Tensor) -> list[Shared]:
        """Return for each group the keys and values of entry [rows, n, width]."""
        x = self.norm(entry)
        memories = []
        for group, projection in enumerate(self.key_value):
            key, value = projection(x).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=2)
            norms = self.head_norms[group] if self.qk_norm else None
            assert norms is None or isinstance(norms, HeadNorms)
            key = turned(key, norms, "key", cos, sin)
            memories.append(Shared(key.transpose(1, 2), value.transpose(1, 2)))
        return memories


class DecoderBlock(nn.Module):
    """Window self-attention, attention to the encoder's memory, feed-forward (2.12-2.16)."""

    def __init__(self, config: RLTConfig) -> None:
        super().__init__()
        width, head_dim, bias = config.width, config.head_width, config.linear_bias
        self.attention_norm = make_norm(config.norm, width, config.norm_eps)
        self.cross_norm = make_norm(config.norm, width, config.norm_eps)
        self.ffn_norm = make_norm(config.norm, width, config.norm_eps)
        self.head_norms = make_head_norms(config)
        self.cross_head_norms = make_head_norms(config, key=False)
        self.cross = CrossAttention(width, config.heads, head_dim, bias=bias)
        self.dropout = config.dropout
        self.attention: SelfAttention | None = None
        self.ffn: SwiGLU | MLP | None = None
        if not config.tied_stacks:
            self.attention = SelfAttention(width, config.heads, config.key_value_heads, head_dim, bias=bias)
            self.ffn = make_ffn(config.ffn, width, config.hidden_width, bias=bias)

    def forward(
        self,
        z: Tensor,
        cos: Tensor,
        sin: Tensor,
        window: Visibility,
        attends: Attends,
        recalls: Recalls,
        past: Visibility,
        twin: Block,
    ) -> Tensor:
        """Map z [rows, n, width] to the same shape.

        Args:
            z: residual stream.
            cos: rotation table.
            sin: rotation table.
            window: what self-attention sees.
            attends: self-attention, to earlier decoder positions too.
            recalls: cross-attention, to the encoder's memory.
            past: what cross-attention sees.
            twin: encoder block whose weights stand in for those that a tied decoder lacks.
        """
        branches = self._branches(cos, sin, window, attends, recalls, past, twin)
        if branches is not None:
            return links.residual(z, branches, 1.0)
        attention, ffn = self.attention or twin.attention, self.ffn or twin.ffn
        dropout = self.dropout if self.training else 0.0
        query, key, value = attention.enter(z, self.attention_norm, self.head_norms, cos, sin)
        z = add_branch(z, attends(query, key, value, window, dropout).flatten(2), attention.output, dropout=dropout)
        query = self.cross.enter(z, self.cross_norm, self.cross_head_norms, cos, sin)
        z = add_branch(z, recalls(query, past, dropout).flatten(2), self.cross.output, dropout=dropout)
        return add_branch(z, z, self.ffn_norm, ffn, dropout=dropout)

    def links(self, *settings: Any) -> Sequence[Branch] | None:
        """Return the block as branches of a residual stream within a loop, given all that ``forward`` is but z.

        None if it is not all collected (``links.collected``), or not called as it is written here.
        """
        return self._branches(*settings) if links.once(self._follows) else None

    def _follows(self, collector: Collector) -> bool:
        return links.replaceable(self, "forward")

    def _branches(
        self,
        cos: Tensor,
        sin: Tensor,
        window: Visibility,
        attends: Attends,
        recalls: Recalls,
        past: Visibility,
        twin: Block,
    ) -> Sequence[Branch] | None:
        found = None if self.dropout and self.training else links.once(self._collected, twin)
        if found is None:
            return None
        own, cross, ffn = found
        rotation = links.RotationLink(cos, sin)
        attention, recall = own.links(rotation, attends, window), cross.links(rotation, recalls, past)
        return None if attention is None or recall is None else (attention, recall, ffn)

    def _collected(self, collector: Collector, twin: Block) -> tuple[Attended, Attended, Branch] | None:
        """Return both attentions and the feed-forward layer for a loop; None if they are not all collected."""
        attention = (self.attention or twin.attention).links(collector, self.attention_norm, self.head_norms)
        cross = self.cross.links(collector, self.cross_norm, self.cross_head_norms)
        ffn = links.collected(self.ffn_norm, self.ffn or twin.ffn)
        return None if attention is None or cross is None or ffn is None else (attention, cross, ffn)


@ARCHITECTURES.register("rlt")
class RLT(Architecture):
    """Recurrent Looped Transformer; the state of a position is the decoder's output, not normed."""

    Config = RLTConfig
    feeds_back = True

    def __init__(self, config: RLTConfig) -> None:
        super().__init__(config)
        self.settings = config
        self.encoder = Stack(Block(config) for _ in range(config.encoder_layers))
        self.merge = Merge(config)
        self.initial = nn.Parameter(torch.empty(config.width))
        self.memory = EncoderMemory(config) if config.decoder_layers else None
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.decoder_layers))

    @classmethod
    def variants(cls) -> dict[str, ArchitectureConfig]:
        """Return small settings; see ``Architecture.variants``."""
        base = RLTConfig(
            architecture="rlt",
            vocab_size=29,
            width=16,
            heads=2,
            encoder_layers=1,
            decoder_layers=2,
            window=3,
            alpha=0.7,
        )
        return {
            "plain": base,
            "grouped": replace(base, heads=4, kv_heads=2, head_dim=6, decoder_layers=3, memory_groups=2, qk_norm=False),
            "tied": replace(base, encoder_layers=2, tied_stacks=True, tied_head=False),
            "memoryless": replace(base, encoder_layers=2, decoder_layers=0),
            "one_position_window": replace(base, window=1, decoder_layers=1),
            "layernorm": replace(base, norm="layer", linear_bias=True, ffn="gelu", rope="integer", norm_eps=1e-5),
            "unlearned": replace(base, norm="rms_unlearned", ffn="relu2", tied_head=False, logit_softcap=5.0),
        }

    def init_weights(self, generator: torch.Generator | None = None, whole: Whole = in_place) -> None:
        """Draw all weights anew, in a fixed order; see ``Architecture.init_weights``."""
        super().init_weights(generator, whole)
        with whole(self.initial):
            nn.init.normal_(self.initial, std=self.config.embedding_std, generator=generator)

    def new_memory(self, capacity: int | None = None) -> Memory:
        """Return empty memories: the encoder's keys and values, the memory read from it, the decoder's window."""
        return {
            "encoder": KeyValueMemory(capacity=capacity),
            "shared": KeyValueMemory(capacity=capacity),
            "decoder": KeyValueMemory(window=self.settings.window, capacity=capacity),
        }

    def initial_feedback(self, rows: int) -> Feedback:
        """Return the learned initial state s* for every row, [R, 1, d]."""
        return Feedback(self.initial.expand(rows, 1, -1))

    def prepare(
        self, tokens: Tensor, index: Tensor, starts: Tensor | None, memory: Memory | None = None
    ) -> tuple[Inputs, Memory]:
        """Run the encoder and make its memory; see ``Architecture.prepare``."""
        stop = tokens.shape[1] + (0 if memory is None else memory["encoder"].stop)
        x, values = self.embed(tokens, index, starts, stop)
        inputs = Inputs(index, starts, stop, values)
        entry, _, encoder = self.encoder.run(self, x, inputs, None if memory is None else memory["encoder"])
        shared = [] if self.memory is None else self._shared(self.memory, entry, values["cos"], values["sin"])
        if memory is not None and encoder is not None:
            step = memory["shared"].step(inputs)
            shared = [Shared(*step.join(group, each.key, each.value)) for group, each in enumerate(shared)]
            memory = {**memory, "encoder": encoder, "shared": step.close()}
        return Inputs(index, starts, stop, {**values, "entry": entry}, tuple(shared)), memory or {}

    def _shared(self, memory: EncoderMemory, entry: Tensor, cos: Tensor, sin: Tensor) -> list[Shared]:
        """Return the keys and values of entry [rows, n, width], of all that was computed for them alone if need be."""
        if not (self.checkpoint_finely and torch.is_grad_enabled() and callable_by_rows(memory)):
            return memory(entry, cos, sin)

        def tensors(part: Tensor, rows: slice) -> tuple[Tensor, ...]:
            made = memory(part, of_rows(cos, rows), of_rows(sin, rows))
            return tuple(tensor for each in made for tensor in (each.key, each.value))

        found = iter(Layers(memory, tensors).run(entry))
        return [Shared(key, value) for key, value in zip(found, found, strict=True)]

    def prepare_feedback(self, inputs: Inputs) -> Inputs:
        """Add the token's half of the gate; see ``Architecture.prepare_feedback``."""
        return inputs.with_values(gate=self.merge.entry_gate(inputs.values["entry"]))

    def fed_input(self, inputs: Inputs, feedback: Feedback | None) -> Tensor:
        """Return the merge u, or the encoder's output where nothing is fed; see ``Architecture.fed_input``."""
        entry = inputs.values["entry"]
        if feedback is None:
            return entry
        return feedback.choose(self.merge(entry, inputs.values["gate"], feedback.states), entry)

    def advance(self, inputs: Inputs, feedback: Feedback | None, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Merge the state and run the decoder; see ``Architecture.advance``. Without feedback this is RLT-0."""
        z = self.fed_input(inputs, feedback)
        if not self.decoder:
            return z, memory or {}
        step = None if memory is None else memory["decoder"].step(inputs)
        window = stack_visibility(inputs, step, self.settings.window)
        reach = min(inputs.stop, inputs.shared[0].length)
        past = self._past(inputs, reach)
        groups = self.settings.memory_groups
        branches: list[Branch] = []  # of blocks that follow each other: one node to autograd
        for layer, block in enumerate(self._decoder_blocks()):
            settings = (
                inputs.values["cos"],
                inputs.values["sin"],
                window,
                attend_same if step is None else step.attention(layer),
                inputs.shared[layer * groups // len(self.decoder)].attention(reach),
                past,
                self.encoder[min(layer, len(self.encoder) - 1)],
            )
            found = block.links(*settings)
            if found is not None:
                branches += found
                continue
            z, branches = links.residual(z, branches, 1.0), []
            z = self.run_block(block, z, *settings, parallel=step is None or step.recomputes)
        z = links.residual(z, branches, 1.0)
        if memory is not None and step is not None:
            memory = {**memory, "decoder": step.close()}
        return z, memory or {}

    @staticmethod
    def _past(inputs: Inputs, count: int) -> Visibility:
        """Return what the positions see of the encoder's memory, whose first ``count`` keys lie in row order."""
        if inputs.length == 1 and inputs.starts is None and inputs.valid is None:
            return Visibility(None)
        index = torch.arange(count, device=inputs.index.device)[None]
        return visibility(inputs, index, None, same=count == inputs.length, exact=True)

    def dormant_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the merge and the initial state."""
        yield from self.merge.parameters()
        yield self.initial

    def flops(self, length: int) -> Flops:
        """Return the forward FLOPs of a token; see ``Architecture.flops``."""
        config = self.settings
        blocks: list[nn.Module] = list(self.encoder if config.tied_stacks else self.decoder)
        decoder = matmul_flops(*blocks, *(block.cross for block in self._decoder_blocks() if config.tied_stacks))
        keys = mean_visible(length, config.window) + mean_visible(length)
        return Flops(
            prepare=stack_flops(self.encoder, config, length) + matmul_flops(self.memory),
            prepare_feedback=matmul_flops(self.merge.entry_gate),
            advance=decoder + config.decoder_layers * attention_flops(config, keys),
            fed_state=matmul_flops(self.merge.state),
            readout=readout_flops(self),
        )

    def _decoder_blocks(self) -> Iterator[DecoderBlock]:
        for block in self.decoder:
            assert isinstance(block, DecoderBlock)
            yield block

    def parts(self) -> dict[str, int]:
        """Return the number of parameters of each part."""
        return {
            "embedding": count_parameters(self.embedding),
            "encoder": count_parameters(self.encoder),
            "merge": count_parameters(self.merge, self.initial),
            "memory": count_parameters(self.memory),
            "decoder": count_parameters(self.decoder),
            "readout": count_parameters(self.readout_layer),
        }
