"""Slow references for the architectures, written from the papers' equations and not from the code.

All is plain: one document at a time, one position after the other, one head after the other, every softmax over an
explicit list of the positions it may see. No masks, no batches: where the equations say k_1 .. k_t, here is a list. An
architecture is a machine over one document. It computes one position at a time, given what it is fed and a table of
keys and values. The orders of evaluation are written once, for all machines. Weights are read by name from a state
dict; this file therefore also pins their layout:

    attention.query_key_value  rows: query heads, then key heads, then value heads, each head_dim rows
    ffn.gate_up                rows: gate, then up
    attention_gate             rows: query heads
    value_gate                 rows: heads of keys and values
    memory_gate                rows: g_loc of every head of keys and values, then g_rec of every such head
    residual_mix               alpha, beta
    memory.key_value           rows: key heads, then value heads
    recurrent                  rows: key heads, then value heads
    merge.state                rows: the state's half of the gate W_g, then W_s;  W_g = [entry_gate, that half]

Everything is differentiable, so that ordinary autograd of these functions is the reference for gradients as well. What
is random in training (dropout, jitter) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


# ---------------------------------------------------------------- what all architectures are made of


def rms(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x); of several vectors, each by itself."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def standardized(x: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / deviation; of several vectors, each by itself."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return rms(centred, eps)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


class Parts:
    """The weights, and the layers that are alike in all architectures, each for one position."""

    def __init__(self, weights: Weights, config) -> None:
        self.weights = weights
        self.config = config
        self.heads = config.heads
        self.kv_heads = config.heads if config.kv_heads is None else config.kv_heads
        self.head_dim = config.width // config.heads if config.head_dim is None else config.head_dim
        self.turns: dict[int, tuple[Tensor, Tensor]] = {}

    def linear(self, name: str, x: Tensor, *, bias: bool) -> Tensor:
        """Return W x, with a bias or without."""
        assert (f"{name}.bias" in self.weights) == bias, name
        product = x @ self.weights[f"{name}.weight"].T
        return product + self.weights[f"{name}.bias"] if bias else product

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Return x normed in the way the configuration says."""
        kind, eps = self.config.norm, self.config.norm_eps
        assert (f"{name}.weight" in self.weights) == (kind != "rms_unlearned"), name
        assert (f"{name}.bias" in self.weights) == (kind == "layer"), name
        if kind == "rms_unlearned":
            return rms(x, eps)
        if kind == "rms":
            return rms(x, eps) * self.weights[f"{name}.weight"]
        assert kind == "layer"
        return standardized(x, eps) * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def ffn(self, name: str, x: Tensor) -> Tensor:
        """Return the feed-forward layer's output."""
        kind, bias = self.config.ffn, self.config.linear_bias
        if kind == "swiglu":
            gate_up = self.linear(f"{name}.gate_up", x, bias=bias)
            gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
            hidden = gate * sigmoid(gate) * up
        elif kind == "gelu":
            hidden = gelu(self.linear(f"{name}.up", x, bias=bias))
        else:
            assert kind == "relu2"
            hidden = torch.relu(self.linear(f"{name}.up", x, bias=bias)) ** 2
        return self.linear(f"{name}.down", hidden, bias=bias)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Return one row a head."""
        return x.reshape(heads, self.head_dim)

    def project(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, one row a head, neither normed nor rotated."""
        packed = self.linear(f"{name}.query_key_value", x, bias=self.config.linear_bias)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        assert len(packed) == queries + 2 * keys
        return (
            self.split(packed[:queries], self.heads),
            self.split(packed[queries : queries + keys], self.kv_heads),
            self.split(packed[queries + keys :], self.kv_heads),
        )

    def turned(self, heads: Tensor, norm: str, position: int) -> Tensor:
        """QK-norm each head (row) where there is QK-norm, then rotate each by its position.

        Of a head's pair (x_j, x_{j + half}) the angle is position * base^(-j / half), or position * j.
        """
        config = self.config
        learned = config.qk_norm and config.norm != "rms_unlearned"
        assert (f"{norm}.weight" in self.weights) == learned, norm
        if config.qk_norm:
            heads = rms(heads, config.norm_eps)
        if learned:
            heads = heads * self.weights[f"{norm}.weight"]
        half = self.head_dim // 2
        if position not in self.turns:
            if config.rope == "integer":
                angles = [float(position * j) for j in range(half)]
            else:
                assert config.rope == "geometric"
                angles = [position * config.rope_base ** (-j / half) for j in range(half)]
            cos = torch.tensor([math.cos(angle) for angle in angles], dtype=heads.dtype)
            sin = torch.tensor([math.sin(angle) for angle in angles], dtype=heads.dtype)
            self.turns[position] = cos, sin
        cos, sin = self.turns[position]
        first, second = heads[:, :half], heads[:, half:]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=1)

    def attend(
        self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible: Sequence[int]
    ) -> list[Tensor]:
        """Return what each head reads at the positions ``visible``.

        Query head h reads head h / (heads / kv_heads) of the keys and values.
        """
        seen_keys = torch.stack([keys[position] for position in visible])
        seen_values = torch.stack([values[position] for position in visible])
        found = []
        for head in range(self.heads):
            source = head // (self.heads // self.kv_heads)
            scores = seen_keys[:, source] @ query[head] / math.sqrt(self.head_dim)
            found.append(torch.softmax(scores, dim=0) @ seen_values[:, source])
        return found


