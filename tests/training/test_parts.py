"""Learning rates, parameter groups, loggers and the measured peak, each by itself."""

import csv

import pytest
import torch

from pipeline import models
from pipeline.config import AdamWConfig, ConstantConfig, CosineConfig, WSDConfig
from pipeline.models import ARCHITECTURES
from pipeline.training import learning_rates, optimizers
from pipeline.training.loggers import CSVMetrics
from pipeline.training.peak import measured_peak


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ConstantConfig("constant", 1.0), {1: 1, 50: 1, 100: 1}),
        (ConstantConfig("constant", 1.0, warmup_tokens=10), {1: 0.1, 5: 0.5, 10: 1, 100: 1}),
        (CosineConfig("cosine", 1.0, warmup_tokens=20, final_fraction=0.1), {10: 0.5, 20: 1, 60: 0.55, 100: 0.1}),
        (WSDConfig("wsd", 1.0, warmup_tokens=10, decay_fraction=0.4), {5: 0.5, 60: 1, 80: 0.5, 90: 0.25, 100: 0}),
        (WSDConfig("wsd", 1.0, decay_fraction=0.5, final_fraction=0.2), {50: 1, 75: 0.6, 100: 0.2}),
    ],
)
def test_learning_rates(config, expected):
    found = {tokens: learning_rates.factor(config, tokens, 100) for tokens in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_matrices_alone_are_decayed(name):
    for config in ARCHITECTURES[name].variants().values():
        model = models.build(config)
        decayed, undecayed = optimizers.parameter_groups(model)
        assert len(decayed) + len(undecayed) == len(list(model.parameters()))
        assert all(parameter.dim() == 2 for parameter in decayed)
        names = {parameter: name for name, parameter in model.named_parameters()}
        assert not {"embedding.weight", "initial"} & {names[parameter] for parameter in decayed}


def test_decay_is_decoupled_and_leaves_the_rest_alone():
    model = models.build(ARCHITECTURES["transformer"].variants()["plain"])
    model.init_weights(torch.Generator().manual_seed(0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optimizers.build(AdamWConfig("adamw", weight_decay=0.5), model, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {id(parameter) for parameter in optimizers.parameter_groups(model)[0]}
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if id(parameter) in decayed else 1
        assert torch.allclose(parameter, before[name] * factor, rtol=1e-6), name


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_rows_are_cut_on_resume(tmp_path):
    logger = CSVMetrics(tmp_path / "metrics")
    for step in (1, 2, 3, 4):
        logger.log_metrics({"train/loss": 1 / step, "solver/interval": 4}, step)
    logger.log_metrics({"validation/loss": 0.5}, 2)
    path = tmp_path / "metrics/train.csv"
    with path.open("a") as file:
        file.write("5,0.")  # the process died here
    again = CSVMetrics(tmp_path / "metrics")
    again.cut(2)
    again.log_metrics({"train/loss": 0.25, "solver/interval": 2}, 3)
    assert read(path) == [
        ["step", "train/loss", "solver/interval"],
        ["1", "1.0", "4"],
        ["2", "0.5", "4"],
        ["3", "0.25", "2"],
    ]
    assert read(tmp_path / "metrics/validation.csv")[1:] == [["2", "0.5"]]


def test_a_run_that_begins_anew_may_have_other_columns(tmp_path):
    logger = CSVMetrics(tmp_path)
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.cut(0)
    logger.log_metrics({"train/loss": 2.0, "solver/interval": 4}, 1)
    assert read(tmp_path / "train.csv") == [["step", "train/loss", "solver/interval"], ["1", "2.0", "4"]]


def test_floats_survive_the_csv(tmp_path):
    logger = CSVMetrics(tmp_path)
    value = float(torch.tensor(1 / 3))
    logger.log_metrics({"train/loss": value}, 1)
    assert float(read(tmp_path / "train.csv")[1][1]) == value


def test_measured_peak_is_a_rate():
    assert measured_peak(torch.device("cpu"), torch.float32, seconds=0.05) > 1e8
