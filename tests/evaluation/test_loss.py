"""Losses are summed by tokens and bytes, not averaged by batches."""

import math

import pytest
import torch

from pipeline import models, solvers
from pipeline.data.loader import EvaluationLoader
from pipeline.data.stream import EvaluationStream
from pipeline.evaluation.loss import LossSums, evaluate, token_losses
from pipeline.models.transformer import TransformerConfig
from pipeline.solvers.parallel import ParallelConfig
from tests.support import prepare_data


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return prepare_data(tmp_path_factory.mktemp("corpus"), kind="bpe")


@pytest.fixture
def model():
    built = models.build(TransformerConfig("transformer", vocab_size=300, width=16, heads=2, layers=1)).double()
    built.init_weights(torch.Generator().manual_seed(0))
    return built


PARALLEL = solvers.build(ParallelConfig("parallel"))


def measure(model, manifest, rows, **options):
    stream = EvaluationStream(manifest, "validation", sequence_length=24, rows_per_micro_batch=rows, **options)
    token_bytes = torch.from_numpy(token_bytes_of(manifest))
    return evaluate(model, PARALLEL, EvaluationLoader(stream), token_bytes)


def token_bytes_of(manifest):
    from pipeline.data.tokenizer import load_token_bytes

    return load_token_bytes(manifest)


def test_against_a_loop_over_single_tokens(model, manifest):
    from pipeline.data.shards import TokenReader

    reader = TokenReader(manifest, "validation")
    tokens = torch.from_numpy(reader.read(0, reader.total).astype("int64"))
    sizes = token_bytes_of(manifest)
    nats = text_nats = 0.0
    text_bytes = 0
    for begin in range(0, len(tokens) - 1, 24):
        row = tokens[begin : begin + 25]
        for place in range(1, len(row)):
            # The context of a target: its document, as far as the row holds it.
            first = max([i for i in range(1, place) if row[i] == manifest.tokenizer.document_id], default=0)
            with torch.no_grad():
                states = PARALLEL.run(model, row[None, first:place]).states
                loss = -float(model.readout(states[0, -1]).log_softmax(-1)[row[place]])
            nats += loss
            text_nats += loss if sizes[row[place]] else 0
            text_bytes += int(sizes[row[place]])
    found = measure(model, manifest, 3)
    assert found.tokens == len(tokens) - 1
    assert found.text_bytes == text_bytes == manifest.splits["validation"].source_bytes
    assert found.nats == pytest.approx(nats, rel=1e-12)
    assert found.bits_per_byte == pytest.approx(text_nats / math.log(2) / text_bytes, rel=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_batch_size_changes_nothing(model, manifest, rows):
    expected, found = measure(model, manifest, 3), measure(model, manifest, rows)
    assert (found.tokens, found.text_bytes) == (expected.tokens, expected.text_bytes)
    assert found.nats == pytest.approx(expected.nats, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_add_up(model, manifest, ranks):
    expected = measure(model, manifest, 3)
    parts = [measure(model, manifest, 3, rank=rank, world_size=ranks) for rank in range(ranks)]
    assert sum(part.tokens for part in parts) == expected.tokens
    assert sum(part.text_bytes for part in parts) == expected.text_bytes
    assert sum(part.nats for part in parts) == pytest.approx(expected.nats, rel=1e-12)


def test_model_is_left_in_its_mode(model, manifest):
    for mode in (True, False):
        model.train(mode)
        measure(model, manifest, 8, limit_tokens=48)
        assert model.training is mode


def test_uniform_prediction():
    """Equal logits spend log2(V) bits a token."""
    sums = LossSums(nats=10 * math.log(256), tokens=10, text_nats=8 * math.log(256), text_bytes=8)
    assert sums.loss == pytest.approx(math.log(256))
    assert sums.perplexity == pytest.approx(256)
    assert sums.bits_per_byte == pytest.approx(8)
    assert math.isnan(LossSums(1.0, 1, 0.0, 0).bits_per_byte)
    assert LossSums(1e6, 1, 1e6, 1).perplexity == math.inf


def test_token_losses_are_float32_at_least(model):
    states = torch.randn(2, 3, 16, dtype=torch.float64)
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert token_losses(model, states, targets).dtype == torch.float64
    assert token_losses(model.bfloat16(), states.bfloat16(), targets).dtype == torch.float32