def up_to(position: int) -> list[int]:
    return list(range(position + 1))


def newest(position: int, window: int) -> list[int]:
    return [p for p in range(position + 1) if position - p < window]


def layer_windows(config) -> list[int | None]:
    """Return for each layer of a stack how many of the newest positions it sees; None: all."""
    windows: list[int | None] = []
    for number in range(1, config.layers + 1):
        every = config.full_attention_every
        full = every != 0 and (number % every == 0 or number == config.layers)
        windows.append(None if full else config.attention_window)
    return windows


# ---------------------------------------------------------------- machines


class Table:
    """Keys and values [layer][position], one row a head, as they were last written; None where they were not.

    ``local`` is what an LRT makes them of (see there).
    """

    def __init__(self, layers: int, length: int) -> None:
        self.keys: list[list[Tensor | None]] = [[None] * length for _ in range(layers)]
        self.values: list[list[Tensor | None]] = [[None] * length for _ in range(layers)]
        self.local: list[list[tuple[Tensor, ...] | None]] = [[None] * length for _ in range(layers)]

    def forget(self, positions: Iterable[int]) -> None:
        for position in positions:
            for kind in (self.keys, self.values, self.local):
                for layer in kind:
                    layer[position] = None


class Machine:
    """An architecture over one document."""

    def __init__(self, weights: Weights, config, tokens: Sequence[int]) -> None:
        self.parts = Parts(weights, config)
        self.weights = weights
        self.config = config
        self.tokens = list(tokens)
        self.embeddings = [weights["embedding.weight"][token] for token in self.tokens]

    def new_table(self) -> Table:
        raise NotImplementedError

    def initial(self) -> Tensor | None:
        """Return what the document's first position is fed; None: nothing."""
        raise NotImplementedError

    def fed_back(self, state: Tensor) -> Tensor:
        """Return what of a state is fed back."""
        return state

    def step(self, position: int, fed: Tensor | None, table: Table) -> Tensor:
        """Return the state of ``position``; None is fed in a plain pass.

        The table must hold the keys and values of all positions before that are visible. Those of ``position`` are
        written to it, over the ones that were there, before any is read.
        """
        raise NotImplementedError

    def refresh(self, position: int, fed: Tensor | None, table: Table) -> None:
        """Make the keys and values of ``position`` anew, as if it had been fed ``fed`` when they were made."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to refresh")

    @staticmethod
    def before_head(parts: Parts, state: Tensor) -> Tensor:
        """Return what of a state the head reads."""
        return parts.norm("readout_layer.norm", state)


class Transformer(Machine):
    """A stack of pre-norm blocks with nothing fed back, and the blocks that CRT, LRT and FBT share."""

    def __init__(self, weights: Weights, config, tokens: Sequence[int]) -> None:
        super().__init__(weights, config, tokens)
        self.scale = 1 / math.sqrt(2 * config.layers) if config.depth_scaled_residuals else 1.0
        self.windows = layer_windows(config)
        self.plain = self.embeddings  # what enters the stack in a plain pass
        if config.embedding_norm:
            self.plain = [self.parts.norm("input_norm", x) for x in self.embeddings]

    def new_table(self) -> Table:
        return Table(self.config.layers, len(self.tokens))

    def initial(self) -> Tensor | None:
        return None

    def step(self, position: int, fed: Tensor | None, table: Table) -> Tensor:
        x = self.entry(position, fed)
        outputs = []
        for layer in range(self.config.layers):
            x = self.block(layer, position, x, fed, table)
            outputs.append(x)
        return self.state(outputs)

    def entry(self, position: int, fed: Tensor | None) -> Tensor:
        """Return what enters the stack."""
        assert fed is None, "a transformer is fed nothing"
        return self.plain[position]

    def state(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the state, given every block's output."""
        return outputs[-1]

    def block(self, layer: int, position: int, x: Tensor, fed: Tensor | None, table: Table) -> Tensor:
        """Return the output of block ``layer``."""
        name, parts, config = f"blocks.{layer}", self.parts, self.config
        x = self.mixed(layer, position, x, fed)
        normed = parts.norm(f"{name}.attention_norm", x)
        query, key, value = parts.project(f"{name}.attention", normed)
        query = parts.turned(query, f"{name}.head_norms.query", position)
        self.write(layer, position, normed, key, value, fed, table)
        window = self.windows[layer]
        visible = up_to(position) if window is None else newest(position, window)
        read = parts.attend(query, table.keys[layer], table.values[layer], visible)
        if config.attention_gate:
            gates = sigmoid(parts.linear(f"{name}.attention_gate", normed, bias=False))
            assert len(gates) == parts.heads
            read = [gate * head for gate, head in zip(gates, read, strict=True)]
        x = x + self.scale * parts.linear(f"{name}.attention.output", torch.cat(read), bias=config.linear_bias)
        return x + self.scale * parts.ffn(f"{name}.ffn", parts.norm(f"{name}.ffn_norm", x))

    def mixed(self, layer: int, position: int, x: Tensor, fed: Tensor | None) -> Tensor:
        """Return what the block works on, given the output of the one before."""
        if self.config.residual_scalars:
            alpha, beta = self.weights[f"blocks.{layer}.residual_mix"]
            x = alpha * x + beta * self.plain[position]
        return x

    def write(
        self, layer: int, position: int, normed: Tensor, key: Tensor, value: Tensor, fed: Tensor | None, table: Table
    ) -> None:
        """Write keys and values, of which ``key`` and ``value`` are the projections, to the table."""
        if self.config.value_embeddings:
            value = value + self.value_embedding(layer, position, normed)
        table.keys[layer][position] = self.parts.turned(key, f"blocks.{layer}.head_norms.key", position)
        table.values[layer][position] = value

    def value_embedding(self, layer: int, position: int, normed: Tensor) -> Tensor:
        """Return what the token adds to the values by itself, gated; one row a head."""
        gates = 2 * sigmoid(self.parts.linear(f"blocks.{layer}.value_gate", normed, bias=False))
        values = self.weights[f"value_embeddings.{layer}.weight"][self.tokens[position]]
        return gates[:, None] * self.parts.split(values, self.parts.kv_heads)


