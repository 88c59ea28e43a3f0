"""Parameters that an optimiser leaves alone in some steps: what no gradient reaches while nothing is fed back.

Neither decay nor moments move them then, under any strategy. ZeRO gives every weight a gradient, be it zero, so that a
missing one cannot say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class AdamW(torch.optim.AdamW):
    """torch's, which leaves sleeping groups alone."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the groups that are awake; see ``torch.optim.AdamW.step``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()  # which may say who sleeps
        groups = self.param_groups
        self.param_groups = awake(groups)
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss


def awake(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups that an optimiser is to update in this step."""
    return [group for group in groups if not group.get("asleep")]


def put_to_sleep(optimizer: Optimizer, asleep: bool) -> None:
    """Let the optimiser leave its dormant groups alone, or wake them."""
    for group in optimizer.param_groups:
        if group["dormant"]:
            group["asleep"] = asleep
