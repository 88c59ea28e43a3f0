"""Sizes that the benchmarks take from configurations are those of the configurations."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import config_files
from pipeline.bench import decode, overhead, recurrence
from pipeline.config import Config

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


@pytest.mark.parametrize(
    ("model", "files"),
    [
        (recurrence.PUBLISHED, ["rlt_4_4"]),
        (decode.CRT_D5_C1120, ["crt_d5_c1120"]),
        (decode.TRANSFORMER_N12_C768, ["transformer_n12_c768"]),
        (decode.CRT_D1_C2048, ["crt_d1_c2048"]),
        (decode.TRANSFORMER_N6_C1088, ["transformer_n12_c768", "variants/transformer_n6_c1088"]),
        (replace(overhead.DEMO, vocab_size=None), ["rlt_demo"]),
    ],
)
def test_model(model, files):
    assert config_files.load(Config, [CONFIGS / f"{name}.yaml" for name in files], []).model == model


def test_demo_step():
    config = config_files.load(Config, [CONFIGS / "rlt_demo.yaml"], [])
    for name, shape in overhead.SHAPES.items():
        if name.startswith("demo"):
            assert shape.length == config.data.sequence_length
            assert shape.rows * shape.length == config.training.batch_tokens == config.training.micro_batch_tokens
