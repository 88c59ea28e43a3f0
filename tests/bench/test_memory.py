"""Memory is counted right, and checkpointing in time saves what it is for."""

import pytest
import torch

from pipeline import models, solvers
from pipeline.bench import memory
from pipeline.bench.live_memory import LiveMemory
from pipeline.models.rlt import RLTConfig
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.training.drawing import draw_weights

MEGA = 1 << 20


def test_live_bytes_come_and_go():
    with LiveMemory() as counted:
        a = torch.zeros(MEGA, dtype=torch.uint8)
        assert counted.live == MEGA
        b = a.view(2, -1)[0]  # a view holds nothing of its own
        assert counted.live == MEGA
        c = a + 1
        assert (counted.live, counted.peak) == (2 * MEGA, 2 * MEGA)
        del a, c
        assert counted.live == MEGA  # the view keeps the first alive
        del b
        assert counted.live == 0
        torch.ones(MEGA, dtype=torch.uint8)
    assert counted.peak == 2 * MEGA


def test_what_was_there_before_is_not_counted():
    weight = torch.ones(1000, 1000)
    with LiveMemory() as counted:
        weight.mul_(2)
        weight.t()
    assert counted.peak == 0


def test_what_backward_keeps_is_counted():
    x = torch.ones(MEGA // 4, requires_grad=True)
    with LiveMemory() as counted:
        y = x.exp().exp().exp()  # each keeps its result
        assert counted.live == 3 * MEGA
        y.sum().backward()
        del y
    assert counted.live == MEGA  # the gradient of x


def test_what_is_left_out_is_not_counted():
    weight = torch.ones(1000, requires_grad=True)
    with LiveMemory() as counted:
        for _ in range(3):  # storages are freed, and others come to lie where they lay
            torch.ones(3000)
        (weight.exp() * 2).sum().backward()
        assert weight.grad is not None
        gradient = weight.grad.untyped_storage().nbytes()
        assert counted.live == gradient
    without = counted.peak_without([weight.grad])
    assert counted.peak - gradient <= without <= counted.peak
    assert counted.peak_without([]) == counted.peak


def test_segments_of_time_keep_a_small_share():
    """What the documentation says, at a shape that a test has time for."""
    config = RLTConfig("rlt", vocab_size=64, width=64, heads=2, encoder_layers=2, decoder_layers=2, window=8)
    model = models.build(config)
    draw_weights(model, 0)
    tokens = torch.randint(64, (16, 193), generator=torch.Generator().manual_seed(0))
    none, default = (ChunkedConfig("chunked", activation_checkpointing=each) for each in (False, True))
    whole, parts = (memory.peak(model, solvers.build(each), tokens) for each in (none, default))
    assert parts <= 0.15 * whole, parts / whole


def test_segments_of_time_keep_less():
    config = RLTConfig("rlt", vocab_size=16, width=32, heads=2, encoder_layers=1, decoder_layers=2, window=4)
    model = models.build(config)
    draw_weights(model, 0)
    # More rows over all positions than the loop puts aside for weight gradients, which no segment makes fewer.
    tokens = torch.randint(16, (8, 257), generator=torch.Generator().manual_seed(0))
    whole, parts = (memory.peak(model, memory.solver(segment), tokens) for segment in (0, 16))
    assert parts < 0.5 * whole


def test_weights_in_a_layout_of_their_own_are_counted():
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        pytest.skip("torch has no oneDNN here")
    weight = torch.ones(512, 512)
    with LiveMemory() as counted:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 512)
        assert packed.is_mkldnn
        assert counted.live == MEGA
        del packed
        assert counted.live == 0
