"""Which process is the first one, before there is a process group to ask."""

import pytest

from pipeline.errors import RunError
from pipeline.training import distributed

VARIABLES = ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID")


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "4", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "3"}, False),
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, False),
    ],
)
def test_first_process(monkeypatch, variables, first):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.is_first() is first


def test_alone_everything_is_agreed(monkeypatch):
    import torch

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    number = torch.tensor(3.0)
    assert distributed.total(number) is distributed.mean(number) is distributed.smallest(number) is number
    assert distributed.largest(2) == 2
    assert distributed.from_first("x") == "x"
    assert distributed.first_decides(lambda: 5) == 5

    def refuse():
        raise RunError("no")

    with pytest.raises(RunError, match="no"):
        distributed.first_decides(refuse)
