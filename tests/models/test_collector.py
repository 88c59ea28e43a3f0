"""What is put aside over many steps sums to the gradients that autograd finds, whatever the steps look like."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.models import layers, links, products
from pipeline.models.collector import Collector, collecting, current

WIDTH, OUT = 6, 4


def collector_of(module: nn.Module, rows: int = 8, capacity: int = 100) -> Collector:
    return Collector(dict(module.named_parameters()), rows, capacity)


def standing_in(module: nn.Module, collector: Collector) -> None:
    """Put the stand-ins where the parameters were, as the loop does through torch."""
    for name, leaf in collector.leaves.items():
        owner, _, own = name.rpartition(".")
        del module.get_submodule(owner)._parameters[own]
        setattr(module.get_submodule(owner), own, leaf)


def links_of(module: nn.Module, collector: Collector) -> list[links.Link]:
    standing_in(module, collector)
    with collecting(collector):
        found = links.collected(module)
    assert found is not None
    return found


# A stretch is a list of steps, a step the rows of each call of the layer within it.
steps = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6)


@given(
    st.lists(steps, min_size=1, max_size=4),
    st.sampled_from([1, 4, 16, 1000]),
    st.booleans(),
    st.sampled_from([0, 1, 4]),
)
def test_any_pattern_of_calls(stretches: list[list[list[int]]], rows: int, reached: bool, first: int):
    """Each stretch is recorded, then gone through from its last call to its first, as with segments.

    ``reached``: backward reaches every call; else it skips some. ``first``: said to be the rows of the first step,
    rightly or not.
    """
    torch.manual_seed(0)
    layer = layers.Linear(WIDTH, OUT).double()
    weight, bias = (each.detach().clone().requires_grad_() for each in (layer.weight, layer.bias))
    most = max(sum(max(map(sum, [step, [1]])) for step in stretch) for stretch in stretches)
    collector = collector_of(layer, rows, most)
    (link,) = links_of(layer, collector)
    for stretch in stretches:
        collector.record(sum(max(sum(step), 1) for step in stretch), first=first, steps=len(stretch))
        calls = []
        for number, step in enumerate(stretch):
            for count in step:
                x = torch.randn(count, WIDTH, dtype=torch.float64)
                y, kept = link.forward(x)
                calls.append((x, y, kept, reached or number % 2 == 0))
        for x, y, kept, goes in reversed(calls):
            if goes:
                gradient = torch.randn_like(y)
                leaf = x.clone().requires_grad_()
                expected = nn.functional.linear(leaf, weight, bias)
                torch.testing.assert_close(y, expected)
                expected.backward(gradient)
                torch.testing.assert_close(link.backward(kept, gradient), leaf.grad)
    found = collector.gradients()
    assert (weight.grad is None) is ("weight" not in found)
    if weight.grad is not None:
        torch.testing.assert_close(found["weight"], weight.grad)
        torch.testing.assert_close(found["bias"], bias.grad)
    assert not collector.gradients()


def test_few_products_of_many_rows(monkeypatch):
    taken: list[int] = []
    plain = products.weight_gradient

    def noted(x: Tensor, gradient: Tensor) -> Tensor:
        taken.append(len(x))
        return plain(x, gradient)

    monkeypatch.setattr(products, "weight_gradient", noted)
    layer = layers.Linear(WIDTH, OUT, bias=False)
    collector = collector_of(layer, rows=16, capacity=50)
    (link,) = links_of(layer, collector)
    collector.record(50)
    kept = [link.forward(torch.randn(2, WIDTH))[1] for _ in range(25)]
    for each in reversed(kept):
        link.backward(each, torch.randn(2, OUT))
    assert taken == [16, 16, 16]
    collector.gradients()
    assert taken == [16, 16, 16, 2]


def test_nothing_is_kept_of_what_is_not_recorded():
    layer = layers.Linear(WIDTH, OUT)
    collector = collector_of(layer)
    (link,) = links_of(layer, collector)
    link.forward(torch.randn(3, WIDTH))
    assert not collector.gradients()


def test_sums_in_half_precision_are_taken_in_single():
    layer = layers.Linear(1, 1, bias=False).bfloat16()
    collector = collector_of(layer, rows=1, capacity=600)
    (link,) = links_of(layer, collector)
    collector.record(600)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    kept = [link.forward(one)[1] for _ in range(600)]
    for each in reversed(kept):
        link.backward(each, one)
    found = collector.gradients()["weight"]
    assert found.dtype is torch.float32
    assert float(found) == 600  # in bfloat16 256 + 1 is 256


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
def test_norms_of_queries_and_keys_as_one(heads: tuple[int, int]):
    norms = layers.HeadNorms(8, 1e-6).double()
    for each in norms.parameters():
        nn.init.normal_(each)
    x = torch.randn(3, 5, sum(heads), 8, dtype=torch.float64, requires_grad=True)
    query, key = x.split(heads, dim=2)
    expected = torch.cat([norms.query(query), norms.key(key)], dim=2)
    gradient = torch.randn_like(expected)
    reference = torch.autograd.grad(expected, [x, *norms.parameters()], gradient)
    collector = collector_of(norms, rows=4)
    standing_in(norms, collector)
    with collecting(collector):
        link = norms.both_link(collector, heads)
    assert link is not None
    y, kept = link.forward(x.detach())
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(link.backward(kept, gradient), reference[0])
    found = collector.gradients()
    torch.testing.assert_close([found["query.weight"], found["key.weight"]], list(reference[1:]))


MODULES = [
    lambda: layers.Linear(8, 8),
    lambda: layers.Linear(8, 8, bias=False),
    lambda: layers.RMSNorm(8, 1e-6),
    lambda: layers.RMSNorm(8, 1e-6, learned=False),
    lambda: layers.LayerNorm(8, eps=1e-5),
    lambda: layers.SwiGLU(8, 16),
    lambda: layers.SwiGLU(8, 16, bias=True),
    lambda: layers.MLP(8, 16, "gelu"),
    lambda: layers.MLP(8, 16, "relu2", bias=True),
]


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("shape", [(3, 1, 8), (2, 5, 8)])
def test_layers_as_links(make, onto: bool, shape: tuple[int, ...]):
    module = make().double()
    for each in module.parameters():
        nn.init.normal_(each)
    x, base = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    names = [name for name, _ in module.named_parameters()]
    expected = module(x) + base if onto else module(x)
    gradient = torch.randn_like(expected)
    leaves = [x, *([base] if onto else []), *module.parameters()]
    reference = torch.autograd.grad(expected, leaves, gradient)
    collector = collector_of(module)
    found_links = links_of(module, collector)
    collector.record(x[..., 0].numel())
    y = links.run(x, found_links, base if onto else None)
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y, leaves[: 1 + onto], gradient)
    by_name = collector.gradients()
    torch.testing.assert_close([*found, *(by_name[name] for name in names)], list(reference))
    with torch.no_grad():
        torch.testing.assert_close(links.run(x, found_links, base if onto else None), expected)


def test_stand_ins_that_a_graph_holds():
    """They alone are left when the collector lets go; what nobody read, or a layer collected, is freed."""
    module = nn.ModuleDict({"collected": layers.Linear(4, 4), "plain": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
    collector = collector_of(module)
    standing_in(module, collector)
    collector.record(3)
    with collecting(collector):
        y = module["collected"](module["plain"](torch.randn(3, 4)))
    references = {name: weakref.ref(leaf) for name, leaf in collector.leaves.items()}
    for each in module.values():
        for name in ("weight", "bias"):
            delattr(each, name)
    held = collector.let_go()
    assert held.keys() == {"plain.weight", "plain.bias"}
    assert {name for name, each in references.items() if each() is not None} == held.keys()
    gradients = torch.autograd.grad(y.sum(), list(held.values()))
    assert all(bool(each.any()) for each in gradients)


def test_changes_are_noticed():
    layer = layers.Linear(WIDTH, OUT)
    collector = collector_of(layer)
    collector.check_unchanged()
    layer.weight.data = layer.weight.data.clone()  # as sharding does
    collector.check_unchanged()
    with torch.no_grad():
        layer.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place between forward and backward .*: bias"):
        collector.check_unchanged()


def test_parameters_are_read_anew():
    """A sharded parameter may lie elsewhere in backward."""
    layer = layers.Linear(WIDTH, OUT, bias=False)
    collector = collector_of(layer)
    parameter = layer.weight
    (link,) = links_of(layer, collector)
    collector.record(2)
    _, kept = link.forward(torch.randn(2, WIDTH))
    collector.close()
    assert not collector.leaves
    whole = parameter.data.clone()
    parameter.data = torch.empty(0)
    parameter.data = whole
    gradient = torch.randn(2, OUT)
    torch.testing.assert_close(link.backward(kept, gradient), gradient @ whole)


def test_current():
    collector = collector_of(nn.Linear(2, 2))
    assert current() is None
    assert links.collected(nn.Linear(2, 2)) is None
    with collecting(collector):
        assert current() is collector
    with pytest.raises(ZeroDivisionError), collecting(collector):
        fail()
    assert current() is None


def fail() -> None:
    raise ZeroDivisionError


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_no_cycles():
    layer = layers.SwiGLU(8, 16, bias=True)
    collector = collector_of(layer)
    found = links_of(layer, collector)
    collector.record(3)
    y = links.run(torch.randn(1, 3, 8, requires_grad=True), found)
    references = [weakref.ref(collector), weakref.ref(found[0]), weakref.ref(y)]
    del collector, found, y
    assert [each() for each in references] == [None] * 3
