"""What ``backfeed describe`` counts: parameters, FLOPs, state and cache, for every architecture and solver."""

import json
from dataclasses import replace

import pytest
import torch

from pipeline import config_files, description, models, solvers
from pipeline.config import Config
from pipeline.models import ARCHITECTURES
from pipeline.models.base import count_parameters
from pipeline.solvers.chunked import ChunkedConfig
from tests.support import one_line, run_config
from tests.test_cli import backfeed

PASSES = {"transformer": "parallel", "rlt": "chunked", "crt": "unrolled", "lrt": "interleaved", "fbt": "unrolled"}


def config_of(name, variant, tmp_path, *overrides):
    config = run_config(tmp_path, tmp_path / "data", *overrides)
    return replace(config, model=ARCHITECTURES[name].variants()[variant])


CASES = [(name, variant) for name, cls in ARCHITECTURES.items() for variant in cls.variants()]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_counts_are_those_of_the_real_thing(name, variant, tmp_path):
    """Parameters, and what decoding really holds, are those of a model that is built and decodes."""
    config = replace(config_of(name, variant, tmp_path), solver=solver_of(name))
    found = description.describe(config)
    model = models.build(config.model)
    model.init_weights(torch.Generator().manual_seed(0))
    assert found.parameters == sum(found.parts.values()) == count_parameters(model)
    length = config.data.sequence_length
    exact = solvers.sequential(solvers.build(config.solver))
    held = []
    for positions in (length - 1, length):
        with torch.no_grad():
            tokens = torch.zeros(1, positions, dtype=torch.int64)
            carry = exact.run(model, tokens, carry=exact.new_carry(model, 1)).carry
        memories = carry.memory.values()
        held.append(sum(4 * each.numel() for memory in memories for each in [*memory.keys, *memory.values]))
    assert found.cache_bytes == held[1]
    assert found.cache_bytes_per_position == held[1] - held[0]
    register = 0 if carry.register is None else 4 * carry.register.states.numel()
    assert found.state_bytes == register


def solver_of(name):
    return solvers.SOLVERS[PASSES[name]].Config(name=PASSES[name])


def test_decoding_flops_are_what_the_last_position_adds():
    model = models.build(ARCHITECTURES["rlt"].variants()["plain"])
    solver = solvers.build(ChunkedConfig("chunked"))
    for length in (1, 2, 3, 20):
        rest = (length - 1) * solver.flops_per_token(model, length - 1) if length > 1 else 0
        expected = length * solver.flops_per_token(model, length) - rest
        assert description.decoding_flops(model, solver, length) == pytest.approx(expected, rel=1e-12)


def test_training_flops_follow_the_schedules(tmp_path):
    stages = "schedules.passes=[{at: 0, value: 1}, {at: 0.5, draw: [2, 3], weights: [3, 1]}]"
    config = config_of("fbt", "plain", tmp_path, "solver.name=unrolled", stages)
    found = description.describe(config)
    model = models.build(config.model)
    each = {}
    for passes in (1, 2, 3):
        solver = solvers.build(replace(config.solver, passes=passes))
        each[passes] = 3 * solver.flops_per_token(model, config.data.sequence_length)
    later = 0.75 * each[2] + 0.25 * each[3]
    assert found.training_flops_stages == [(0.0, pytest.approx(each[1])), (0.5, pytest.approx(later))]
    assert found.training_flops == pytest.approx((each[1] + later) / 2)
    assert found.run_flops == pytest.approx(found.training_flops * 12 * 128)


def test_the_command(tmp_path):
    config = run_config("runs", "data", "model.vocab_size=300", "training.precision=bf16-mixed")
    config_files.save(config, tmp_path / "config.yaml")
    done = backfeed("describe", "config.yaml", "--json", "found.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    loaded = config_files.load(Config, [tmp_path / "config.yaml"], [])
    assert found == json.loads(json.dumps(vars(description.describe(loaded))))
    assert f"{found['parameters']:,}" in done.stdout
    assert found["state_bytes"] == 2 * 16
    one_line(backfeed("describe", "config.yaml", "--json", "nowhere/found.json", cwd=tmp_path))
    done = backfeed("describe", "config.yaml", "model.vocab_size=null", cwd=tmp_path)
    assert "set model.vocab_size" in one_line(done)
