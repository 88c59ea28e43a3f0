"""Attention by one call each way equals the two links that it is made of."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.models.attending import MOST_QUERIES, attending
from pipeline.models.collector import CollectedHeads, CollectedWeight
from pipeline.models.inputs import Visibility
from pipeline.models.kernels import Kernels, compiled
from pipeline.models.links import HeadsLink, QueriesLink, RMSNormLink, RotationLink, return_through, run_links
from pipeline.models.loop_memory import KEPT_KEYS, AttentionLink, LoopLayer, LoopMemory, SelfAttentionLink, Span

ROWS, KV_HEADS, WIDTH, TILE = 3, 2, 6, 4


@dataclass(frozen=True)
class Case:
    """One attention.

    Attributes:
        n: positions.
        group: heads of queries for each of keys.
        first: oldest slot seen.
        begin: oldest slot of the positions' own.
        live: oldest slot whose keys and values are no constants.
        norm: QK-norm: of its own for every head, one for all, or none.
        mask: rows of a mask; None for none.
        causal: the positions see themselves, and those before.
        tables: rows of the rotation's tables.
        own: keys and values are the positions' own too.
        dropout: share of the attention weights set to zero.
        dtype: dtype of all.
    """

    n: int = 1
    group: int = 1
    first: int = 2
    begin: int = 10
    live: int = 2
    norm: str | None = "each"
    mask: int | None = None
    causal: bool = False
    tables: int = 1
    own: bool = True
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64

    @property
    def stop(self) -> int:
        return self.begin + self.n

    @property
    def heads(self) -> int:
        return self.group * KV_HEADS


CASES = {
    "one position": Case(),
    "its first": Case(first=0, begin=0, live=0),
    "single precision": Case(dtype=torch.float32),
    "several positions": Case(n=3, group=2, mask=ROWS),
    "one mask for all rows": Case(n=3, mask=1, tables=ROWS),
    "a first chunk": Case(n=4, first=0, begin=0, live=0, causal=True),
    "no norm": Case(norm=None, group=2),
    "most queries": Case(n=MOST_QUERIES // 2, group=2, mask=ROWS),
    "many keys": Case(first=0, begin=KEPT_KEYS + 3, live=0, mask=ROWS),
    "constants before": Case(live=7),
    "others' keys": Case(own=False, norm="shared"),
    "others' keys, grouped": Case(own=False, norm="shared", n=3, group=2, mask=1),
    "others' keys, no norm": Case(own=False, norm=None, first=0),
    "many of others' keys": Case(own=False, norm="shared", first=0, begin=2 * KEPT_KEYS),
}


class Side:
    """One way to take a case, with all that it adds to."""

    def __init__(self, case: Case, kernels: Kernels | None) -> None:
        generator = torch.Generator().manual_seed(len(str(case)))

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=case.dtype, generator=generator)

        self.case = case
        slots = case.stop + 3
        weights = [CollectedWeight(nn.Parameter(draw(WIDTH)), 8) for _ in range(2)]
        self.norms: Any = {None: None, "shared": weights[0]}.get(case.norm)
        if case.norm == "each":
            self.norms = CollectedHeads(weights[0], weights[1], (case.heads, KV_HEADS), 8)
        self.weights = weights
        norm = [] if self.norms is None else [RMSNormLink(self.norms, WIDTH, 1e-3, kernels)]
        angle = draw(case.tables, case.n, 1, WIDTH // 2)
        rotation = RotationLink(*(torch.cat([each, each], dim=-1) for each in (angle.cos(), angle.sin())))
        mask = None
        if case.mask is not None:
            mask = torch.rand(case.mask, 1, case.n, case.stop - case.first, generator=generator) < 0.6
            mask[..., -1] = True
        visible = Visibility(mask, causal=case.causal)
        span = Span(case.first, case.live, case.begin, case.stop)
        keys, values = draw(ROWS * KV_HEADS, slots, WIDTH), draw(ROWS * KV_HEADS, slots, WIDTH)
        if case.own:
            memory = LoopMemory(torch.arange(slots)[None], None, gaps=False, tile=TILE)
            self.layer = memory.layer(0, draw(ROWS, case.n, KV_HEADS, WIDTH))
            self.layer.keys.copy_(keys)
            self.layer.values.copy_(values)
            link: AttentionLink = SelfAttentionLink(memory, 0, span, visible, case.dropout)
            heads: Any = HeadsLink((case.heads, KV_HEADS), WIDTH, norm, rotation)
        else:
            self.layer = LoopLayer(keys, values, TILE)
            link = AttentionLink(self.layer, span, visible, case.dropout)
            heads = QueriesLink(WIDTH, norm, rotation)
        self.layer.key_gradients.copy_(draw(*keys.shape))  # what later steps have added
        self.layer.value_gradients.copy_(draw(*keys.shape))
        self.links = attending(heads, link, kernels)
        self.x = draw(ROWS, case.n, (case.heads + (2 * KV_HEADS if case.own else 0)) * WIDTH)
        self.gradient = draw(ROWS, case.n, case.heads * WIDTH)

    def taken(self) -> list[Tensor]:
        """Go forward and backward; return all that came of it."""
        y, kept = run_links(self.x, self.links)
        of_x = return_through(self.links, kept, self.gradient)
        self.layer.take()
        found = [y, of_x, self.layer.keys, self.layer.values, self.layer.key_gradients, self.layer.value_gradients]
        if self.case.norm == "each":
            self.norms.take()
        if self.case.norm is not None:
            gradients = [weight.gradient() for weight in self.weights]
            found += [each for each in gradients if each is not None]
        return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_its_parts(name: str, threads: int, monkeypatch):
    kernels = compiled()
    monkeypatch.setattr(kernels, "threads", threads)
    expected = Side(CASES[name], None).taken()
    for parts in (HeadsLink, QueriesLink):
        monkeypatch.delattr(parts, "forward")
    found = Side(CASES[name], kernels).taken()
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "case",
    [
        Case(n=MOST_QUERIES + 1, mask=1),
        Case(dropout=0.5),
        Case(dtype=torch.bfloat16),
        Case(own=False, norm=None, n=MOST_QUERIES, group=2),
    ],
)
def test_the_rest_goes_through_its_parts(case: Case, monkeypatch):
    for name in ("attend", "attend_back"):
        monkeypatch.delattr(Kernels, name)
    found, expected = Side(case, compiled()), Side(case, None)
    torch.manual_seed(0)
    parts = expected.taken()
    torch.manual_seed(0)
    for one, other in zip(found.taken(), parts, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [10.0, 1e3, 1e12])
def test_what_is_unseen_weighs_nothing(dtype: torch.dtype, size: float):
    """However far its score lies above all that are seen."""
    sides = [Side(Case(n=3, own=False, norm=None, mask=1, dtype=dtype), kernels) for kernels in (compiled(), None)]
    for side in sides:
        mask = side.links[0]._attention.visible.mask if len(side.links) == 1 else side.links[1].visible.mask
        mask[:] = True
        mask[..., 1] = False
        side.layer.keys[:, side.case.first + 1] = size * side.x.view(ROWS, 3, KV_HEADS, WIDTH)[:, 0].flatten(0, 1)
    torch.testing.assert_close(*(side.taken() for side in sides))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "keys", "gradient"])
def test_what_is_not_finite_stays_so(bad: float, where: str):
    side = Side(Case(dtype=torch.float32), compiled())
    tensor = side.layer.keys.view(ROWS, -1) if where == "keys" else getattr(side, where)
    tensor[0].fill_(bad)
    y, of_x, *_ = side.taken()
    assert where == "gradient" or not y[0].isfinite().any()
    assert not of_x[0].isfinite().all()
    assert y[1:].isfinite().all()
    assert of_x[1:].isfinite().all()
