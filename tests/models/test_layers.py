"""Layers: rotary positions, attention, feed-forward, readout, and how weights begin."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.errors import ConfigError
from pipeline.models import RLT, Transformer
from pipeline.models.inputs import Visibility
from pipeline.models.layers import (
    CrossAttention,
    HeadNorms,
    Readout,
    RMSNorm,
    SelfAttention,
    SwiGLU,
    attend,
    attend_same,
    init_linear,
    matmul_flops,
    normed,
    rotate,
    rotation,
)
from tests.models.cases import SEEDS, make_model, random


def normal(seed, *shape):
    return torch.randn(*shape, generator=random(seed), dtype=torch.float64)


# ---------------------------------------------------------------- rotary positions


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("head_dim", "base", "kind"),
    [
        (2, 10_000.0, "geometric"),
        (6, 10_000.0, "geometric"),
        (8, 100.0, "geometric"),
        (64, 500_000.0, "geometric"),
        (8, 1.0, "integer"),
        (64, 1.0, "integer"),
    ],
)
def test_scores_depend_on_the_difference_of_positions(seed, head_dim, base, kind):
    query, key = normal(seed, 1, 1, 3, head_dim), normal(seed + 10, 1, 1, 3, head_dim)

    def score(query_position, key_position):
        turned = [
            rotate(x, *rotation(torch.tensor([[position]]), head_dim, base, torch.float64, kind))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return (turned[0] * turned[1]).sum(dim=-1)

    for difference in (0, 1, 5, 17):
        reference = score(difference, 0)
        for shift in (1, 2, 100, 3000):
            assert torch.allclose(score(difference + shift, shift), reference, rtol=0, atol=1e-10)
    assert torch.allclose(score(7, 7), (query * key).sum(dim=-1), rtol=0, atol=1e-12)
    assert not torch.allclose(score(3, 0), score(0, 3), rtol=0, atol=1e-3)
    assert not torch.allclose(score(3, 0), score(4, 0), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "frequencies"),
    [("geometric", [10_000 ** (-pair / 4) for pair in range(4)]), ("integer", [0, 1, 2, 3])],
    ids=["geometric", "integer"],
)
def test_rotation_is_complex_multiplication(kind, frequencies):
    x, positions = normal(0, 2, 5, 3, 8), torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    turned = rotate(x, *rotation(positions, 8, 10_000.0, torch.float64, kind))
    for row in range(2):
        for place in range(5):
            for pair in range(4):
                angle = int(positions[row, place]) * frequencies[pair]
                before = torch.complex(x[row, place, :, pair], x[row, place, :, pair + 4])
                expected = before * complex(math.cos(angle), math.sin(angle))
                after = torch.complex(turned[row, place, :, pair], turned[row, place, :, pair + 4])
                assert torch.allclose(after, expected, rtol=0, atol=1e-14)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.equal(turned[:, 0], x[:, 0])


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["geometric", "integer"])
def test_tables_stay_float32(weights, autocast, kind):
    positions = torch.arange(2048)[None]
    exact = rotation(positions, 64, 10_000.0, torch.float64, kind)
    assert exact[0].dtype == exact[1].dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        tables = rotation(positions, 64, 10_000.0, weights, kind)
    for table, reference in zip(tables, exact, strict=True):
        assert table.shape == (1, 2048, 1, 64)
        assert table.dtype == torch.float32
        assert torch.equal(table, reference.float())
    assert len(torch.cat(tables, dim=-1).flatten(0, 2).unique(dim=0)) == 2048
    in_bfloat16 = torch.arange(2048).bfloat16()  # why it matters
    assert len(in_bfloat16.unique()) < 2048


def test_tables_are_exact_far_out():
    positions = torch.tensor([[1_000_000, 16_777_217]])  # float32 cannot tell the second from its neighbour
    cos, sin = rotation(positions, 4, 10_000.0, torch.float32, "geometric")
    for place, position in enumerate(positions[0].tolist()):
        for pair in range(2):
            angle = position / 10_000 ** (pair / 2)
            assert cos[0, place, 0, pair] == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[0, place, 0, pair] == pytest.approx(math.sin(angle), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_rotate_keeps_the_dtype(dtype, autocast):
    x = normal(0, 1, 5, 2, 8)
    tables = rotation(torch.arange(5)[None], 8, 10_000.0, dtype, "geometric")
    exact = rotate(x, *rotation(torch.arange(5)[None], 8, 10_000.0, torch.float64, "geometric"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        turned = rotate(x.to(dtype), *tables)
    assert turned.dtype == dtype
    assert torch.allclose(turned.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps * float(x.abs().max()))


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_grouped_queries_are_repeated_keys_and_values(seed, heads, kv_heads):
    query = normal(seed, 2, 5, heads, 6)
    key, value = normal(seed + 1, 2, kv_heads, 7, 6), normal(seed + 2, 2, kv_heads, 7, 6)
    mask = torch.rand(2, 1, 5, 7, generator=random(seed)) < 0.6
    mask[..., 0] = True
    for visible in (Visibility(None), Visibility(mask)):
        found = attend(query, key, value, visible)
        times = heads // kv_heads
        repeated = attend(query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), visible)
        assert torch.allclose(found, repeated, rtol=0, atol=1e-13)
        scores = torch.einsum("rnhd,rhmd->rhnm", query, key.repeat_interleave(times, 1)) / math.sqrt(6)
        if visible.mask is not None:
            scores = scores.masked_fill(~visible.mask, -math.inf)
        plain = torch.einsum("rhnm,rhmd->rnhd", scores.softmax(dim=-1), value.repeat_interleave(times, 1))
        assert found.shape == (2, 5, heads, 6)
        assert torch.allclose(found, plain, rtol=0, atol=1e-13)


def test_causal_attention_is_its_mask():
    query, key, value = normal(0, 2, 5, 2, 4), normal(1, 2, 2, 5, 4), normal(2, 2, 2, 5, 4)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    causal = attend(query, key, value, Visibility(None, causal=True))
    assert torch.allclose(causal, attend(query, key, value, Visibility(mask)), rtol=0, atol=1e-14)


def test_self_attention_packs_queries_keys_values():
    layer = SelfAttention(10, 4, 2, 6).double()
    x = normal(0, 2, 3, 10)
    query, key, value = layer.project(x)
    assert query.shape == (2, 3, 4, 6)
    assert key.shape == value.shape == (2, 3, 2, 6)
    assert layer.query_key_value.parts == (24, 12, 12)
    weight = layer.query_key_value.weight
    joined = torch.cat([query.flatten(2), key.flatten(2), value.flatten(2)], dim=-1)
    assert torch.allclose(joined, x @ weight.T, rtol=0, atol=1e-14)


@torch.no_grad()
def test_values_are_neither_normed_nor_rotated():
    """Keys are both, as they enter attention and the memory."""
    x, config = normal(0, 1, 3, 16), Transformer.variants()["plain"]
    block = make_model(Transformer, config).blocks[0]
    found = []

    def attends(query, key, value, visible, dropout):
        found.append((key, value))
        return attend_same(query, key, value, visible, dropout)

    for offset, norms in ((0, block.head_norms), (5, block.head_norms), (0, None)):
        block.head_norms = norms
        tables = rotation(torch.arange(offset, offset + 3)[None], 8, 100.0, torch.float64, "geometric")
        block(x, *tables, Visibility(None, causal=True), attends)
    (key, value), *others = found
    assert torch.equal(value, block.attention.project(block.attention_norm(x))[2])
    for other_key, other_value in others:
        assert torch.equal(value, other_value)
        assert float((key - other_key).abs().max()) > 1e-3


@pytest.mark.parametrize("which", ["query", "key"])
def test_head_norms_norm_each_head(which):
    norms = HeadNorms(4, 1e-5).double()
    weight = getattr(norms, which).weight
    with torch.no_grad():
        weight.copy_(normal(3, 4))
    x = normal(0, 2, 3, 5, 4)
    expected = x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(normed(x, norms, which), expected, rtol=1e-13, atol=0)
    assert normed(x, None, which) is x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert normed(x.bfloat16(), HeadNorms(4, 1e-5), which).dtype == torch.bfloat16


def test_cross_attention_has_no_keys_of_its_own():
    layer = CrossAttention(8, 2, 4)
    assert {name for name, _ in layer.named_parameters()} == {"query.weight", "output.weight"}
    assert HeadNorms(4, 1e-6, key=False).key is None
    assert HeadNorms(4, 1e-6, query=False).query is None


# ---------------------------------------------------------------- feed-forward, norm, readout


@pytest.mark.parametrize("seed", SEEDS)
def test_swiglu(seed):
    layer, x = SwiGLU(6, 10).double(), normal(seed, 2, 3, 6)
    gate, up = layer.gate_up.weight[:10], layer.gate_up.weight[10:]
    hidden = (x @ gate.T) * torch.sigmoid(x @ gate.T) * (x @ up.T)
    assert torch.allclose(layer(x), hidden @ layer.down.weight.T, rtol=0, atol=1e-14)
    assert [name for name, _ in layer.named_parameters()] == ["gate_up.weight", "down.weight"]


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("learned", [True, False])
def test_rms_norm(eps, learned):
    norm, x = RMSNorm(5, eps, learned=learned).double(), normal(0, 3, 5)
    expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if learned:
        with torch.no_grad():
            norm.weight.copy_(normal(1, 5))
        expected = expected * norm.weight
    assert torch.allclose(norm(x), expected, rtol=0, atol=1e-14)
    assert not norm(torch.zeros(1, 5, dtype=torch.float64)).any()
    assert [name for name, _ in norm.named_parameters()] == (["weight"] if learned else [])


@pytest.mark.parametrize("tied", [True, False])
def test_readout(tied):
    readout, embedding = Readout(RMSNorm(6, 1e-6), 6, 11, tied=tied).double(), nn.Embedding(11, 6).double()
    x = normal(0, 2, 3, 6)
    matrix = embedding.weight if tied else readout.head.weight
    assert torch.allclose(readout(x, embedding), F.linear(readout.norm(x), matrix), rtol=0, atol=1e-14)
    assert sum(parameter.numel() for parameter in readout.parameters()) == 6 + (0 if tied else 66)


@torch.no_grad()
def test_init_linear():
    layer = nn.Linear(300, 400)
    init_linear(layer, 0.5, 300, random(0))
    assert float(layer.weight.std()) == pytest.approx(0.5 / math.sqrt(300), rel=5 / math.sqrt(2 * 120_000))
    assert float(layer.weight.mean()) == pytest.approx(0, abs=5 * 0.5 / math.sqrt(300) / math.sqrt(120_000))
    assert float(layer.bias.abs().max()) == 0


@pytest.mark.parametrize(
    "config",
    [
        replace(Transformer.variants()["plain"], width=128, vocab_size=500),
        replace(RLT.variants()["tied"], width=128, vocab_size=500),
    ],
    ids=["transformer", "rlt"],
)
@torch.no_grad()
def test_weights_begin_as_configured(config):
    """Matrices at hidden_std_factor / sqrt(fan_in), embeddings at their own, norms at 1, biases at 0."""
    model = {"transformer": Transformer, "rlt": RLT}[config.architecture](config)
    model.init_weights(random(0))
    for name, parameter in model.named_parameters():
        if name == "merge.state.weight":
            continue  # two matrices in one: see the next test
        if name == "initial" or name.startswith("embedding"):
            expected = config.embedding_std
        elif parameter.dim() == 2:
            # W_g reads [e; r]: both of its halves have the fan-in of the whole.
            fan_in = 2 * config.width if name == "merge.entry_gate.weight" else parameter.shape[1]
            expected = config.hidden_std_factor / math.sqrt(fan_in)
        else:
            assert bool((parameter == (0 if name.endswith("bias") else 1)).all()), name
            continue
        assert float(parameter.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel())), name


@torch.no_grad()
def test_both_halves_of_the_merge_gate_begin_alike():
    """W_g [e; r] is one matrix of fan-in 2 d (2.10): its halves, stored apart, have one spread. W_s has fan-in d."""
    width = 256
    model = RLT(replace(RLT.variants()["plain"], width=width))
    model.init_weights(random(0))
    entry, state = model.merge.entry_gate.weight, model.merge.state.weight[:width]
    assert float(state.std()) == pytest.approx(float(entry.std()), rel=10 / math.sqrt(2 * width * width))
    w_state = model.merge.state.weight[width:]
    assert float(w_state.std()) == pytest.approx(0.5 / math.sqrt(width), rel=5 / math.sqrt(2 * width * width))


def test_matmul_flops():
    assert matmul_flops(SwiGLU(6, 10), None, nn.Linear(3, 4)) == 2 * (3 * 6 * 10 + 12)
    assert matmul_flops(RMSNorm(5, 1e-6), nn.Embedding(3, 4)) == 0


# ---------------------------------------------------------------- sizes


PLAIN = Transformer.variants()["plain"]


def test_sizes_left_open():
    config = replace(PLAIN, width=512, heads=4)
    assert (config.key_value_heads, config.head_width, config.hidden_width) == (4, 128, 1408)
    config = replace(config, kv_heads=2, head_dim=64, ffn_width=1365)
    assert (config.key_value_heads, config.head_width, config.hidden_width) == (2, 64, 1365)
    for width in (8, 24, 64, 120, 1000, 2048):
        hidden = replace(PLAIN, width=width).hidden_width
        assert hidden % 64 == 0
        assert 0 <= hidden - 8 * width / 3 < 64


RLT_PLAIN = RLT.variants()["plain"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(PLAIN, width=0), "model.width is 0"),
        (replace(PLAIN, heads=0), "model.heads is 0"),
        (replace(PLAIN, kv_heads=0), "model.kv_heads is 0"),
        (replace(PLAIN, ffn_width=-1), "model.ffn_width is -1"),
        (replace(PLAIN, width=15), "model.width is 15"),
        (replace(PLAIN, head_dim=3), "head_dim"),
        (replace(PLAIN, heads=4, kv_heads=3), "model.heads is 4"),
        (replace(PLAIN, layers=0), "model.layers is 0"),
        (replace(RLT_PLAIN, encoder_layers=0), "model.encoder_layers is 0"),
        (replace(RLT_PLAIN, decoder_layers=-1), "model.decoder_layers is -1"),
        (replace(RLT_PLAIN, window=0), "model.window is 0"),
        (replace(RLT_PLAIN, memory_groups=0), "model.memory_groups is 0"),
        (replace(RLT_PLAIN, memory_groups=3), "model.memory_groups is 3"),
        (replace(RLT_PLAIN, decoder_layers=0, memory_groups=2), "model.memory_groups is 2"),
        (replace(RLT_PLAIN, tied_stacks=True), "model.tied_stacks"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_sizes_that_do_not_fit_are_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        config.check()