class CRT(Transformer):
    """The state corrects the input:  x~_t = e_t + c(z_{t-1} + e_t),  z_{-1} = 0."""

    def initial(self) -> Tensor | None:
        return torch.zeros_like(self.plain[0])

    def entry(self, position: int, fed: Tensor | None) -> Tensor:
        e = self.plain[position]
        if fed is None:
            return e
        normed = self.parts.norm("correction.norm", fed + e)
        hidden = gelu(self.parts.linear("correction.up", normed, bias=True))
        return e + self.parts.linear("correction.down", hidden, bias=True)


class LRT(Transformer):
    """A memory m_{t-1}, made of an upper layer, enters every block's input, keys and values.

    The state is x_L and the output of the block that m is made of, unless that is x_L.
    """

    def initial(self) -> Tensor | None:
        return torch.zeros_like(self.plain[0])

    def source(self) -> int:
        """Return the number, from 1, of the block whose output becomes the memory; -1: what the readout reads."""
        layers, source = self.config.layers, self.config.source_layer
        if source is None:
            return max(1, round(0.6 * layers))
        assert source == -1 or 1 <= source <= layers
        return source

    def state(self, outputs: Sequence[Tensor]) -> Tensor:
        source = self.source()
        if source == -1:
            return outputs[-1]
        return torch.cat([outputs[-1], outputs[source - 1]])

    def fed_back(self, state: Tensor) -> Tensor:
        if self.source() == -1:
            return self.parts.norm("readout_layer.norm", state)
        return self.parts.norm("source_norm", state[self.config.width :])

    @staticmethod
    def before_head(parts: Parts, state: Tensor) -> Tensor:
        return parts.norm("readout_layer.norm", state[..., : parts.config.width])

    def entry(self, position: int, fed: Tensor | None) -> Tensor:
        return self.plain[position]

    def mixed(self, layer: int, position: int, x: Tensor, fed: Tensor | None) -> Tensor:
        x = super().mixed(layer, position, x, fed)
        return x if fed is None else x + self.weights[f"blocks.{layer}.memory_scale"] * fed

    def write(
        self, layer: int, position: int, normed: Tensor, key: Tensor, value: Tensor, fed: Tensor | None, table: Table
    ) -> None:
        """Keep what the position's own input says about its keys and values, and write those."""
        kv_heads = self.parts.kv_heads
        own = recurrent = torch.ones(kv_heads, dtype=key.dtype)
        if self.config.memory_gates:
            gates = 2 * sigmoid(self.parts.linear(f"blocks.{layer}.memory_gate", normed, bias=False))
            own, recurrent = gates[:kv_heads], gates[kv_heads:]
        key, value = own[:, None] * key, own[:, None] * value
        if self.config.value_embeddings:
            value = value + self.value_embedding(layer, position, normed)
        table.local[layer][position] = key, value, recurrent
        self.blend(layer, position, fed, table)

    def blend(self, layer: int, position: int, memory: Tensor | None, table: Table) -> None:
        """Write keys and values of one layer: the local ones, and what the memory adds through its gate."""
        key, value, gate = table.local[layer][position]
        if memory is not None:
            number = {"shared": 0, "layerwise": layer}[self.config.recurrent_projection]
            added = self.parts.linear(f"recurrent.{number}", memory, bias=False)
            assert len(added) == key.numel() + value.numel()
            key = key + gate[:, None] * self.parts.split(added[: key.numel()], self.parts.kv_heads)
            value = value + gate[:, None] * self.parts.split(added[key.numel() :], self.parts.kv_heads)
        table.keys[layer][position] = self.parts.turned(key, f"blocks.{layer}.head_norms.key", position)
        table.values[layer][position] = value

    def refresh(self, position: int, fed: Tensor | None, table: Table) -> None:
        for layer in range(self.config.layers):
            self.blend(layer, position, fed, table)


