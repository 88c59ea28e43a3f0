"""What the benchmarks share: turns, tables, options."""

import pytest

from pipeline.bench import timing
from pipeline.bench.options import Options
from pipeline.bench.steps import Trainee
from pipeline.bench.table import Column, Table
from pipeline.errors import ConfigError
from pipeline.models.transformer import TransformerConfig
from pipeline.solvers import build
from pipeline.solvers.parallel import ParallelConfig


def test_contestants_take_turns_and_the_warm_up_does_not_count():
    calls = []
    contestants = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = timing.alternate(contestants, 3, "turns", between=lambda: calls.append("|"))
    assert "".join(calls) == (timing.WARM_UP + 3) * "ab|"
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 3}
    assert timing.medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}


def test_table_prints_what_it_keeps(capsys):
    columns = [Column("name", "name", width=6, text=True), Column("flops", "GFLOP/s", ".1f", width=9, scale=1e-9)]
    table = Table(columns).begin()
    table.add({"name": "a", "flops": 2.5e9, "more": 1})
    table.add({"name": "b", "flops": None})
    assert capsys.readouterr().out.splitlines() == ["name    GFLOP/s", "a           2.5", "b             -"]
    assert table.rows == [{"name": "a", "flops": 2.5e9, "more": 1}, {"name": "b", "flops": None}]


def test_shapes_are_chosen_by_name():
    known = {"small": 1, "large": 2, "tiny": 3, "tiny_other": 4}
    assert Options().choose(known) == {"small": 1, "large": 2}
    assert Options(("tiny", "small")).choose(known) == {"small": 1, "tiny": 3}
    with pytest.raises(ConfigError, match="choose from small, large, tiny, tiny_other"):
        Options(("middle",)).choose(known)


def test_a_step_is_a_step_of_training():
    trainee = Trainee(TransformerConfig("transformer", vocab_size=11, width=8, heads=2, layers=1), 2, 5)
    solver = build(ParallelConfig("parallel"))
    before = [each.detach().clone() for each in trainee.model.parameters()]
    first = trainee.loss(solver).item()
    for _ in range(20):
        trainee.step(solver)
    assert trainee.loss(solver).item() < first
    assert all((each != old).any() for each, old in zip(trainee.model.parameters(), before, strict=True))
    assert all(each.grad is None for each in trainee.model.parameters())
