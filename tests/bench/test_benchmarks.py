"""Every benchmark runs through the command, and its numbers have the structure that ``docs/benchmarks.md`` tells."""

import json
import math
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from pipeline import cli
from pipeline.bench import BENCHMARKS
from tests.support import prepare_data

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "benchmarks.md").read_text()
RUN = {"runs", "seconds"}
COMPARED = {
    "shape", "code", "version", "parameters", "loss", "rows", "length", "ratio", "tokens_per_second", "reason", *RUN
}  # fmt: skip
KEYS = {
    "recurrence": {
        "shape", "architecture", "feedback", "solver", "parameters", "rows", "length", "ratio", "tokens_per_second",
        "flops_per_second", "peak_flops_per_second", "peak_share", *RUN,
    },
    "peers": COMPARED,
    "decode": {
        "shape", "model", "parameters", "rows", "prompt", "tokens", "tokens_per_second", "seconds_per_step",
        "readout_seconds", "ratio", "published", "same_tokens", *RUN,
    },
    "memory": {
        "shape", "width", "length", "rows", "segment", "peak_bytes", "memory_ratio", "time_ratio", *RUN,
    },
    "overhead": {
        "shape", "solver", "rows", "length", "bare_seconds", "bare_runs", "lightning_seconds", "lightning_runs",
        "overhead_seconds", "overhead_share",
    },
    "pairs": {
        "shape", "architecture", "solver", "parameters", "loss", "bits_per_byte", "sequential_bits_per_byte",
        "step_ratio",
    },
    "data": {
        "shape", "length", "rows", "memmap_tokens_per_second", "stream_tokens_per_second", "ratio",
        "workers_tokens_per_second",
    },
}  # fmt: skip
REPEATS = 2


@pytest.fixture
def bench(tmp_path, capsys):
    """Return a function that runs the command and returns what it wrote and printed."""
    threads = torch.get_num_threads()

    def run(name, *arguments):
        file = tmp_path / "found.json"
        command = ["bench", name, "--json", file, "--repeats", REPEATS, "--threads", 1, *arguments]
        assert cli.main([str(each) for each in command]) == 0
        found = json.loads(file.read_text())
        assert found["benchmark"] == name
        assert found["machine"]["threads"] == 1
        assert torch.get_num_threads() == threads
        for row in found["rows"]:
            assert set(row) == KEYS[name]
            assert all(value > 0 for key, value in row.items() if key.endswith("seconds") and value is not None)
        printed = capsys.readouterr().out
        for row in found["rows"]:
            assert any(line.startswith(row.get("shape")) for line in printed.splitlines()) or name == "pairs"
        return found["rows"], printed

    return run


def installed(distribution):
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def test_every_benchmark_is_tested_and_on_the_page():
    assert set(KEYS) == set(BENCHMARKS)
    for name, keys in KEYS.items():
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
        assert section is not None, name
        for key in keys - {"rows", "length"}:
            assert f"`{key}`" in PAGE, f"{name}: {key}"


def test_recurrence(bench):
    rows, printed = bench("recurrence", "--shape", "tiny")
    assert [row["feedback"] for row in rows] == ["none", "B = 16", "B = 4", "B = 1", "B = 1, torch", "B = 1, autograd"]
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert len(row["runs"]) == REPEATS
        assert row["tokens_per_second"] == pytest.approx(row["rows"] * row["length"] / row["seconds"])
        assert row["peak_share"] == pytest.approx(row["flops_per_second"] / row["peak_flops_per_second"])
    assert len({row["parameters"] for row in rows}) == 1
    assert "GFLOP/s in a large matrix product" in printed


@pytest.mark.parametrize("shape", ["tiny", "tiny_rlt"])
def test_peers(bench, shape):
    rows, printed = bench("peers", "--shape", shape)
    peers = {"tiny": ["litgpt", "ai2-olmo-core", "transformers"], "tiny_rlt": ["rlt-pytorch"]}[shape]
    assert {row["code"] for row in rows} == {"backfeed", *peers}
    assert (rows[0]["code"], rows[0]["ratio"]) == ("backfeed", 1)
    for row in rows:
        assert row["reason"] is None
        measured = installed(row["code"]) or row["code"] == "backfeed"
        assert (row["seconds"] is not None) == measured
        if not measured:
            assert re.search(rf"^not installed: .*{row['code']}.*--install", printed, re.MULTILINE)
        elif shape == "tiny":  # the same weights are the same model
            assert row["loss"] == pytest.approx(rows[0]["loss"], abs=1e-4)
            assert row["parameters"] == rows[0]["parameters"]


@pytest.mark.parametrize("shape", ["tiny", "tiny_crt"])
def test_decode(bench, shape):
    rows, _ = bench("decode", "--shape", shape)
    assert len(rows) == 2
    for row in rows:
        if row["seconds"] is None:
            assert not installed("transformers")
            continue
        assert row["tokens_per_second"] == pytest.approx(row["rows"] * row["tokens"] / row["seconds"])
        assert row["seconds_per_step"] == pytest.approx(row["seconds"] / row["tokens"])
    if shape == "tiny" and installed("transformers"):
        assert rows[0]["same_tokens"] == 1
    if rows[1]["seconds"] is not None:
        assert rows[1]["ratio"] == 1
        assert rows[0]["ratio"] == pytest.approx(rows[1]["seconds"] / rows[0]["seconds"])


def test_memory(bench):
    rows, _ = bench("memory", "--shape", "tiny")
    assert [row["segment"] for row in rows] == [0, 4]
    assert (rows[0]["memory_ratio"], rows[0]["time_ratio"]) == (1, 1)
    assert all(row["peak_bytes"] > 0 for row in rows)


def test_overhead(bench):
    rows, _ = bench("overhead", "--shape", "tiny")
    (row,) = rows
    assert len(row["bare_runs"]) == len(row["lightning_runs"]) == REPEATS
    assert row["overhead_share"] == pytest.approx(row["overhead_seconds"] / row["bare_seconds"])


def test_pairs(bench, tmp_path):
    folder = prepare_data(tmp_path).folder
    rows, _ = bench("pairs", "--shape", "tiny", "--data", folder)
    assert len(rows) == 21
    assert all(0 < row["loss"] < math.inf for row in rows)


def test_data(bench):
    rows, _ = bench("data", "--shape", "tiny")
    (row,) = rows
    assert row["ratio"] == pytest.approx(row["stream_tokens_per_second"] / row["memmap_tokens_per_second"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["recurrence", "--shape", "huge"], "--shape huge: there is no such shape; choose from published, "),
        (["memory", "--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["memory", "--threads", "-1"], "--threads is -1; it must be from 0"),
        (["decode", "--install"], "--install belongs to the benchmark peers"),
        (["data", "--data", "corpus"], "--data belongs to the benchmark pairs"),
        (["pairs", "--data", "nowhere"], "nowhere"),
        (["data", "--json", "found.txt"], "--json found.txt: the name must end in one of .json"),
    ],
)
def test_mistakes_get_one_line(capsys, arguments, line):
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("backfeed: ")
    assert line in error[0]


def test_unknown_benchmark(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "speed"])
    assert "invalid choice: 'speed'" in capsys.readouterr().err
