"""A run's solver, as it is loaded for evaluation: as in training's last step, without what training alone knows."""

import pytest

from pipeline.errors import ConfigError
from pipeline.runs.loading import solver_of
from tests.support import run_config


def fbt(tmp_path):
    overrides = ["solver.name=unrolled", "solver.loss=plain_and_fed", "solver.prefix=1.0", "solver.fed_loss_weight=0.5"]
    draw = "schedules.passes=[{at: 0, draw: [1, 2, 3], weights: [75, 22, 3]}]"
    return run_config(tmp_path, tmp_path / "data", *overrides, draw, architecture="fbt")


def test_settings_of_the_last_step(tmp_path):
    solver = solver_of(fbt(tmp_path), {"passes": 3, "prefix": 1.0}, [])
    assert str(solver) == "unrolled passes=3"
    assert solver.prefix == 0.0
    assert solver.config.loss == "last"


def test_overrides(tmp_path):
    config = fbt(tmp_path)
    settings = {"passes": 3, "prefix": 1.0}
    assert str(solver_of(config, settings, ["solver.passes=8"])) == "unrolled passes=8"
    assert str(solver_of(config, settings, ["solver.name=unrolled"])) == "unrolled passes=3"
    assert solver_of(config, settings, ["solver.tolerance=0.01"]).config.tolerance == 0.01
    assert str(solver_of(config, settings, ["solver.name=chunked"])) == "chunked interval=1"
    assert str(solver_of(config, settings, ["solver.name=interleaved", "solver.subsets=4"])) == "interleaved subsets=4"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("solver.prefix=0.5", "solver.prefix belongs to training"),
        ("solver.loss=mean", "solver.loss belongs to training"),
        ("solver.interval=2", "solver.interval"),
        ("model.width=8", "is no setting of the solver"),
        ("solver.passes", "is no setting of the solver"),
    ],
)
def test_mistakes(tmp_path, override, words):
    with pytest.raises(ConfigError, match=words):
        solver_of(fbt(tmp_path), {"passes": 3}, [override])
