"""Our RLT beside the package ``rlt-pytorch``, each with its own loss: forward, backward, AdamW, at B = 1.

Its nearest settings differ from ours in this: GELU where SwiGLU has SiLU, biases in the feed-forward layers, another
RMSNorm after the merge, no QK-norm, and no rotation of the queries and keys of cross-attention. So parameters are not
quite as many, and losses do not compare.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline import solvers
from pipeline.bench.peers.comparison import OURS, Comparison, Side
from pipeline.bench.recurrence import PUBLISHED, SMALL
from pipeline.bench.steps import Trainee, adamw, apply
from pipeline.bench.table import Table
from pipeline.models.rlt import RLTConfig
from pipeline.solvers.chunked import ChunkedConfig

PEER = "rlt-pytorch"


@dataclass(frozen=True)
class Shape:
    """One size.

    Attributes:
        model: our settings.
        rows: rows of a step.
        length: inputs of a row.
    """

    model: RLTConfig
    rows: int
    length: int


SHAPES = {
    "rlt_small": Shape(SMALL, 64, 40),
    "rlt_published": Shape(PUBLISHED, 32, 41),
    "tiny_rlt": Shape(
        RLTConfig("rlt", vocab_size=17, width=16, heads=2, ffn_width=42, encoder_layers=1, decoder_layers=1, window=4),
        2,
        8,
    ),
}


def measure(name: str, shape: Shape, repeats: int, table: Table) -> None:
    """Measure one size and add a row for each code."""
    ours = Trainee(shape.model, shape.rows, shape.length)
    exact = solvers.build(ChunkedConfig("chunked", interval=1))

    def peer_side() -> Side:
        module = peer(shape.model)
        optimizer = adamw(module)
        return Side(module, lambda: apply(module(ours.tokens, return_loss=True), optimizer))

    comparison = Comparison(name, shape.rows, shape.length)
    comparison.sides[OURS] = Side(ours.model, partial(ours.step, exact))
    comparison.invite(PEER, peer_side)
    comparison.measure(repeats, table)


def peer(config: RLTConfig) -> Any:
    """Return the module of ``rlt-pytorch`` that is nearest to ours.

    Raises:
        ImportError: it is not installed.
    """
    return importlib.import_module("RLT").RLT(
        dim=config.width,
        enc_depth=config.encoder_layers,
        dec_depth=config.decoder_layers,
        num_tokens=config.vocab_size,
        dim_head=config.head_width,
        heads=config.heads,
        # It takes two thirds of this times the width, rounded down.
        ff_expansion_factor=(config.hidden_width + 0.5) * 1.5 / config.width,
        recurrent_transition_alpha=config.alpha,
        dec_sliding_window_size=config.window,
        recurrent_block_size=1,
        tie_embedding=config.tied_head,
    )
