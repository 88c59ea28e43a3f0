"""Our plain transformer beside those of other codebases: forward, loss, backward, AdamW.

All are given the same weights, and must find the same loss on the first step, so what is timed is the same model. The
loss is torch's cross-entropy of the logits; ours comes from ``pipeline.training.objective``, as in training.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import solvers
from pipeline.bench import llama
from pipeline.bench.llama import Size
from pipeline.bench.peers.codes import CODES, Code
from pipeline.bench.peers.comparison import OURS, Comparison, Side
from pipeline.bench.steps import Trainee, adamw, apply
from pipeline.bench.table import Table
from pipeline.solvers.parallel import ParallelConfig

SHAPES = llama.SIZES
SAME_LOSS = 1e-4
"""Losses of the same weights may differ by so much, in nats, for rounding."""


class PeerStep:
    """Training steps of another code's module.

    Args:
        code: codebase.
        ours: our model and the rows.
    """

    def __init__(self, code: Code, ours: Trainee) -> None:
        self.module = code.make(ours.model).train()
        self._logits = code.logits
        self._tokens = ours.tokens
        self._optimizer = adamw(self.module)

    def loss(self) -> Tensor:
        """Return the mean loss."""
        logits = self._logits(self.module, self._tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())

    def step(self) -> None:
        """Train one step."""
        apply(self.loss(), self._optimizer)


def measure(name: str, size: Size, repeats: int, table: Table) -> None:
    """Measure one size and add a row for each code."""
    ours = Trainee(llama.config(size), size.rows, size.length)
    solver = solvers.build(ParallelConfig("parallel"))
    comparison = Comparison(name, size.rows, size.length)
    comparison.sides[OURS] = Side(ours.model, partial(ours.step, solver))
    with torch.no_grad():
        expected = comparison.losses[OURS] = float(ours.loss(solver))

    def peer_side(code: Code) -> Side:
        peer = PeerStep(code, ours)
        with torch.no_grad():
            found = comparison.losses[code.distribution] = float(peer.loss())
        if abs(found - expected) > SAME_LOSS:
            raise RuntimeError(f"the same weights give another loss: {found} instead of {expected}")
        return Side(peer.module, peer.step)

    for code in CODES:
        comparison.invite(code.distribution, partial(peer_side, code))
    comparison.measure(repeats, table)
