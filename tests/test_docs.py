"""The guide's example is a real architecture: its code is run, and the tests of the contract are run over it."""

import re
from pathlib import Path

import pytest
import torch

from pipeline.models import ARCHITECTURES
from pipeline.solvers import SOLVERS
from tests.models import contract, oracles
from tests.models.cases import Case, solver_config

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "adding-an-architecture.md"
IMPORTS = """
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from pipeline.models.base import ARCHITECTURES, ArchitectureConfig, Flops, count_parameters
from pipeline.models.feedback import Feedback
from pipeline.models.inputs import Inputs
from pipeline.models.layers import matmul_flops
from pipeline.models.stack import StackArchitecture, StackConfig
"""


class EchoOracle(oracles.Transformer):
    """The last state, times a gain, joins the embedding; nothing before the first position."""

    def initial(self):
        return torch.zeros_like(self.plain[0])

    def entry(self, position, fed):
        e = self.plain[position]
        return e if fed is None else e + self.config.gain * (self.weights["entry.weight"] @ fed)


@pytest.fixture
def echo(monkeypatch):
    """The guide's architecture, registered for one test."""
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL).group(1)
    entries, known = dict(ARCHITECTURES._entries), dict(oracles.ORACLES)
    monkeypatch.setattr(ARCHITECTURES, "_entries", entries)
    monkeypatch.setattr(oracles, "ORACLES", {**known, "echo": EchoOracle})
    names = {"__name__": "echo"}
    exec(compile(IMPORTS + code, str(GUIDE), "exec", dont_inherit=True), names)
    return names["Echo"]


FLOPS = {contract.check_flops, contract.check_flops_run}  # the oracle counts the five architectures alone


@pytest.mark.parametrize("check", [check for check in contract.CHECKS if check not in FLOPS])
def test_the_guide_makes_an_architecture(echo, check):
    assert ARCHITECTURES["echo"] is echo
    for solver in (
        solver_config("chunked", interval=1),
        solver_config("unrolled", passes=3),
        solver_config("interleaved", subsets=2),
    ):
        case = Case("echo", "plain", solver)
        check(case.cls, case.config, case.solver, 0)


def test_links_of_the_documentation_lead_somewhere():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_architecture_and_solver_has_its_page():
    for name in ARCHITECTURES:
        assert (ROOT / "docs" / "architectures" / f"{name}.md").is_file()
    text = (ROOT / "docs" / "solvers.md").read_text()
    for name in SOLVERS:
        assert f"`{name}`" in text
