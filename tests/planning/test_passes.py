"""Peaks of passes that are not computed, beside those of real ones."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from pipeline import models, solvers
from pipeline.bench.live_memory import LiveMemory
from pipeline.models.crt import CRT
from pipeline.models.fbt import FBT
from pipeline.models.lrt import LRT
from pipeline.models.rlt import RLTConfig
from pipeline.models.transformer import Transformer
from pipeline.planning.passes import Case, continued, documents, highest, measured, memory_of, settings_of_stages
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.interleaved import InterleavedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.solvers.schedules import Mixture
from pipeline.solvers.unrolled import UnrolledConfig
from pipeline.training.objective import objective

ROWS, LENGTH = 3, 40
RLT = RLTConfig("rlt", vocab_size=509, width=96, heads=4, encoder_layers=2, decoder_layers=2, window=8)


def small(cls):
    """Return an architecture's first settings, wide enough that tensors and not their number count."""
    config = next(iter(cls.variants().values()))
    return replace(config, vocab_size=509, width=96, heads=4, head_dim=None, kv_heads=None, ffn_width=None, layers=3)


MODELS = {"transformer": small(Transformer), "crt": small(CRT), "lrt": small(LRT), "fbt": small(FBT), "rlt": RLT}
SOLVERS = {
    "parallel": ParallelConfig("parallel"),
    "chunked": ChunkedConfig("chunked", interval=1),
    "chunks": ChunkedConfig("chunked", interval=6),
    "unrolled": UnrolledConfig("unrolled", passes=3, loss="mean"),
    "interleaved": InterleavedConfig("interleaved", subsets=2),
}
PAIRS = [("transformer", "parallel")] + [
    (model, solver) for model in ("crt", "lrt", "fbt", "rlt") for solver in SOLVERS if solver != "parallel"
]


def case_of(model, solver, checkpointing, precision="float32", docs=True):
    solver = replace(SOLVERS[solver], activation_checkpointing=checkpointing)
    return Case(MODELS[model], solver, (), ROWS, LENGTH, precision, "fresh", docs, cuda=False)


def real_peak(case):
    """Return the most bytes alive at once in a real pass, weights left out, gradients included."""
    torch.manual_seed(0)
    model = models.build(case.model)
    model.init_weights(torch.Generator().manual_seed(0))
    solver = solvers.build(case.solver)
    solver.adapt(model.train())
    tokens = torch.randint(case.model.vocab_size, (case.rows, case.length + 1))
    starts = documents(case.rows, case.length) if case.documents else None
    mixed = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    with LiveMemory() as memory:
        with mixed if case.precision == "bf16-mixed" else nullcontext():
            value = objective(model, solver, tokens, starts).value
        value.backward()
    return memory.peak


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("model", "solver"), PAIRS)
def test_every_pair(model, solver, checkpointing):
    case = case_of(model, solver, checkpointing)
    assert memory_of(case).total == pytest.approx(real_peak(case), rel=0.15)


@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize(("model", "solver"), [("transformer", "parallel"), ("rlt", "chunked"), ("fbt", "unrolled")])
def test_mixed_precision(model, solver, docs):
    case = case_of(model, solver, False, "bf16-mixed", docs)
    assert memory_of(case).total == pytest.approx(real_peak(case), rel=0.15)


def test_logits_in_slices(monkeypatch):
    from pipeline.evaluation import loss

    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 1 << 12)
    case = case_of("transformer", "parallel", False, docs=False)
    sliced = highest(measured(case), exact=True)
    assert sliced.total == pytest.approx(real_peak(case), rel=0.15)
    monkeypatch.undo()
    assert sliced.total < highest(measured(case), exact=True).total


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_long_loop_is_continued_from_short_ones(checkpointing):
    """Held out: a longer row and more blocks than any that the prediction is made from."""
    model = replace(RLT, width=32, decoder_layers=3)
    solver = ChunkedConfig("chunked", activation_checkpointing=checkpointing)
    case = Case(model, solver, (("interval", 1),), ROWS, 384, "float32", "taken", True, cuda=True)
    expected, found = highest(measured(case), exact=True), highest(continued(case), exact=False)
    assert found.total == pytest.approx(expected.total, rel=0.05)
    assert found.kept == pytest.approx(expected.kept, rel=0.1)


def test_gradients_kept_and_taken():
    case = case_of("transformer", "parallel", False)
    parameters = sum(each.numel() for each in models.build(case.model).parameters())
    fresh, kept, taken = (
        highest(measured(replace(case, gradients=each)), exact=True).total for each in ("fresh", "kept", "taken")
    )
    assert taken <= fresh <= kept == taken + 4 * parameters


def test_nothing_is_computed_however_large():
    model = replace(MODELS["transformer"], width=8192, heads=64, layers=8, vocab_size=100_000)
    found = memory_of(Case(model, SOLVERS["parallel"], (), 64, 8192, "bf16-mixed", "taken", False, cuda=True))
    assert found.total > 2**40


def test_all_values_of_schedules_once():
    stages = {"passes": [(0.0, 1), (0.5, Mixture((1, 2), (1.0, 1.0))), (0.8, 3)]}
    assert list(settings_of_stages(stages)) == [(("passes", 1),), (("passes", 2),), (("passes", 3),)]
    assert list(settings_of_stages({})) == [()]
