"""Muon for some parameters and AdamW for the others, as one optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.training.sleeping import awake


class MuonWithAdamW(Optimizer):
    """Both of torch's optimisers behind one ``step``, with one state; Lightning's automatic optimisation wants that.

    Muon is to see every matrix by itself, and some weights pack several, one below the other. So at each step it is
    handed views of rows: of the weights, of their gradients and of the momentum, which is kept whole as the state of
    the whole weight. Views of one step never go stale: nothing lasts but the weights and their state.

    Args:
        muon: over the matrices; gives its groups and settings.
        adamw: over the rest, likewise.
        packed: rows of each of the matrices that a weight packs; a weight that is missing here is one matrix.
    """

    def __init__(
        self,
        muon: torch.optim.Muon,
        adamw: torch.optim.AdamW,
        packed: Mapping[Tensor, tuple[int, ...]],
    ) -> None:
        self._muon, self._adamw, self._packed = muon, adamw, packed
        self._muon_groups = len(muon.param_groups)
        for parameter, rows in packed.items():
            if sum(rows) != len(parameter):
                raise ValueError(f"parts of {rows} rows in a weight of {len(parameter)}")
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        # As torch's fused optimisers have it: where this scalar is 1, a step changes nothing.
        self.found_inf: Tensor | None = None
        self._step_supports_amp_scaling = getattr(adamw, "_step_supports_amp_scaling", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what ``closure``, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Groups and state are looked up anew: loading a state puts others in their place.
        self._step_muon(awake(self.param_groups[: self._muon_groups]))
        self._adamw.param_groups, self._adamw.state = self.param_groups[self._muon_groups :], self.state
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        return loss

    def _step_muon(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if self.found_inf is None:
                self._step_matrices(group, parameters)
                continue
            for parameter in parameters:  # one by one, since weight and momentum are held twice meanwhile
                self._matrices(parameter, parameter.grad)
                touched = [parameter, self.state[parameter]["momentum_buffer"]]
                before = [each.clone() for each in touched]
                self._step_matrices(group, [parameter])
                for new, old in zip(touched, before, strict=True):
                    new.copy_(torch.where(self.found_inf > 0, old, new))
        self._muon.param_groups = []  # or the gradients would outlive ``zero_grad``

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters of a group that have a gradient."""
        views: dict[Tensor, dict[str, Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            views.update(self._matrices(parameter, parameter.grad))
        self._muon.param_groups = [{**group, "params": list(views)}]
        self._muon.state.update(views)
        self._muon.step()
        self._muon.state.clear()

    def _matrices(self, parameter: Tensor, gradient: Tensor) -> dict[Tensor, dict[str, Tensor]]:
        """Return the matrices of a weight as views that have their gradients, and Muon's state of each."""
        kept = self.state[parameter]
        if "momentum_buffer" not in kept:
            kept["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        rows = self._packed.get(parameter, (len(parameter),))
        views = {}
        for view, part, momentum in zip(
            parameter.detach().split(rows), gradient.split(rows), kept["momentum_buffer"].split(rows), strict=True
        ):
            view.grad = part
            views[view] = {"momentum_buffer": momentum}
        return views
