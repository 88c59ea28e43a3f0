"""Tokens a second when they are written one after the other, each from the caches of those before it.

Ours is ``pipeline.generation``, as ``backfeed generate`` runs it, with the likeliest token taken each time. Against it
stands what the shape says: the Llama of Hugging Face's transformers with the same weights and its own ``generate``, or
a deeper transformer of ours. Times are of whole calls, the prompt included. ``readout`` is the time of the logits
alone: one position through the output norm and the head.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline import solvers
from pipeline.bench import llama
from pipeline.bench.options import Options
from pipeline.bench.peers.installing import missing, version
from pipeline.bench.steps import made, random_tokens
from pipeline.bench.table import Column, Row, Table
from pipeline.bench.timing import alternate, medians
from pipeline.generation.decoder import Decoder
from pipeline.generation.generate import generate
from pipeline.generation.sampling import Sampling
from pipeline.generation.weights import HeldWeights
from pipeline.models import Architecture, ArchitectureConfig
from pipeline.models.base import count_parameters
from pipeline.models.crt import CRTConfig
from pipeline.models.transformer import TransformerConfig
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.parallel import ParallelConfig

GREEDY = Sampling(temperature=0)
REPEATS = 5
HUGGING_FACE = "transformers"


@dataclass(frozen=True)
class Shape:
    """One contest.

    Attributes:
        ours: model whose speed is asked for.
        rival: a model of ours that it is compared with; None for the Llama of transformers with the same weights.
        rows: sequences at once.
        prompt: tokens of the prompt.
        tokens: tokens to write.
        published: the ratio that the paper has, on its machine; None for none.
    """

    ours: ArchitectureConfig
    rival: ArchitectureConfig | None
    rows: int
    prompt: int
    tokens: int
    published: float | None = None


# As configs/transformer_n12_c768.yaml and the others there that the names tell.
CRT_PAPER: dict[str, Any] = {
    "vocab_size": 32_000,
    "heads": 16,
    "norm": "layer",
    "norm_eps": 1e-5,
    "linear_bias": True,
    "ffn": "gelu",
    "qk_norm": False,
    "tied_head": False,
    "head_bias": True,
    "embedding_std": 1.0,
    "hidden_init": "uniform",
    "hidden_std_factor": 0.57735,
}
CRT_D5_C1120 = CRTConfig("crt", width=1120, layers=5, **CRT_PAPER)
CRT_D1_C2048 = CRTConfig("crt", width=2048, layers=1, **CRT_PAPER)
TRANSFORMER_N12_C768 = TransformerConfig("transformer", width=768, layers=12, **CRT_PAPER)
TRANSFORMER_N6_C1088 = TransformerConfig("transformer", width=1088, layers=6, **CRT_PAPER)
SMALL_CRT = CRTConfig("crt", vocab_size=32, width=16, heads=2, layers=1)

SHAPES = {
    "17m": Shape(llama.config(llama.SIZES["17m"]), None, 1, 16, 128),
    "17m_8": Shape(llama.config(llama.SIZES["17m"]), None, 8, 16, 128),
    "crt_d5": Shape(CRT_D5_C1120, TRANSFORMER_N12_C768, 1, 1, 64, published=1.7),
    "crt_d1": Shape(CRT_D1_C2048, TRANSFORMER_N6_C1088, 1, 1, 64, published=2.6),
    "tiny": Shape(llama.config(llama.SIZES["tiny"]), None, 2, 3, 4),
    "tiny_crt": Shape(SMALL_CRT, llama.config(llama.SIZES["tiny"]), 1, 1, 3, published=1.0),
}

COLUMNS = (
    Column("shape", "shape", width=9, text=True),
    Column("model", "model", width=25, text=True),
    Column("parameters", "parameters", ",d", width=13),
    Column("rows", "rows", width=6),
    Column("tokens_per_second", "tokens/s", ".1f"),
    Column("seconds_per_step", "ms a step", ".2f", width=11, scale=1e3),
    Column("readout_seconds", "readout ms", ".2f", width=12, scale=1e3),
    Column("ratio", "ratio", ".2f", width=8),
    Column("published", "published", ".1f", width=11),
)


@dataclass
class Contestant:
    """One model.

    Attributes:
        name: as printed.
        parameters: their number.
        write: writes the tokens, int64 [rows, tokens].
        readout: takes the logits of one position a row.
    """

    name: str
    parameters: int
    write: Callable[[], Tensor]
    readout: Callable[[], object]


def run(options: Options) -> list[Row]:
    """Measure, print a table, return its rows.

    A row holds shape, model, parameters, rows, prompt, tokens, seconds (median of ``runs``), tokens_per_second over all
    rows, seconds_per_step (one token of every row), readout_seconds, ratio (tokens_per_second over the rival's, which
    comes last), published, and same_tokens: the share of tokens that both wrote alike, None where weights differ. A
    model that is not installed has None for its numbers.
    """
    table = Table(COLUMNS).begin()
    for name, shape in options.choose(SHAPES).items():
        measure(name, shape, options.repeats or REPEATS, table)
    return table.rows


def measure(name: str, shape: Shape, repeats: int, table: Table) -> None:
    """Measure one contest and add a row for each side."""
    assert shape.ours.vocab_size is not None
    prompts = random_tokens(shape.rows, shape.prompt - 1, shape.ours.vocab_size)
    model = made(shape.ours).eval()
    sides = [contestant(model, prompts, shape.tokens)]
    if shape.rival is not None:
        sides.append(contestant(made(shape.rival).eval(), prompts, shape.tokens))
    elif not missing(HUGGING_FACE):
        sides.append(hugging_face(model, prompts, shape.tokens))
    runs = alternate({side.name: side.write for side in sides}, repeats, name)
    seconds = medians(runs)
    same = None
    if shape.rival is None and len(sides) > 1:
        same = float((sides[0].write() == sides[1].write()).float().mean())
    written = shape.rows * shape.tokens
    shared = {"shape": name, "rows": shape.rows, "prompt": shape.prompt, "tokens": shape.tokens}
    for number, side in enumerate(sides):
        table.add(
            {
                **shared,
                "model": side.name,
                "parameters": side.parameters,
                "seconds": seconds[side.name],
                "runs": runs[side.name],
                "tokens_per_second": written / seconds[side.name],
                "seconds_per_step": seconds[side.name] / shape.tokens,
                "readout_seconds": median_seconds(side.readout),
                "ratio": seconds[sides[-1].name] / seconds[side.name] if len(sides) > 1 else None,
                "published": shape.published if number == 0 else None,
                "same_tokens": same,
            }
        )
    if len(sides) == 1:
        table.add({**shared, "model": HUGGING_FACE, "tokens_per_second": None, "ratio": None, "same_tokens": None})
        print(f"{HUGGING_FACE} is not installed; backfeed bench peers --install adds it")


def contestant(model: Architecture, prompts: Tensor, tokens: int) -> Contestant:
    """Return a model of ours, decoded in its exact recurrence."""
    solver = solvers.build(ChunkedConfig("chunked") if model.feeds_back else ParallelConfig("parallel"))
    rows = prompts.tolist()

    def write() -> Tensor:
        return torch.stack(list(generate(model, solver, rows, count=tokens, sampling=GREEDY, seed=0)), dim=1)

    config = model.config
    depth = getattr(config, "layers", 0)
    decoder = Decoder(model, solver, len(rows), 1, weights=HeldWeights(model))  # as ``generate`` makes it
    states = torch.randn(len(rows), model.state_width)
    name = f"{config.architecture}, {depth} x {config.width}"
    return Contestant(name, count_parameters(model), write, lambda: decoder.logits(states))


def hugging_face(model: Architecture, prompts: Tensor, tokens: int) -> Contestant:
    """Return the Llama of transformers with the weights of a model of ours."""
    other = llama.hugging_face(model).eval()
    seen = torch.ones_like(prompts)
    states = torch.randn(prompts.shape[0], model.config.width)

    @torch.inference_mode()
    def write() -> Tensor:
        found: Tensor = other.generate(
            prompts,
            attention_mask=seen,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        return found[:, prompts.shape[1] :]

    name = f"{HUGGING_FACE} {version(HUGGING_FACE)}"
    return Contestant(
        name, sum(each.numel() for each in other.parameters()), write, lambda: other.lm_head(other.model.norm(states))
    )


@torch.inference_mode()
def median_seconds(call: Callable[[], object], times: int = 20) -> float:
    """Return the median time of a short call."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
