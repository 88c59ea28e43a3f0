"""``chunked``: B positions at a time, each chunk fed the state at the end of the one before.

B = 1 is the exact recurrence, with full backpropagation through time (RLT-1). Larger B is RLT-2 (RLT report, 2.7 and
appendix I): all positions of a chunk are fed the same register, and only a complete chunk sets it. Attention and
positions ignore the borders.

Borders are counted from each document's start. Where rows pack documents whose starts are no multiples of B, the chunks
of different rows lie at different places; then step k takes the k-th chunk of every row, wherever it lies, so that a
document is computed exactly as if it stood alone. Such a batch takes as many steps as its row of most chunks has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ConfigError
from pipeline.models import Architecture, Feedback
from pipeline.models.base import Memory
from pipeline.models.inputs import Inputs, pick
from pipeline.models.kernels import chosen
from pipeline.solvers.base import (
    SOLVERS,
    Carry,
    Solution,
    Solver,
    SolverConfig,
    check_count,
    check_feeds_back,
    place,
    register_of,
)
from pipeline.solvers.capture import CapturedLoops
from pipeline.solvers.chunks import Chunk, even_chunks, run_chunks, uneven_chunks
from pipeline.solvers.loop import fits_late, run_loop

RECORDED = 12
"""So many times what its keys and values take does a layer hold of a position of a segment at the peak (r / 2 d in
``best_length``): measured with a feed-forward layer of the usual width."""
LEAST_POSITIONS, LEAST_STEPS = 16, 4
"""Of a segment of default length, in rows that are not short: what it costs besides its steps would be seen if it had
fewer."""


@dataclass
class ChunkedConfig(SolverConfig):
    """B positions at a time."""

    interval: int = 1
    """Feedback interval B, in positions: 1 is the exact recurrence."""
    segment_length: int = 0
    """With activation checkpointing: positions of a segment of time that is computed again in backward. 0 takes the
    number at which what is kept at the borders and what is computed again at once are least together."""
    loop: Literal["fast", "autograd"] = "fast"
    """In training, the ``fast`` path through time, or autograd's own, with which it is compared: equal gradients, but
    several times the time."""
    kernels: Literal["auto", "compiled", "torch"] = "auto"
    """With the fast loop, on a CPU: small operations by ``torch``, or by C code that is ``compiled`` on the machine at
    first use, which takes a second and a C compiler; ``auto`` takes ``torch`` where there is none. Gradients are equal
    to rounding, but not to the last bit."""
    capture: bool = False
    """With the fast loop, on a GPU: capture it as CUDA graphs, once for every shape of a batch, and replay them. A
    batch runs as without it where documents within a row begin at no multiples of an interval above 1, or where
    something is drawn at random under activation checkpointing."""
    truncation: int = 0
    """Truncated backpropagation through time: every so many positions of a row, what is fed back and the keys and
    values of the recurrent part are taken for constants. 0 lets gradients through the whole row."""

    def evaluated(self) -> ChunkedConfig:
        """Return the settings without those of training."""
        return replace(
            self, activation_checkpointing=False, segment_length=0, truncation=0, capture=False, kernels="auto"
        )

    def check(self) -> None:
        """Raise ConfigError on values out of range or that contradict each other."""
        Chunked.check_value("interval", self.interval)
        for name in ("segment_length", "truncation"):
            if getattr(self, name) < 0:
                raise ConfigError(f"solver.{name} is {getattr(self, name)}; it must be at least 0")
        if self.capture and self.loop != "fast":
            raise ConfigError(f"solver.capture is set; it has no use with solver.loop={self.loop}")
        if self.kernels != "auto" and (self.loop != "fast" or self.capture):
            other = "solver.capture" if self.capture else f"solver.loop={self.loop}"
            raise ConfigError(f"solver.kernels is {self.kernels}; it has no use with {other}")
        if 0 < self.truncation < self.interval:
            raise ConfigError(
                f"solver.truncation is {self.truncation}; it must be 0, or at least solver.interval={self.interval}"
            )
        if self.segment_length and not self.activation_checkpointing:
            raise ConfigError(
                "solver.segment_length is set, but solver.activation_checkpointing is false: it has no use"
            )


@SOLVERS.register("chunked")
class Chunked(Solver):
    """The recurrence, one chunk after the other.

    Attributes:
        interval: feedback interval B; may be changed between calls.
    """

    Config = ChunkedConfig
    feeds_back = True
    schedulable = ("interval",)
    interval: int
    config: ChunkedConfig

    def __init__(self, config: ChunkedConfig) -> None:
        super().__init__(config)
        self.segment_length = config.segment_length
        self.truncation = config.truncation
        self._captured = CapturedLoops()

    def adapt(self, model: Architecture) -> None:
        """Set the model up for training; see ``Solver.adapt``."""
        super().adapt(model)
        model.checkpoint_finely = self.config.activation_checkpointing and self.config.loop == "fast"

    @classmethod
    def check_fits(cls, config: SolverConfig, architecture: type[Architecture]) -> None:
        """Refuse architectures that feed nothing back."""
        check_feeds_back(config, architecture)

    @classmethod
    def check_value(cls, setting: str, value: Any, name: str | None = None) -> None:
        """Raise ConfigError unless the interval is a whole number from 1 on."""
        check_count(name or f"solver.{setting}", value, "a feedback interval is a whole number of positions")

    @classmethod
    def closest(cls, setting: str, values: Sequence[Any]) -> Any:
        """Return the smallest interval."""
        return min(values)

    def run(
        self, model: Architecture, tokens: Tensor, starts: Tensor | None = None, carry: Carry | None = None
    ) -> Solution:
        """Compute the states chunk by chunk; see ``Solver.run``."""
        known = starts
        index, starts = place(tokens, starts, carry)
        inputs, memory = model.prepare(tokens, index, starts, None if carry is None else carry.memory)
        register = register_of(carry, model, tokens.shape[0])
        if carry is None:
            memory = model.new_memory()
        offset = 0 if carry is None else carry.length
        asked = starts if known is None else known
        if asked is None or self.interval == 1 or not bool((asked % self.interval).any()):
            chunks, places = even_chunks(inputs, offset, self.interval, known), None
        else:
            chunks, places = uneven_chunks(inputs, offset, self.interval, known)
        fast = carry is None and self.config.loop == "fast" and torch.is_grad_enabled()
        segment, window = self._segment(model, inputs, len(chunks)), self._window(len(chunks))
        late = fast and segment < len(chunks) and places is None and fits_late(inputs, tokens.shape[0])
        if not late:
            inputs = model.prepare_feedback(inputs)
        if fast:
            settings: dict[str, Any] = {"segment": segment, "window": window, "late": late}
            redrawn = segment < len(chunks) and model.training and model.draws
            if self.config.capture and places is None and not redrawn:
                states = self._captured.run(
                    model, inputs, lambda held: even_chunks(held, 0, self.interval), register, **settings
                )
            else:
                kernels = chosen(self.config.kernels) if index.device.type == "cpu" else None
                states = run_loop(model, inputs, chunks, register, **settings, kernels=kernels)
        else:
            states, memory, register = self._loop(model, inputs, chunks, memory, register)
        if places is not None:
            states = pick(states, places)
        if carry is None:
            return Solution(states)
        return Solution(states, replace(carry, memory=memory, length=inputs.stop, register=register))

    def flops_per_token(self, model: Architecture, length: int) -> float:
        """Return the forward FLOPs of one token; all positions of a chunk share one state."""
        flops, share = model.flops(length), math.ceil(length / self.interval) / length
        always = flops.prepare + flops.prepare_feedback + flops.advance + flops.fed_position + flops.readout
        return always + share * flops.fed_state

    def _window(self, count: int) -> int:
        """Return how many of ``count`` steps gradients go back at most."""
        if not self.truncation or not torch.is_grad_enabled():
            return count
        return max(1, self.truncation // self.interval)

    def _segment(self, model: Architecture, inputs: Inputs, count: int) -> int:
        """Return how many of ``count`` steps are computed again at once in backward; all: none is."""
        if not self.config.activation_checkpointing or not torch.is_grad_enabled():
            return count
        length = self.segment_length or best_length(model, self.interval, inputs.length)
        return max(1, length // self.interval)

    def _loop(
        self, model: Architecture, inputs: Inputs, chunks: Sequence[Chunk], memory: Memory, register: Feedback
    ) -> tuple[Tensor, Memory, Feedback]:
        """Run all chunks, with gradients cut between windows if so configured."""
        window = self._window(len(chunks))
        states: list[Tensor] = []
        for first in range(0, len(chunks), window):
            if first:
                memory = {name: each.detached() for name, each in memory.items()}
                register = register.detached()
            part = chunks[first : first + window]
            found, memory, register = self._segments(model, inputs, part, memory, register)
            states.append(found)
        return torch.cat(states, dim=1), memory, register

    def _segments(
        self, model: Architecture, inputs: Inputs, chunks: Sequence[Chunk], memory: Memory, register: Feedback
    ) -> tuple[Tensor, Memory, Feedback]:
        """Run chunks, in segments that are computed again in backward if so configured."""
        segment = self._segment(model, inputs, len(chunks))
        states: list[Tensor] = []
        for first in range(0, len(chunks), segment):
            part = chunks[first : first + segment]
            if segment < len(chunks):
                # The check that the second computation matches the first costs as much as a layer; tests make it.
                found, memory, register = checkpoint(
                    run_chunks, model, inputs, part, memory, register, use_reentrant=False, determinism_check="none"
                )
            else:
                found, memory, register = run_chunks(model, inputs, part, memory, register)
            states.append(found)
        return torch.cat(states, dim=1), memory, register


def best_length(model: Architecture, interval: int, length: int) -> int:
    """Return the positions of a segment at which the least is held in a row of ``length``.

    A segment of S positions holds, for each layer, r S floats while it is computed again. Of each of the T / S segments
    the keys and values of at most W - 1 positions are kept, 2 d floats each. The sum is least at
    S = sqrt(2 d (W - 1) T / r), unless that is less than W - 1: then all keys and values are kept, as they are without
    a window, and the shorter a segment the less is held.
    """
    windows = [memory.window for memory in model.new_memory().values() if memory.window is not None]
    reach = max(windows, default=1) - 1
    best = math.isqrt(length * reach // RECORDED)
    return max(best if best > reach else 0, min(LEAST_POSITIONS, math.isqrt(length)), LEAST_STEPS * interval)
