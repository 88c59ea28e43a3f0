"""Muon with AdamW against torch's own optimisers, rates by width, weight decay over a run, whole runs."""

import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pipeline import config_files, models
from pipeline.config import AdamWConfig, MuonConfig
from pipeline.errors import ConfigError
from pipeline.models import ARCHITECTURES
from pipeline.runs.checkpoints import TRAINING, CheckpointStore
from pipeline.training import optimizers
from pipeline.training.muon import MuonWithAdamW
from pipeline.training.train import train
from tests.support import assert_close, backfeed, forget_after, losses, rows, run_config

PEAK = 0.02
MUON = MuonConfig("muon", embedding_peak=0.3, head_peak=0.004, vector_peak=0.5, beta1=0.8, eps=1e-10)
# Weights that hold several matrices, by what their names contain.
PACKED = ("query_key_value", "gate_up", "merge.state", "memory.key_value", "recurrent.")
RUN = ("optimizer.name=muon", "learning_rate.peak=0.02", "optimizer.vector_peak=0.005", "optimizer.embedding_peak=0.01")


def make(seed=0):
    """Return a small transformer with an untied head."""
    config = replace(ARCHITECTURES["transformer"].variants()["plain"], tied_head=False)
    return draw(models.build(config), seed)


def draw(model, seed=0):
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def variants():
    return [
        pytest.param(config, id=f"{name}-{variant}")
        for name, cls in ARCHITECTURES.items()
        for variant, config in cls.variants().items()
    ]


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def named(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def roles(model):
    found = optimizers.parameter_roles(model)
    return {name: found[parameter] for name, parameter in model.named_parameters()}


def rates(model, optimizer):
    """Return the rate and the decay of each parameter by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("config", variants())
def test_roles(config):
    model = models.build(config)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    packed = optimizers.packed_matrices(model)
    for name, parameter in model.named_parameters():
        role = roles(model)[name]
        assert (role == "embedding") == (id(parameter) in embeddings), name
        assert (role == "head") == (name == "readout_layer.head.weight"), name
        assert (role == "hidden") == (parameter.dim() == 2 and role not in ("embedding", "head")), name
        expected = role == "hidden" and any(part in name for part in PACKED)
        assert (parameter in packed) == expected, name
        if expected:
            assert sum(packed[parameter]) == len(parameter), name
            assert len(packed[parameter]) > 1, name


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_each_matrix_is_updated_as_if_it_were_stored_alone(nesterov, adjust):
    settings = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "weight_decay": 0.2}
    model = make()
    optimizer = optimizers.build(MuonConfig("muon", adjust_rate=adjust, **settings), model, PEAK)
    packed = optimizers.packed_matrices(model)
    hidden = [parameter for parameter, role in optimizers.parameter_roles(model).items() if role == "hidden"]
    alone = {
        parameter: [
            nn.Parameter(part.clone()) for part in parameter.detach().split(packed.get(parameter, len(parameter)))
        ]
        for parameter in hidden
    }
    reference = torch.optim.Muon(
        [part for parts in alone.values() for part in parts], lr=PEAK, adjust_lr_fn=adjust, **settings
    )
    assert len(reference.param_groups[0]["params"]) > len(hidden)
    for step in range(3):
        give_gradients(model, step)
        for parameter, parts in alone.items():
            for part, gradient in zip(parts, parameter.grad.split([len(part) for part in parts]), strict=True):
                part.grad = gradient.clone()
        optimizer.step()
        reference.step()
        for parameter, parts in alone.items():
            assert torch.equal(parameter, torch.cat(parts))


def test_packed_matrices_are_not_orthogonalised_as_a_stack():
    updates = []
    for packed in (optimizers.packed_matrices, lambda model: {}):
        model = make()
        built = optimizers.build(MuonConfig("muon", weight_decay=0.0), model, 1.0)
        weight = model.blocks[0].attention.query_key_value.weight
        before = weight.detach().clone()
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        MuonWithAdamW(built._muon, built._adamw, packed(model)).step()
        updates.append(before - weight.detach())
    rows = model.blocks[0].attention.query_key_value.parts
    apart, together = ([torch.linalg.svdvals(part) for part in update.split(rows)] for update in updates)
    # The polynomial maps singular values to some 0.7 to 1.2; in parts of an orthogonal stack they go down to near 0.
    assert all(float(values.min()) > 0.5 and float(values.max()) < 1.4 for values in apart)
    assert all(float(values.min()) < 0.5 for values in together)


@pytest.mark.parametrize("config", variants())
def test_all_the_rest_is_updated_by_adamw(config):
    model = draw(models.build(config))
    optimizer = optimizers.build(MUON, model, PEAK)
    role = roles(model)
    undecayed = {id(parameter) for parameter in optimizers.parameter_groups(model)[1]}
    peaks = {"embedding": 0.3, "head": 0.004, "vector": 0.5}
    copies, groups = {}, []
    for name, parameter in model.named_parameters():
        if role[name] != "hidden":
            copies[name] = nn.Parameter(parameter.detach().clone())
            decay = 0.0 if id(parameter) in undecayed else 0.1
            groups.append({"params": [copies[name]], "lr": peaks[role[name]], "weight_decay": decay})
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, fused=True)
    for step in range(3):
        give_gradients(model, step)
        for name, copy in copies.items():
            copy.grad = model.get_parameter(name).grad.clone()
        before = named(model)
        optimizer.step()
        reference.step()
        assert all(torch.equal(model.get_parameter(name), copy) for name, copy in copies.items())
        assert all(not torch.equal(model.get_parameter(name), old) for name, old in before.items())


def test_rates_and_decay():
    model = make()
    width = model.config.width
    role, matrix = roles(model), {name: parameter.dim() == 2 for name, parameter in model.named_parameters()}

    def expected(peaks, decays):
        return {name: (peaks[kind], decays.get(kind, 0.0) if matrix[name] else 0.0) for name, kind in role.items()}

    plain = {"hidden": PEAK, "embedding": PEAK, "head": PEAK, "vector": PEAK}
    decays = {"hidden": 0.1, "head": 0.1}
    for config, peaks, decay in (
        (AdamWConfig("adamw"), plain, decays),
        (AdamWConfig("adamw", base_width=2 * width), {**plain, "hidden": 2 * PEAK}, decays),
        (AdamWConfig("adamw", base_width=width // 4), {**plain, "hidden": PEAK / 4}, decays),
        (MuonConfig("muon"), plain, decays),
        (MuonConfig("muon", head_weight_decay=0.0), plain, {"hidden": 0.1}),
        (MUON, {"hidden": PEAK, "embedding": 0.3, "head": 0.004, "vector": 0.5}, decays),
        (
            MuonConfig("muon", embedding_peak=0.3, base_width=width // 4),
            {"hidden": PEAK, "embedding": 0.15, "head": PEAK / 2, "vector": PEAK},
            decays,
        ),
    ):
        optimizer = optimizers.build(config, model, PEAK)
        assert rates(model, optimizer) == expected(peaks, decay), config
        LambdaLR(optimizer, lambda step: 0.5)
        halves = {kind: peak * 0.5 for kind, peak in peaks.items()}
        assert rates(model, optimizer) == expected(halves, decay), config


def test_plain_adamw_has_the_groups_that_older_checkpoints_have():
    model = make()
    for decay in (0.1, 0.0):
        groups = optimizers.build(AdamWConfig("adamw", weight_decay=decay), model, PEAK).param_groups
        assert [(group["lr"], group["weight_decay"]) for group in groups] == [(PEAK, decay), (PEAK, 0.0)]
        for group, parameters in zip(groups, optimizers.parameter_groups(model), strict=True):
            assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in parameters]


@pytest.mark.parametrize("kind", [AdamWConfig, MuonConfig])
def test_weight_decay_falls_to_zero(kind):
    model = make()
    for decay_to_zero in (True, False):
        config = kind(weight_decay=0.2, decay_to_zero=decay_to_zero)
        optimizer = optimizers.build(config, model, PEAK)
        full = rates(model, optimizer)
        for done in (0, 1, 7, 2):  # any order: the step's number alone counts
            optimizers.set_weight_decay(config, optimizer, done, 8)
            factor = 1 - done / 8 if decay_to_zero else 1
            assert rates(model, optimizer) == {name: (rate, decay * factor) for name, (rate, decay) in full.items()}


def test_parameters_without_gradient_are_left_alone():
    model = make()
    optimizer = optimizers.build(MUON, model, PEAK)
    idle = ["blocks.0.ffn.gate_up.weight", "blocks.1.attention.output.weight", "blocks.1.ffn_norm.weight"]

    def step(seed, without):
        give_gradients(model, seed)
        for name in without:
            model.get_parameter(name).grad = None
        before = named(model)
        optimizer.step()
        changed = {name for name, value in named(model).items() if not torch.equal(value, before[name])}
        assert changed == before.keys() - set(without)

    step(0, idle)
    assert not {model.get_parameter(name) for name in idle} & optimizer.state.keys()
    step(1, [])
    kept = {name: {k: v.clone() for k, v in optimizer.state[model.get_parameter(name)].items()} for name in idle}
    step(2, idle)
    assert all(same(kept[name], optimizer.state[model.get_parameter(name)]) for name in idle)
    step(3, list(named(model)))


def test_saved_state_continues_to_the_last_bit():
    model = make()
    optimizer = optimizers.build(MUON, model, PEAK)
    scheduler = LambdaLR(optimizer, lambda done: 1 / (1 + done))

    def advance(model, optimizer, scheduler, steps):
        for step in steps:
            give_gradients(model, step)
            optimizer.step()
            scheduler.step()

    advance(model, optimizer, scheduler, range(3))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    advance(model, optimizer, scheduler, range(3, 6))
    file.seek(0)
    weights, state, schedule = torch.load(file, weights_only=True)
    other = make(seed=1)
    resumed = optimizers.build(MUON, other, PEAK)
    give_gradients(other, 9)
    resumed.step()  # a state that the loaded one is to replace
    again = LambdaLR(resumed, lambda done: 1 / (1 + done))
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    again.load_state_dict(schedule)
    advance(other, resumed, again, range(3, 6))
    assert same(named(other), named(model))
    assert rates(other, resumed) == rates(model, optimizer)


def test_weights_may_move_to_other_storage():
    stay, move = make(), make()
    for model in (stay, move):
        optimizer = optimizers.build(MUON, model, PEAK)
        for step in range(3):
            if model is move:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            give_gradients(model, step)
            optimizer.step()
    assert same(named(stay), named(move))


def test_gradients_do_not_outlive_a_step():
    model = make()
    optimizer = optimizers.build(MUON, model, PEAK)
    give_gradients(model, 0)
    optimizer.step()
    assert not optimizer._muon.param_groups
    assert not optimizer._muon.state
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_closure_makes_the_gradients():
    first, second = make(), make()
    give_gradients(first, 0)
    optimizers.build(MUON, first, PEAK).step()

    def closure():
        assert torch.is_grad_enabled()
        give_gradients(second, 0)
        return 7

    assert optimizers.build(MUON, second, PEAK).step(closure) == 7
    assert same(named(first), named(second))


def test_parts_that_do_not_fill_a_weight_are_refused():
    weight = nn.Parameter(torch.zeros(4, 3))
    others = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="parts of"):
        MuonWithAdamW(torch.optim.Muon([weight]), others, {weight: (2, 1)})


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("muon", "momentum", 1, " is 1.0; it must be at least 0 and below 1"),
        ("muon", "beta2", 1, " is 1.0; it must be at least 0 and below 1"),
        ("muon", "eps", 0, " is 0.0; it must be above 0"),
        ("muon", "weight_decay", -1, " is -1.0; it must be at least 0"),
        ("muon", "head_weight_decay", -1, " is -1.0; it must be at least 0"),
        ("muon", "ns_steps", 0, " is 0; it must be at least 1"),
        ("muon", "ns_steps", 100, " is 100; it must be at most 99"),
        ("muon", "embedding_peak", 0, " is 0.0; it must be above 0"),
        ("muon", "head_peak", -1, " is -1.0; it must be above 0"),
        ("muon", "vector_peak", 0, " is 0.0; it must be above 0"),
        ("muon", "base_width", 0, " is 0; it must be at least 1"),
        ("muon", "adjust_rate", "none", "match_rms_adamw"),
        ("adamw", "base_width", 0, " is 0; it must be at least 1"),
        ("adamw", "momentum", 0.9, "it belongs to muon"),
    ],
)
def test_bad_settings(tmp_path, name, key, value, message):
    with pytest.raises(ConfigError) as caught:
        run_config(tmp_path, tmp_path, f"optimizer.name={name}", f"optimizer.{key}={value}")
    found = str(caught.value)
    assert f"optimizer.{key}" in found
    assert message in found
    assert "\n" not in found


@pytest.mark.parametrize("architecture", ["transformer", "rlt"])
def test_muon_learns(tmp_path, data, architecture):
    config = run_config(tmp_path / "runs", data, *RUN, "training.tokens=6400", architecture=architecture)
    found = losses(train(config).folder)
    assert float(found[50]) < 3.3


@pytest.mark.parametrize("optimizer", [RUN, ("optimizer.name=adamw", "optimizer.base_width=32")], ids=["muon", "adamw"])
def test_resumed_run_repeats_every_loss(tmp_path, data, optimizer):
    settings = (*optimizer, "optimizer.decay_to_zero=true", "optimizer.weight_decay=1", "checkpoint.keep_last=3")
    whole = train(run_config(tmp_path / "runs", data, *settings, name="whole")).folder
    config = run_config(tmp_path / "runs", data, *settings, name="cut")
    cut = train(config).folder
    forget_after(cut, 4)
    assert train(config, "must").step == 12
    assert losses(cut) == losses(whole)
    assert rows(cut, "validation") == rows(whole, "validation")
    for checkpoint in CheckpointStore(cut / "checkpoints").list():
        (state,) = torch.load(checkpoint.path / TRAINING, weights_only=True)["optimizer_states"]
        decays = {group["weight_decay"] for group in state["groups"]}
        assert decays == {0.0, 1 - (checkpoint.step - 1) / 12}
    steady = run_config(tmp_path / "runs", data, *settings, "optimizer.decay_to_zero=false", name="steady")
    assert losses(train(steady).folder) != losses(whole)


def test_two_ranks_give_the_losses_of_one(tmp_path, data):
    config = tmp_path / "config.yaml"
    settings = (*RUN, "training.micro_batch_tokens=64")
    config_files.save(run_config(tmp_path / "runs", data, *settings), config)
    for name, ranks in (("one", 1), ("two", 2)):
        done = backfeed("train", config, f"run.name={name}", f"training.devices={ranks}")
        assert done.returncode == 0, done.stderr
    assert_close(losses(tmp_path / "runs/two"), losses(tmp_path / "runs/one"))
