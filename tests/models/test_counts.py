"""Parameter counts: those that the papers publish, and those of sizes too large to build for real."""

from dataclasses import replace

import pytest
import torch

from pipeline import solvers
from pipeline.models import ARCHITECTURES, RLT, Transformer, build
from pipeline.models.base import count_parameters
from pipeline.models.rlt import RLTConfig
from pipeline.models.transformer import TransformerConfig
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.parallel import ParallelConfig

# RLT report, 3.1 and appendix J.
PAPER = {"vocab_size": 277, "width": 512, "heads": 4, "ffn_width": 1365}
RLT_COUNTS = {(4, 4): 28_726_912, (5, 3): 28_201_984, (6, 2): 27_677_056, (7, 1): 27_152_128, (8, 0): 26_102_272}

LARGE = RLTConfig(
    architecture="rlt",
    vocab_size=32_768,
    width=2048,
    heads=16,
    kv_heads=4,
    encoder_layers=12,
    decoder_layers=6,
    window=64,
    memory_groups=2,
    tied_head=False,
)
DEEP = RLTConfig(
    architecture="rlt",
    vocab_size=50_304,
    width=1024,
    heads=16,
    encoder_layers=48,
    decoder_layers=48,
    tied_stacks=True,
)


def on_meta(config):
    with torch.device("meta"):
        model = build(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def total(model):
    return sum(parameter.numel() for parameter in model.parameters())


def rlt_count(config):
    """Return the parameters of an RLT by hand."""
    d = config.width
    kv_heads, head = config.kv_heads or config.heads, config.head_dim or d // config.heads
    bias = 1 if config.linear_bias else 0

    def linear(fan_in, fan_out):
        return (fan_in + bias) * fan_out

    if config.ffn == "swiglu":
        hidden = config.ffn_width or (8 * d // 3 + 63) // 64 * 64
        ffn = linear(d, 2 * hidden) + linear(hidden, d)
    else:
        hidden = config.ffn_width or 4 * d
        ffn = linear(d, hidden) + linear(hidden, d)
    norm = {"rms": d, "rms_unlearned": 0, "layer": 2 * d}[config.norm]
    head_norm = head if config.qk_norm and config.norm != "rms_unlearned" else 0
    attention = linear(d, (config.heads + 2 * kv_heads) * head) + linear(config.heads * head, d)
    encoder = config.encoder_layers * (attention + ffn + 2 * norm + 2 * head_norm)
    own = 0 if config.tied_stacks else attention + ffn
    cross = linear(d, config.heads * head) + linear(config.heads * head, d)
    decoder = config.decoder_layers * (own + cross + 3 * norm + 3 * head_norm)
    groups = config.memory_groups * (linear(d, 2 * kv_heads * head) + head_norm)
    memory = norm + groups if config.decoder_layers else 0
    merge = 2 * d * d + d + d * d + norm + d  # W_g and b_g, W_s, norm, initial state
    return config.vocab_size * d * (1 if config.tied_head else 2) + norm + encoder + decoder + memory + merge


@pytest.mark.parametrize(("layers", "expected"), RLT_COUNTS.items(), ids=str)
def test_rlt_counts_of_the_report(layers, expected):
    config = RLTConfig(architecture="rlt", encoder_layers=layers[0], decoder_layers=layers[1], **PAPER)
    assert total(on_meta(config)) == expected == rlt_count(config)


def test_rlt_0_of_the_report_is_all_but_the_dormant_parameters():
    model = on_meta(RLTConfig(architecture="rlt", encoder_layers=4, decoder_layers=4, **PAPER))
    dormant = sum(parameter.numel() for parameter in model.dormant_parameters())
    assert dormant == 787_968
    assert total(model) - dormant == 27_938_944


def test_transformer_of_the_report():
    assert total(on_meta(TransformerConfig(architecture="transformer", layers=8, **PAPER))) == 25_314_304


@pytest.mark.parametrize(
    ("cls", "variant"), [(cls, name) for cls in ARCHITECTURES.values() for name in cls.variants()], ids=str
)
def test_parts_add_up(cls, variant):
    model = on_meta(cls.variants()[variant])
    assert sum(model.parts().values()) == total(model)
    assert all(number >= 0 for number in model.parts().values())


@pytest.mark.parametrize("variant", RLT.variants())
def test_rlt_variants_by_hand(variant):
    config = RLT.variants()[variant]
    assert total(on_meta(config)) == rlt_count(config)


def test_a_billion_parameters_build_without_memory():
    model = on_meta(LARGE)
    assert 0.9e9 < total(model) < 1.2e9
    assert total(model) == rlt_count(LARGE) == sum(model.parts().values())


def test_tied_stacks_are_counted_once():
    model, untied = on_meta(DEEP), on_meta(replace(DEEP, tied_stacks=False))
    block = model.encoder[0]
    shared = sum(parameter.numel() for module in (block.attention, block.ffn) for parameter in module.parameters())
    assert total(untied) - total(model) == 48 * shared
    assert total(model) == rlt_count(DEEP) == sum(model.parts().values())
    assert not any(".attention." in name or ".ffn." in name for name, _ in model.decoder.named_parameters())


def test_tied_stacks_do_the_work_of_untied_ones():
    tied, untied = on_meta(DEEP), on_meta(replace(DEEP, tied_stacks=False))
    assert tied.flops(4096) == untied.flops(4096)
    for settings in (ParallelConfig(name="parallel"), ChunkedConfig(name="chunked")):
        solver = solvers.build(settings)
        assert solver.flops_per_token(tied, 4096) == solver.flops_per_token(untied, 4096) > 0


def test_count_parameters_counts_each_once():
    model = on_meta(Transformer.variants()["plain"])
    assert count_parameters(model, model.blocks, model.embedding.weight, None) == total(model)
