"""Generation from caches equals the model run anew on the whole text; draws follow their settings."""

import pytest
import torch

from pipeline import models, solvers
from pipeline.errors import ConfigError
from pipeline.generation.generate import generate
from pipeline.generation.sampling import Sampling, uniforms
from pipeline.models import ARCHITECTURES
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.parallel import ParallelConfig

GREEDY = Sampling(temperature=0)
CASES = [
    pytest.param(cls, config, solver, id=f"{name}-{variant}-{label}")
    for name, cls in ARCHITECTURES.items()
    for variant, config in cls.variants().items()
    for label, solver in {
        "parallel": ParallelConfig("parallel"),
        **({f"chunked{b}": ChunkedConfig("chunked", interval=b) for b in (1, 3)} if cls.feeds_back else {}),
    }.items()
]


def build(config, seed=0):
    model = models.build(config).double().eval()
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():  # far from zero, so that the likeliest token is no accident
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
    return model


def collect(*arguments, **options):
    return torch.stack(list(generate(*arguments, **options)), dim=1)


@pytest.mark.parametrize(("cls", "config", "solver"), CASES)
def test_greedy_equals_teacher_forcing(cls, config, solver):
    model, solver = build(config), solvers.build(solver)
    prompt = torch.randint(config.vocab_size, (2, 5), generator=torch.Generator().manual_seed(1))
    found = collect(model, solver, prompt.tolist(), count=9, sampling=GREEDY, seed=0)
    text = prompt
    for _ in range(9):
        with torch.no_grad():
            logits = model.readout(solver.run(model, text).states[:, -1])
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, text[:, 5:])


@pytest.mark.parametrize(("cls", "config", "solver"), CASES)
def test_prompts_of_unequal_length_generate_as_if_alone(cls, config, solver):
    model, solver = build(config, seed=2), solvers.build(solver)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(config.vocab_size, (size,), generator=draw).tolist() for size in (1, 6, 4)]
    together = collect(model, solver, prompts, count=7, sampling=GREEDY, seed=0)
    for row, prompt in enumerate(prompts):
        alone = collect(model, solver, [prompt], count=7, sampling=GREEDY, seed=0)
        assert torch.equal(together[row], alone[0]), row


def test_seed_repeats_and_matters():
    config = ARCHITECTURES["rlt"].variants()["plain"]
    model, solver = build(config), solvers.build(ChunkedConfig("chunked"))

    def draw(seed):
        return collect(model, solver, [[1, 2]], count=20, sampling=Sampling(2.0), seed=seed)

    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))


def test_stop_token_ends_rows_and_then_the_whole():
    config = ARCHITECTURES["transformer"].variants()["plain"]
    model, solver = build(config), solvers.build(ParallelConfig("parallel"))
    free = collect(model, solver, [[1], [2]], count=12, sampling=GREEDY, seed=0)
    stop = int(free[0, 3])
    found = collect(model, solver, [[1], [2]], count=12, sampling=GREEDY, seed=0, stop=stop)
    first = [row.tolist().index(stop) if stop in row.tolist() else 11 for row in free]
    for row, end in enumerate(first):
        assert torch.equal(found[row, : end + 1], free[row, : end + 1])
        assert (found[row, end + 1 :] == stop).all()
    assert found.shape[1] == max(first) + 1


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_temperature():
    assert torch.equal(Sampling(0).probabilities(LOGITS), torch.tensor([[1.0, 0, 0, 0]]))
    assert torch.allclose(Sampling(2.0).probabilities(LOGITS), (LOGITS / 2).softmax(-1))


def test_top_k():
    found = Sampling(top_k=2).probabilities(LOGITS)
    assert torch.allclose(found, torch.cat([LOGITS[:, :2].softmax(-1), torch.zeros(1, 2)], dim=-1))
    assert torch.allclose(Sampling(top_k=99).probabilities(LOGITS), LOGITS.softmax(-1))


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.6, 1), (0.65, 2), (0.9, 3), (0.999, 4), (1.0, 4)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    found = Sampling(top_p=top_p).probabilities(LOGITS)  # softmax: 0.644, 0.237, 0.087, 0.032
    assert int((found > 0).sum()) == kept
    assert float(found.sum()) == pytest.approx(1)


def test_draws_follow_the_probabilities():
    sampling = Sampling(1.5)
    drawn = sampling.draw(LOGITS.expand(20_000, -1), uniforms(1, 20_000, seed=0)[0])
    counts = torch.bincount(drawn, minlength=4) / 20_000
    assert torch.allclose(counts, sampling.probabilities(LOGITS)[0], atol=4 * 0.5 / 20_000**0.5)


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}]
)
def test_values_out_of_range(values):
    with pytest.raises(ConfigError, match="it must be"):
        Sampling(**values)
