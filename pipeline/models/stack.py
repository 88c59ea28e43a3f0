"""Blocks over one residual stream, of which all architectures are built, and architectures that are one such stack."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from omegaconf import MISSING
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models import links
from pipeline.models.attending import Attended
from pipeline.models.base import MOST_LAYERS, Architecture, ArchitectureConfig, Flops, Memory, count_parameters
from pipeline.models.collector import Collector
from pipeline.models.feedback import Feedback
from pipeline.models.inputs import Inputs, Visibility, visibility
from pipeline.models.layers import (
    MLP,
    HeadNorms,
    Linear,
    SelfAttention,
    SwiGLU,
    add_branch,
    attend_same,
    make_ffn,
    make_norm,
    matmul_flops,
    turned,
)
from pipeline.models.memory import Attends, KeyValueMemory, Step
from pipeline.models.recomputed import Layers, callable_by_rows, of_rows


@dataclass
class StackConfig(ArchitectureConfig):
    """What architectures share that are one stack of blocks."""

    layers: int = MISSING
    """Blocks."""
    attention_window: int | None = None
    """Positions that self-attention sees, the current one included; none for all."""
    full_attention_every: int = 0
    """Every so many blocks, and in the last, attention has no window; 0: it has one in all."""
    attention_gate: bool = False
    """A sigmoid gate on the output of each attention head, from the block's normed input."""
    embedding_norm: bool = False
    """A norm on the token embeddings."""
    value_embeddings: bool = False
    """Each block adds a token's own embedding to its values, gated for each head (as nanochat does)."""
    residual_scalars: bool = False
    """Each block begins with alpha x + beta x0, learned scalars, x0 being what enters the stack (as nanochat does)."""
    depth_scaled_residuals: bool = False
    """Outputs of attention and feed-forward are scaled by 1 / sqrt(2 layers)."""

    def check(self) -> None:
        """Raise ConfigError on sizes out of range."""
        super().check()
        for name, bound in (("layers", 1), ("attention_window", 1), ("full_attention_every", 0)):
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"model.{name} is {value}; it must be at least {bound}")
        if self.layers > MOST_LAYERS:
            raise ConfigError(f"model.layers is {self.layers}; it must be at most {MOST_LAYERS}")
        if self.full_attention_every and self.attention_window is None:
            raise ConfigError("model.full_attention_every is set, but there is no model.attention_window to lift")

    @property
    def input_scale(self) -> float:
        """Root mean square of what enters the stack in a plain pass at the start of training.

        What feedback adds to it, or puts in its place, starts in proportion: it would drown the token otherwise.
        """
        return 1.0 if self.embedding_norm else self.embedding_std

    def window(self, layer: int) -> int | None:
        """Return the window of a block, counted from 0."""
        every = self.full_attention_every
        full = every and ((layer + 1) % every == 0 or layer + 1 == self.layers)
        return None if full else self.attention_window

    @property
    def memory_window(self) -> int | None:
        """The window beyond which no block sees a key."""
        return None if self.full_attention_every else self.attention_window


