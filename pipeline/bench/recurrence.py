"""What feedback costs: a training step of the recurrence beside one pass over the same rows without feedback.

Every step is forward, backward and AdamW. The recurrence at B = 1 is exact, with full backpropagation through time; B
positions at a time are RLT-2. ``B = 1, torch`` is without compiled kernels, ``B = 1, autograd`` the loop as autograd
alone does it. K whole passes, and passes over S subsets, are trained by the losses of their papers. A step's FLOPs are
counted as ``throughput/model_flops_per_second`` counts them, and the peak is that of a large matrix product, which
takes turns with the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline import solvers
from pipeline.bench.machine import Peak
from pipeline.bench.options import Options
from pipeline.bench.steps import Trainee, as_published
from pipeline.bench.table import Column, Row, Table
from pipeline.bench.timing import alternate, medians
from pipeline.models import ArchitectureConfig
from pipeline.models.base import count_parameters
from pipeline.models.crt import CRTConfig
from pipeline.models.fbt import FBTConfig
from pipeline.models.lrt import LRTConfig
from pipeline.models.rlt import RLTConfig
from pipeline.solvers import SolverConfig
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.interleaved import InterleavedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.solvers.unrolled import UnrolledConfig

NONE, EXACT, TORCH, AUTOGRAD = "none", "B = 1", "B = 1, torch", "B = 1, autograd"
ORDERS: dict[str, SolverConfig] = {
    NONE: ParallelConfig("parallel"),
    "B = 16": ChunkedConfig("chunked", interval=16),
    "B = 4": ChunkedConfig("chunked", interval=4),
    EXACT: ChunkedConfig("chunked", interval=1),
    TORCH: ChunkedConfig("chunked", interval=1, kernels="torch"),
    AUTOGRAD: ChunkedConfig("chunked", interval=1, loop="autograd"),
    "K = 2": UnrolledConfig("unrolled", passes=2),
    "K = 3": UnrolledConfig("unrolled", passes=3),
    "S = 2": InterleavedConfig("interleaved", subsets=2),
}
CHUNKED = (NONE, "B = 16", "B = 4", EXACT, TORCH, AUTOGRAD)
PASSES = (NONE, "K = 2", "K = 3", EXACT)
REPEATS = 5


@dataclass(frozen=True)
class Shape:
    """One size.

    Attributes:
        model: architecture and width.
        rows: rows of a step.
        length: inputs of a row.
        orders: names of the ways to evaluate it, the one without feedback first.
    """

    model: ArchitectureConfig
    rows: int
    length: int
    orders: tuple[str, ...] = CHUNKED


PUBLISHED = RLTConfig(  # configs/rlt_4_4.yaml
    "rlt", vocab_size=277, width=512, heads=4, ffn_width=1365, encoder_layers=4, decoder_layers=4, window=8
)
SMALL = RLTConfig("rlt", vocab_size=277, width=64, heads=2, ffn_width=170, encoder_layers=2, decoder_layers=2, window=8)
LARGE = RLTConfig("rlt", vocab_size=8192, width=768, heads=12, encoder_layers=6, decoder_layers=6, window=16)
MODERATE: dict[str, Any] = {"vocab_size": 8192, "width": 256, "heads": 4, "layers": 4}

SHAPES = {
    "published": Shape(PUBLISHED, 32, 41),
    "published_256": Shape(PUBLISHED, 256, 41),
    "small": Shape(SMALL, 64, 40),
    "large": Shape(LARGE, 16, 128),
    "crt": Shape(CRTConfig("crt", **MODERATE), 32, 64, PASSES),
    "fbt": Shape(FBTConfig("fbt", **MODERATE), 32, 64, PASSES),
    "lrt": Shape(LRTConfig("lrt", **MODERATE), 32, 64, (NONE, "S = 2", EXACT)),
    "tiny": Shape(
        RLTConfig("rlt", vocab_size=17, width=16, heads=2, encoder_layers=1, decoder_layers=1, window=4), 2, 8
    ),
}

COLUMNS = (
    Column("shape", "shape", width=15, text=True),
    Column("architecture", "model", width=7, text=True),
    Column("feedback", "feedback", width=17, text=True),
    Column("seconds", "s a step", ".3f"),
    Column("ratio", "of none", ".2f", width=9),
    Column("tokens_per_second", "tokens/s", ",.0f"),
    Column("flops_per_second", "GFLOP/s", ".1f", scale=1e-9),
    Column("peak_share", "of peak", ".0%", width=9),
)


def run(options: Options) -> list[Row]:
    """Measure, print a table, return its rows.

    A row holds shape, architecture, feedback, solver, parameters, rows, length, seconds (median of ``runs``), ratio (to
    the step without feedback), tokens_per_second, flops_per_second, peak_flops_per_second and peak_share.
    """
    table = Table(COLUMNS).begin()
    peak = Peak()
    for name, shape in options.choose(SHAPES).items():
        measure(name, shape, options.repeats or REPEATS, peak, table)
    print(f"peak: {peak.flops_per_second / 1e9:.0f} GFLOP/s in a large matrix product")
    return table.rows


def measure(name: str, shape: Shape, repeats: int, peak: Peak, table: Table) -> None:
    """Measure one shape and add its rows."""
    trainee = Trainee(shape.model, shape.rows, shape.length)
    orders = {order: solvers.build(as_published(ORDERS[order], shape.model.architecture)) for order in shape.orders}
    peak.measure()
    steps = {order: partial(trainee.step, solver) for order, solver in orders.items()}
    runs = alternate(steps, repeats, name, between=peak.measure)
    seconds = medians(runs)
    tokens = shape.rows * shape.length
    for order, solver in orders.items():
        flops = 3 * tokens * solver.flops_per_token(trainee.model, shape.length)
        table.add(
            {
                "shape": name,
                "architecture": shape.model.architecture,
                "feedback": order,
                "solver": str(solver),
                "parameters": count_parameters(trainee.model),
                "rows": shape.rows,
                "length": shape.length,
                "seconds": seconds[order],
                "runs": runs[order],
                "ratio": seconds[order] / seconds[NONE],
                "tokens_per_second": tokens / seconds[order],
                "flops_per_second": flops / seconds[order],
                "peak_flops_per_second": peak.flops_per_second,
                "peak_share": flops / seconds[order] / peak.flops_per_second,
            }
        )
