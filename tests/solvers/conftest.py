"""Fixtures of the solvers' tests."""

import pytest

from pipeline.models import kernels as module


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let ``solver.kernels=auto`` choose either."""
    if request.param == "torch":
        monkeypatch.setattr(module, "_at_hand", lambda: None)
    else:
        module.compiled()
    return request.param