class Block(nn.Module):
    """Pre-norm block: x + attention(norm x), then x + feed-forward(norm x), with what a StackConfig adds.

    Args:
        config: sizes and kinds of layers.
        stack: settings of the stack that the block belongs to, if it is one with settings of its own.

    Attributes:
        mixes: keys and values take in more than the block's projections (``mix``).
    """

    mixes: ClassVar[bool] = False

    def __init__(self, config: ArchitectureConfig, stack: StackConfig | None = None) -> None:
        super().__init__()
        width, heads, kv_heads = config.width, config.heads, config.key_value_heads
        self.attention_norm = make_norm(config.norm, width, config.norm_eps)
        self.attention = SelfAttention(width, heads, kv_heads, config.head_width, bias=config.linear_bias)
        self.head_norms = make_head_norms(config)
        self.ffn_norm = make_norm(config.norm, width, config.norm_eps)
        self.ffn = make_ffn(config.ffn, width, config.hidden_width, bias=config.linear_bias)
        self.dropout = config.dropout
        self.scale = 1.0
        self.attention_gate: nn.Linear | None = None
        self.value_gate: nn.Linear | None = None
        self.residual_mix: nn.Parameter | None = None
        if stack is not None:
            if stack.depth_scaled_residuals:
                self.scale = 1 / math.sqrt(2 * stack.layers)
            if stack.attention_gate:
                self.attention_gate = Linear(width, heads, bias=False)
            if stack.value_embeddings:
                self.value_gate = Linear(width, kv_heads, bias=False)
            if stack.residual_scalars:
                self.residual_mix = nn.Parameter(torch.empty(2))

    def init_own(self, generator: torch.Generator | None) -> None:
        """Let gates begin half open (attention) or at one (values), and x0 with a tenth."""
        for gate in (self.attention_gate, self.value_gate):
            if gate is not None:
                nn.init.zeros_(gate.weight)
        if self.residual_mix is not None:
            with torch.no_grad():
                self.residual_mix.copy_(self.residual_mix.new_tensor([1.0, 0.1]))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        visible: Visibility,
        attends: Attends,
        first: Tensor | None = None,
        token_value: Tensor | None = None,
        extra: Any = None,
    ) -> Tensor:
        """Map x [rows, n, width] to the same shape.

        Args:
            x: residual stream.
            cos: rotation table.
            sin: rotation table.
            visible: what attention sees.
            attends: attention, to what else is remembered too.
            first: what entered the stack (``residual_scalars``).
            token_value: the token's embedding among the values, [rows, n, kv_heads * head_dim] (``value_embeddings``).
            extra: whatever a subclass is fed.
        """
        if self.residual_mix is not None:
            assert first is not None
            x = self.residual_mix[0] * x + self.residual_mix[1] * first
        x = self.enter(x, extra)
        dropout = self.dropout if self.training else 0.0
        plain = not (self.mixes or self.value_gate is not None or self.attention_gate is not None)
        if plain and not dropout:
            found = links.once(self._branches)
            attention = None if found is None else found[0].links(links.RotationLink(cos, sin), attends, visible)
            if found is not None and attention is not None:
                return links.residual(x, (attention, found[1]), self.scale)
        if not plain:
            inner = self.attention_norm(x)
            query, key, value = self.attention.project(inner)
            if self.value_gate is not None:
                assert token_value is not None
                token_value = token_value.view(value.shape) * (2 * torch.sigmoid(self.value_gate(inner)))[..., None]
            key, value = self.mix(inner, key, value, token_value, extra)
            query = turned(query, self.head_norms, "query", cos, sin)
            key = turned(key, self.head_norms, "key", cos, sin)
        else:
            query, key, value = self.attention.enter(x, self.attention_norm, self.head_norms, cos, sin)
        out = attends(query, key, value, visible, dropout)
        if self.attention_gate is not None:
            out = out * torch.sigmoid(self.attention_gate(inner))[..., None]
        x = add_branch(x, out.flatten(2), self.attention.output, dropout=dropout, scale=self.scale)
        return self._fed_forward(x, dropout)

    def _fed_forward(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        return add_branch(x, x, self.ffn_norm, self.ffn, dropout=dropout, scale=self.scale)

    def layers(
        self, x: Tensor, cos: Tensor, sin: Tensor, visible: Visibility, attends: Attends, *others: Any
    ) -> Layers | None:
        """Return a call of the block as layers that are computed again a few positions at a time.

        None where it has more than attention of positions to each other and feed-forward, or draws at random, or where
        hooks would be called more than once.
        """
        more = type(self) is not Block or self.attention_gate is not None or any(each is not None for each in others)
        draws = self.dropout and self.training
        if more or draws or attends is not attend_same or not callable_by_rows(self):
            return None

        def attention(part: Tensor, rows: slice) -> tuple[Tensor, ...]:
            seen = visible if visible.mask is None else replace(visible, mask=of_rows(visible.mask, rows))
            tables = of_rows(cos, rows), of_rows(sin, rows)
            out = attends(*self.attention.enter(part, self.attention_norm, self.head_norms, *tables), seen, 0.0)
            return (add_branch(part, out.flatten(2), self.attention.output, scale=self.scale),)

        if type(self.ffn) in (SwiGLU, MLP):
            return Layers(self, attention, self._fed_forward)
        return Layers(self, lambda part, rows: (self._fed_forward(attention(part, rows)[0]),))

    def _branches(self, collector: Collector) -> tuple[Attended, list[links.Link]] | None:
        """Return attention and the feed-forward layer for a loop; None if they are not all collected."""
        attention = self.attention.links(collector, self.attention_norm, self.head_norms)
        ffn = links.collected(self.ffn_norm, self.ffn)
        return None if attention is None or ffn is None else (attention, ffn)

    def enter(self, x: Tensor, extra: Any) -> Tensor:
        """Return the residual stream x [rows, n, width] as the block takes it in."""
        return x

    def mix(
        self, inner: Tensor, key: Tensor, value: Tensor, token_value: Tensor | None, extra: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [rows, n, kv_heads, head_dim] with all that is added to the block's projections."""
        return key, value if token_value is None else value + token_value


def make_head_norms(config: ArchitectureConfig, *, key: bool = True, query: bool = True) -> HeadNorms | None:
    """Return the QK-norm that a configuration asks for."""
    if not config.qk_norm:
        return None
    learned = config.norm != "rms_unlearned"
    return HeadNorms(config.head_width, config.norm_eps, learned=learned, key=key, query=query)


class Stack(nn.ModuleList):
    """Blocks over one residual stream."""

    def run(
        self,
        model: Architecture,
        x: Tensor,
        inputs: Inputs,
        memory: KeyValueMemory | None,
        *,
        stack: StackConfig | None = None,
        extras: Callable[[int], Any] | None = None,
        tap: int | None = None,
    ) -> tuple[Tensor, Tensor | None, KeyValueMemory | None]:
        """Run x [rows, n, width] through all blocks.

        Args:
            model: whose blocks they are.
            x: residual stream.
            inputs: positions.
            memory: of other positions; None: there are none, and none of these is to be kept.
            stack: settings of the stack; None for full attention and nothing else.
            extras: returns what block l is fed.
            tap: block after which the stream is wanted, counted from 1.

        Returns:
            The stream after all blocks, that after block ``tap``, and the memory with these positions added.
        """
        step = None if memory is None else memory.step(inputs)
        tables = inputs.values["cos"], inputs.values["sin"]
        seen: dict[int | None, Visibility] = {}
        tapped = None
        for layer, block in enumerate(self):
            window = None if stack is None else stack.window(layer)
            if window not in seen:
                seen[window] = stack_visibility(inputs, step, window)
            x = model.run_block(
                block,
                x,
                *tables,
                seen[window],
                attend_same if step is None else step.attention(layer),
                inputs.values.get("first"),
                inputs.values.get(f"value_embedding_{layer}"),
                None if extras is None else extras(layer),
                parallel=step is None or step.recomputes,
            )
            if layer + 1 == tap:
                tapped = x
        return x, tapped, None if step is None else step.close()


def stack_visibility(inputs: Inputs, step: Step | None, window: int | None) -> Visibility:
    """Return what the positions of ``inputs`` see of themselves and of the memory opened as ``step``."""
    if step is None:
        return visibility(inputs, inputs.key_index, window, same=True, exact=False)
    reached = window is None or step.key_index.shape[1] <= window
    if window is not None and not reached and getattr(step, "slices", False) and step.exact and inputs.length == 1:
        seen = visibility(inputs, step.key_index[:, -window:], window, same=False, exact=True)
        return replace(seen, newest=window)
    return visibility(inputs, step.key_index, window, same=step.same, exact=step.exact and reached)


class StackArchitecture(Architecture):
    """An architecture that is one stack of blocks over token embeddings; alone, the plain transformer.

    Attributes:
        reads_embedding: the token embedding itself is wanted among the inputs, beside what enters the stack.
    """

    reads_embedding: ClassVar[bool] = False

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
        self.settings = config
        self.input_norm = make_norm(config.norm, config.width, config.norm_eps) if config.embedding_norm else None
        self.value_embeddings: nn.ModuleList | None = None
        if config.value_embeddings:
            width = config.key_value_heads * config.head_width
            assert config.vocab_size is not None
            self.value_embeddings = nn.ModuleList(nn.Embedding(config.vocab_size, width) for _ in range(config.layers))
        self.blocks = Stack(self.make_block(layer) for layer in range(config.layers))

    def make_block(self, layer: int) -> Block:
        """Return a block of the stack, counted from 0."""
        return Block(self.config, self.settings)

    @staticmethod
    def stack_variants(base: StackConfig) -> dict[str, ArchitectureConfig]:
        """Return small settings that together use every option of a stack."""
        return {
            "plain": base,
            "grouped": replace(base, heads=4, kv_heads=2, head_dim=6, ffn_width=24, attention_window=3),
            "untied": replace(
                base, tied_head=False, qk_norm=False, rope_base=100.0, attention_gate=True, depth_scaled_residuals=True
            ),
            "layernorm": replace(
                base, norm="layer", linear_bias=True, ffn="gelu", tied_head=False, head_bias=True, rope="integer"
            ),
            "nanochat": replace(
                base,
                layers=3,
                norm="rms_unlearned",
                norm_eps=1e-5,
                ffn="relu2",
                ffn_width=40,
                tied_head=False,
                logit_softcap=5.0,
                embedding_norm=True,
                value_embeddings=True,
                residual_scalars=True,
                attention_window=4,
                full_attention_every=2,
            ),
        }

    def new_memory(self, capacity: int | None = None) -> Memory:
        """Return an empty memory for all blocks."""
        return {"blocks": KeyValueMemory(window=self.settings.memory_window, capacity=capacity)}

    def prepare(
        self, tokens: Tensor, index: Tensor, starts: Tensor | None, memory: Memory | None = None
    ) -> tuple[Inputs, Memory]:
        """Embed the tokens; see ``Architecture.prepare``."""
        stop = tokens.shape[1] + (0 if memory is None else memory["blocks"].stop)
        embedding, values = self.embed(tokens, index, starts, stop)
        x = embedding if self.input_norm is None else self.input_norm(embedding)
        values["x"] = x
        if self.reads_embedding:
            values["embedding"] = embedding
        if self.settings.residual_scalars:
            values["first"] = x
        for layer, table in enumerate(self.value_embeddings or ()):
            values[f"value_embedding_{layer}"] = table(tokens)
        return Inputs(index, starts, stop, values), memory or {}

    def advance(self, inputs: Inputs, feedback: Feedback | None, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Run the blocks; see ``Architecture.advance``."""
        x = inputs.values["x"] if feedback is None else self.fed_input(inputs, feedback)
        x, _, kept = self.blocks.run(self, x, inputs, None if memory is None else memory["blocks"], stack=self.settings)
        return x, {} if kept is None else {"blocks": kept}

    def flops(self, length: int) -> Flops:
        """Return the forward FLOPs of a token; see ``Architecture.flops``."""
        return Flops(advance=stack_flops(self.blocks, self.settings, length), readout=readout_flops(self))

    def parts(self) -> dict[str, int]:
        """Return the number of parameters of each part."""
        parts = {
            "embedding": count_parameters(self.embedding, self.input_norm),
            "blocks": count_parameters(self.blocks),
            "readout": count_parameters(self.readout_layer),
        }
        if self.value_embeddings is not None:
            parts["value_embeddings"] = count_parameters(self.value_embeddings)
        return parts


def attention_flops(config: ArchitectureConfig, keys: float) -> float:
    """Return the FLOPs of one query over ``keys`` keys: scores and the weighted sum of values."""
    return 4.0 * config.heads * config.head_width * keys


def mean_visible(length: int, window: int | None = None) -> float:
    """Return the mean number of keys a position of a row of ``length`` sees, itself included."""
    reach = min(length, window or length)
    return reach - reach * (reach - 1) / (2 * length)


def stack_flops(blocks: nn.ModuleList, config: ArchitectureConfig, length: int) -> float:
    """Return the forward FLOPs of a token in ``blocks``."""
    windows = [config.window(layer) if isinstance(config, StackConfig) else None for layer in range(len(blocks))]
    seen = sum(mean_visible(length, window) for window in windows)
    return matmul_flops(blocks) + attention_flops(config, seen)


def readout_flops(model: Architecture) -> float:
    """Return the FLOPs of a token's logits."""
    return 2.0 * model.embedding.weight.numel()
