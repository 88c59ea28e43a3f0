"""In which order a trained model is decoded."""

import pytest

from pipeline.errors import ConfigError
from pipeline.solvers import Chunked, Parallel, Unrolled, build, decoding, sequential
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.interleaved import InterleavedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.solvers.unrolled import UnrolledConfig

FED = [ChunkedConfig("chunked", interval=4), UnrolledConfig("unrolled", passes=3), InterleavedConfig("interleaved")]
UNFED = [ParallelConfig("parallel"), UnrolledConfig("unrolled", passes=1)]


@pytest.mark.parametrize("config", FED, ids=lambda config: config.name)
def test_a_model_that_is_fed_has_every_mode(config):
    solver = build(config)
    assert decoding(solver, "trained") is solver
    assert isinstance(decoding(solver, "standard"), Parallel)
    for mode, passes in (("soft", 1), ("fused", 2)):
        found = decoding(solver, mode)
        assert isinstance(found, Unrolled)
        assert found.passes == passes
    for exact in (decoding(solver, "recurrent"), sequential(solver)):
        assert isinstance(exact, Chunked)
        assert exact.interval == 1


@pytest.mark.parametrize("config", UNFED, ids=lambda config: config.name)
def test_one_that_was_never_fed_is_decoded_plainly(config):
    """Its weights for feedback are as they were drawn: text made with them would be noise."""
    solver = build(config)
    for mode in ("trained", "standard"):
        assert isinstance(decoding(solver, mode), Parallel)
    for mode in ("soft", "fused", "recurrent"):
        with pytest.raises(
            ConfigError, match=f"decoding '{mode}' feeds states back, but the model was trained without"
        ):
            decoding(solver, mode)
