"""First weights are the same, drawn into a whole model or module by module into one that is held elsewhere."""

import pytest
import torch

from pipeline.models import ARCHITECTURES
from pipeline.models.base import build, build_on_meta
from pipeline.training.drawing import draw_into, draw_weights
from pipeline.training.state import ReplicatedState

VARIANTS = [(name, variant) for name, cls in sorted(ARCHITECTURES.items()) for variant in cls.variants()]


@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=[f"{name}-{variant}" for name, variant in VARIANTS])
def test_drawn_by_module(name, variant):
    config = ARCHITECTURES[name].variants()[variant]
    whole = build(config)
    draw_weights(whole, 3)
    other = build(config)
    state = ReplicatedState(dict(other.named_parameters()), torch.optim.SGD(other.parameters(), lr=1))
    skeleton = build_on_meta(config)
    draw_into(state, skeleton, 3)
    for (key, expected), found in zip(whole.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(found, expected), key
    assert {each.device.type for each in skeleton.parameters()} == {"meta"}
