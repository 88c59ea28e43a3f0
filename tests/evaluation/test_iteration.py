"""Many passes over a trained model: what is measured, and what is refused."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from pipeline import solvers
from pipeline.errors import ConfigError
from pipeline.evaluation import iteration, iteration_plot
from pipeline.evaluation.loss import evaluate
from pipeline.models import CRT, FBT, LRT, RLT, Transformer
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.solvers.unrolled import UnrolledConfig
from tests.models.cases import LENGTH, make_model, make_starts, make_tokens


def batches_of(config):
    found = []
    for seed in (0, 1):
        tokens = make_tokens(config, seed, length=LENGTH + 1)
        valid = torch.ones(len(tokens), LENGTH, dtype=torch.bool)
        valid[-1, 5:] = False
        found.append({"tokens": tokens, "valid": valid, "starts": None if seed else make_starts(seed)})
    return found


TOKEN_BYTES = torch.arange(29) % 5


@pytest.mark.parametrize("cls", [CRT, FBT, LRT, RLT])
def test_each_pass_is_that_of_the_solver(cls):
    config = cls.variants()["plain"]
    model, batches = make_model(cls, config), batches_of(config)
    passes = iteration.iterate(model, batches, TOKEN_BYTES, LENGTH + 3)
    assert [each.number for each in passes] == list(range(1, LENGTH + 4))
    for each in passes[:4]:
        solver = solvers.build(UnrolledConfig("unrolled", passes=each.number))
        sums = evaluate(model, solver, batches, TOKEN_BYTES)
        assert each.loss == pytest.approx(sums.loss, rel=1e-12)
        assert each.bits_per_byte == pytest.approx(sums.bits_per_byte, rel=1e-12)
    exact = evaluate(model, solvers.build(ChunkedConfig("chunked")), batches, TOKEN_BYTES)
    assert passes[-1].loss == pytest.approx(exact.loss, rel=1e-12)
    assert passes[0].residual is None
    assert all(each.residual > 0 for each in passes[1:4])
    assert passes[2].factor == pytest.approx(passes[2].residual / passes[1].residual)
    assert passes[-1].residual <= 1e-12, "once all positions are exact, nothing moves"


def trained(cls, solver):
    """Stand for a trained model, of which the check reads four attributes."""
    path = SimpleNamespace(path="runs/one")
    config = SimpleNamespace(model=SimpleNamespace(architecture=cls.__name__.lower()))
    model = cls(cls.variants()["plain"])
    return SimpleNamespace(model=model, training_solver=solver, checkpoint=path, config=config)


def test_refusals():
    unrolled = solvers.build(UnrolledConfig("unrolled"))
    iteration.check(trained(CRT, unrolled), 30)
    plain = solvers.build(ParallelConfig("parallel"))
    with pytest.raises(ConfigError, match="transformer: it feeds nothing back"):
        iteration.check(trained(Transformer, plain), 3)
    for solver in (plain, solvers.build(UnrolledConfig("unrolled", passes=1))):
        with pytest.raises(ConfigError, match="was trained without feedback"):
            iteration.check(trained(CRT, solver), 3)
    for passes in (1, 1001):
        with pytest.raises(ConfigError, match=f"--passes is {passes}"):
            iteration.check(trained(CRT, unrolled), passes)


def test_labels_tell_paths_apart():
    one, two = "runs/a/checkpoints/step_20", "runs/b/checkpoints/step_20"
    assert iteration_plot.labels([one]) == {one: "step_20"}
    assert iteration_plot.labels([one, two]) == {one: "a/checkpoints/step_20", two: "b/checkpoints/step_20"}


def test_table_json_and_plot(tmp_path):
    config = CRT.variants()["plain"]
    found = {"one": iteration.iterate(make_model(CRT, config), batches_of(config), TOKEN_BYTES, 4)}
    assert len(iteration.table(found["one"]).splitlines()) == 5
    iteration.save(found, tmp_path / "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())["one"]
    assert [row["number"] for row in rows] == [1, 2, 3, 4]
    assert math.isclose(rows[-1]["loss"], found["one"][-1].loss)
    for name in ("plot.svg", "again.svg", "plot.png"):
        iteration_plot.plot(found, tmp_path / name)
    assert b"residual" in (tmp_path / "plot.svg").read_bytes()
    assert (tmp_path / "plot.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