class FBT(Transformer):
    """The state takes the input's place, the token gates it:  x_t = norm(W_U h_{t-1} * sigmoid(W_G norm(e_t))).

    A document's first position is fed nothing. The state has passed the readout's norm.
    """

    def __init__(self, weights: Weights, config, tokens: Sequence[int]) -> None:
        super().__init__(weights, config, tokens)
        self.gates = []
        for e in self.embeddings:
            normed = self.parts.norm("fusion.gate_norm", e)
            self.gates.append(sigmoid(self.parts.linear("fusion.gate", normed, bias=False)))

    def entry(self, position: int, fed: Tensor | None) -> Tensor:
        if fed is None:
            return self.plain[position]
        fused = self.parts.linear("fusion.value", fed, bias=False) * self.gates[position]
        return self.parts.norm("input_norm" if self.config.embedding_norm else "fusion.norm", fused)

    def state(self, outputs: Sequence[Tensor]) -> Tensor:
        return self.parts.norm("readout_layer.norm", outputs[-1])

    @staticmethod
    def before_head(parts: Parts, state: Tensor) -> Tensor:
        return state


class RLT(Machine):
    """An encoder, which sees tokens alone, makes entries e_t and a memory of them; a decoder reads both and recurs."""

    def __init__(self, weights: Weights, config, tokens: Sequence[int]) -> None:
        super().__init__(weights, config, tokens)
        self.entries = self.encode()
        groups = config.memory_groups if config.decoder_layers else 0
        self.memories = [self.memory(group) for group in range(groups)]
        # W_g of (2.10) and W_s of (2.11)
        width, packed = config.width, weights["merge.state.weight"]
        self.w_gate = torch.cat([weights["merge.entry_gate.weight"], packed[:width]], dim=1)
        self.w_state = packed[width:]
        assert self.w_gate.shape == (width, 2 * width)
        assert self.w_state.shape == (width, width)

    def encode(self) -> list[Tensor]:
        """Return e_t for all positions (2.1)."""
        parts, config = self.parts, self.config
        table = Table(config.encoder_layers, len(self.tokens))
        entries = []
        for position, x in enumerate(self.embeddings):
            for layer in range(config.encoder_layers):
                name = f"encoder.{layer}"
                normed = parts.norm(f"{name}.attention_norm", x)
                x = x + self.attention(name, f"{name}.head_norms", layer, position, normed, up_to(position), table)
                x = x + parts.ffn(f"{name}.ffn", parts.norm(f"{name}.ffn_norm", x))
            entries.append(x)
        return entries

    def attention(
        self, owner: str, norms: str, layer: int, position: int, x: Tensor, visible: Sequence[int], table: Table
    ) -> Tensor:
        """Return what self-attention with the weights of ``owner`` adds, x being its normed input."""
        parts = self.parts
        query, key, value = parts.project(f"{owner}.attention", x)
        table.keys[layer][position] = parts.turned(key, f"{norms}.key", position)
        table.values[layer][position] = value
        query = parts.turned(query, f"{norms}.query", position)
        read = torch.cat(parts.attend(query, table.keys[layer], table.values[layer], visible))
        return parts.linear(f"{owner}.attention.output", read, bias=self.config.linear_bias)

    def memory(self, group: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values of one memory group for all positions (2.2)."""
        parts = self.parts
        half = parts.kv_heads * parts.head_dim
        keys, values = [], []
        for position, entry in enumerate(self.entries):
            normed = parts.norm("memory.norm", entry)
            packed = parts.linear(f"memory.key_value.{group}", normed, bias=self.config.linear_bias)
            assert len(packed) == 2 * half
            key = parts.split(packed[:half], parts.kv_heads)
            keys.append(parts.turned(key, f"memory.head_norms.{group}.key", position))
            values.append(parts.split(packed[half:], parts.kv_heads))
        return keys, values

    def new_table(self) -> Table:
        return Table(self.config.decoder_layers, len(self.tokens))

    def initial(self) -> Tensor | None:
        return self.weights["initial"]

    def merged(self, entry: Tensor, state: Tensor) -> Tensor:
        """Return u_t (2.9-2.11)."""
        r = self.parts.norm("merge.norm", state)
        gate = sigmoid(self.w_gate @ torch.cat([entry, r]) + self.weights["merge.entry_gate.bias"])
        return entry + self.config.alpha * gate * (self.w_state @ r)

    def step(self, position: int, fed: Tensor | None, table: Table) -> Tensor:
        """Return s_t (2.12-2.16)."""
        parts, config = self.parts, self.config
        z = self.entries[position] if fed is None else self.merged(self.entries[position], fed)
        for layer in range(config.decoder_layers):
            name = f"decoder.{layer}"
            owner = f"encoder.{layer}" if config.tied_stacks else name
            normed = parts.norm(f"{name}.attention_norm", z)
            visible = newest(position, config.window)
            z = z + self.attention(owner, f"{name}.head_norms", layer, position, normed, visible, table)
            normed = parts.norm(f"{name}.cross_norm", z)
            query = parts.split(parts.linear(f"{name}.cross.query", normed, bias=config.linear_bias), parts.heads)
            query = parts.turned(query, f"{name}.cross_head_norms.query", position)
            keys, values = self.memories[math.floor(layer * config.memory_groups / config.decoder_layers)]
            read = torch.cat(parts.attend(query, keys, values, up_to(position)))
            z = z + parts.linear(f"{name}.cross.output", read, bias=config.linear_bias)
            z = z + parts.ffn(f"{owner}.ffn", parts.norm(f"{name}.ffn_norm", z))
        return z


ORACLES: dict[str, type[Machine]] = {"transformer": Transformer, "crt": CRT, "lrt": LRT, "fbt": FBT, "rlt": RLT}


# ---------------------------------------------------------------- orders of evaluation, one document
#
# An order takes a machine, the positions to compute (a range), the final states of all positions before, and the table
# with their keys and values. It returns the states of the positions once for each pass that a loss may read, the last
# of which are final, and leaves their final keys and values in the table.

Passes = list[list[Tensor]]  # [pass][position]
Order = Callable[[Machine, range, list[Tensor], Table], Passes]


def feedback(machine: Machine, length: int, states: Sequence[Tensor]) -> Tensor | None:
    """Return what is fed by the first ``length`` positions of a document, of whose states the last counts."""
    return machine.fed_back(states[length - 1]) if length else machine.initial()


def parallel(machine: Machine, span: range, past: list[Tensor], table: Table) -> Passes:
    """Feed nothing."""
    return [[machine.step(position, None, table) for position in span]]


def chunked(machine: Machine, span: range, past: list[Tensor], table: Table, *, interval: int) -> Passes:
    """Feed all of a chunk of ``interval`` positions the state at the end of the last complete one."""
    found = list(past)
    for position in span:
        complete = position // interval * interval  # positions in chunks that end before this position's
        found.append(machine.step(position, feedback(machine, complete, found), table))
    return [found[span.start :]]


def unrolled(machine: Machine, span: range, past: list[Tensor], table: Table, *, passes: int) -> Passes:
    """After a plain pass, feed every position what the pass before found for the position before."""
    found = parallel(machine, span, past, table)
    for _ in range(passes - 1):
        before = past + found[-1]
        table.forget(span)
        found.append([machine.step(position, feedback(machine, position, before), table) for position in span])
    return found


def interleaved(
    machine: Machine, span: range, past: list[Tensor], table: Table, *, subsets: int, refresh: bool
) -> Passes:
    """After a plain pass, compute every ``subsets``-th position anew, then the one after each, and so on.

    A subset is fed what was found for the positions before, and sees its own keys and values of this pass and those of
    the others as they were last written.
    """
    (plain,) = parallel(machine, span, past, table)
    latest = past + plain
    for subset in range(subsets):
        before = list(latest)
        chosen = [position for position in span if position % subsets == subset]
        for position in chosen:
            latest[position] = machine.step(position, feedback(machine, position, before), table)
        for position in span if refresh else ():
            if position not in chosen:
                machine.refresh(position, feedback(machine, position, latest), table)
    return [plain, latest[span.start :]]


exact = partial(chunked, interval=1)


def order_of(solver) -> Order:
    """Return the order in which a solver computes several positions at once."""
    if solver.name == "parallel":
        return parallel
    if solver.name == "chunked":
        return partial(chunked, interval=solver.interval)
    if solver.name == "unrolled":
        return partial(unrolled, passes=solver.passes)
    if solver.name == "interleaved":
        return partial(interleaved, subsets=solver.subsets, refresh=solver.refresh_keys_values)
    raise NotImplementedError(f"say here in which order solver {solver.name!r} evaluates")


def step_of(solver) -> Order:
    """Return how a solver decodes one token: what approximates chunks of one position takes an exact step."""
    return exact if solver.name in ("unrolled", "interleaved") else order_of(solver)


# ---------------------------------------------------------------- rows of documents, logits


def document_borders(starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return [begin, end) of every document of a row, from the start that each position names."""
    borders = []
    for position, start in enumerate(starts):
        if start == position:
            borders.append((position, position + 1))
        else:
            assert borders[-1][0] == start
            borders[-1] = (start, position + 1)
    return borders


def by_document(
    weights: Weights, config, tokens: Tensor, starts: Tensor | None, compute: Callable[[Machine, int], Passes]
) -> list[Tensor]:
    """Return what ``compute`` finds for each document's machine and first column, as [rows, n, width] for each pass."""
    rows = []
    for row in range(tokens.shape[0]):
        begins = [0] * tokens.shape[1] if starts is None else starts[row].tolist()
        documents = []
        for begin, end in document_borders(begins):
            machine = ORACLES[config.architecture](weights, config, tokens[row, begin:end].tolist())
            documents.append(compute(machine, begin))
        rows.append([torch.stack([*chain(*parts)]) for parts in zip(*documents, strict=True)])
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def pass_states(weights: Weights, config, tokens: Tensor, solver, starts: Tensor | None = None) -> list[Tensor]:
    """Return the states [rows, n, state width] of every pass that a loss may read; the last are final."""

    def compute(machine: Machine, begin: int) -> Passes:
        return order_of(solver)(machine, range(len(machine.tokens)), [], machine.new_table())

    return by_document(weights, config, tokens, starts, compute)


def states(weights: Weights, config, tokens: Tensor, solver, starts: Tensor | None = None) -> Tensor:
    """Return the states [rows, n, state width] of rows of documents, each document computed alone."""
    return pass_states(weights, config, tokens, solver, starts)[-1]


def call_states(
    weights: Weights, config, tokens: Tensor, solver, cuts: Sequence[int], starts: Tensor | None = None
) -> Tensor:
    """Return the states of rows that a solver computes in calls, one between each two of ``cuts`` (from 0 to n).

    A call over several columns computes them in the solver's order, given what the calls before left; a call over one
    column is a step of decoding.
    """

    def compute(machine: Machine, begin: int) -> Passes:
        table, found = machine.new_table(), []
        for cut, following in pairwise(cuts):
            order = step_of(solver) if following - cut == 1 else order_of(solver)
            span = range(len(found), min(following - begin, len(machine.tokens)))
            found = found + order(machine, span, found, table)[-1]
        return [found]

    assert cuts[0] == 0
    assert cuts[-1] == tokens.shape[1]
    return by_document(weights, config, tokens, starts, compute)[0]


def decoded_states(weights: Weights, config, tokens: Tensor, solver, prefill: int) -> Tensor:
    """Return the states of rows whose first ``prefill`` tokens come in one call, the others one by one."""
    return call_states(weights, config, tokens, solver, sorted({0, *range(prefill, tokens.shape[1] + 1)}))


def logits(weights: Weights, config, found: Tensor) -> Tensor:
    """Return logits [.., V] of states [.., state width]."""
    parts = Parts(weights, config)
    x = ORACLES[config.architecture].before_head(parts, found)
    if config.tied_head:
        read = x @ weights["embedding.weight"].T
    else:
        read = parts.linear("readout_layer.head", x, bias=config.head_bias)
    cap = config.logit_softcap
    return cap * torch.tanh(read / cap) if cap else read


# ---------------------------------------------------------------- FLOPs, from shapes


def attention_flops(config, length: int) -> tuple[int, int]:
    """Return the FLOPs of attention over a document of ``length``: 4 head_dim for each head and visible key.

    The first number is of what tokens alone decide and is computed once, the second of one pass over all positions.
    """

    def seen(window: int | None) -> int:
        return sum(len(up_to(p) if window is None else newest(p, window)) for p in range(length))

    if config.architecture == "rlt":
        prepared = config.encoder_layers * seen(None)
        advanced = config.decoder_layers * (seen(config.window) + seen(None))
    else:
        prepared = 0
        advanced = sum(seen(window) for window in layer_windows(config))
    head_dim = config.width // config.heads if config.head_dim is None else config.head_dim
    each = 4 * head_dim * config.heads
    return each * prepared, each * advanced


def linear_flops(weights: Weights, config) -> dict[str, int]:
    """Return the FLOPs of all matrices, 2 for every weight and use, by when they are used.

    prepare           once a position, on tokens alone
    prepare_feedback  once a position, on tokens alone, and only where states are fed back
    advance           once a position and pass
    fed_position      once a position that is fed, and pass
    fed_state         once a state that is fed, however many positions it is fed to
    readout           once a position whose logits are asked for
    """
    found = dict.fromkeys(("prepare", "prepare_feedback", "advance", "fed_position", "fed_state", "readout"), 0)
    found["readout"] = 2 * config.vocab_size * config.width
    uses_of_owner = {
        "blocks": ["advance"],
        "correction": ["fed_position"],
        "recurrent": ["fed_state"],
        "fusion.gate": ["prepare_feedback"],
        "fusion.value": ["fed_state"],
        "encoder": ["prepare"],
        "memory": ["prepare"],
        "merge.entry_gate": ["prepare_feedback"],
        "merge.state": ["fed_state"],
        "decoder": ["advance"],
        "embedding": [],
        "value_embeddings": [],
        "readout_layer.head": [],
    }
    for name, weight in weights.items():
        if weight.dim() != 2:
            continue
        (uses,) = (uses for owner, uses in uses_of_owner.items() if name.startswith(f"{owner}."))
        if config.architecture == "rlt" and config.tied_stacks and name.startswith("encoder."):
            uses = [*uses, "advance"]
        for use in uses:
            found[use] += 2 * weight.numel()
    return found
