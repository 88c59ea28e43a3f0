"""What is fed back to positions: states of earlier ones, or nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Feedback:
    """States fed back to some positions.

    Attributes:
        states: [rows or 1, n, d], or [rows or 1, 1, d] for one that all positions share.
        fed: bool [rows or 1, n or 1, 1], False where a position is fed nothing and is computed as in a plain pass;
            None: all are fed.
    """

    states: Tensor
    fed: Tensor | None = None

    def where(self, mask: Tensor, other: Feedback) -> Feedback:
        """Return ``self`` where ``mask`` (bool [rows, n or 1]) is True, ``other`` elsewhere."""
        mask = mask[..., None]
        states = torch.where(mask, self.states, other.states)
        if self.fed is None and other.fed is None:
            return Feedback(states)
        return Feedback(states, torch.where(mask, self._fed(mask), other._fed(mask)))

    def only(self, mask: Tensor) -> Feedback:
        """Return the same, with nothing fed where ``mask`` (bool [rows or 1, n or 1]) is False."""
        mask = mask[..., None]
        return replace(self, fed=mask if self.fed is None else self.fed & mask)

    def detached(self) -> Feedback:
        """Return the same outside autograd's graph."""
        return replace(self, states=self.states.detach())

    def cut(self, start: int) -> Feedback:
        """Return what is fed to the positions from ``start`` on."""
        states, fed = (
            each[:, start:] if each is not None and each.shape[1] > 1 else each for each in (self.states, self.fed)
        )
        assert states is not None
        return Feedback(states.contiguous(), fed)  # a product with a strided batch is taken row by row

    def choose(self, fed: Tensor, plain: Tensor) -> Tensor:
        """Return ``fed`` [rows, n, ...] where states are fed, ``plain`` elsewhere."""
        return fed if self.fed is None else torch.where(self.fed, fed, plain)

    def _fed(self, like: Tensor) -> Tensor:
        return torch.ones_like(like[:1, :1]) if self.fed is None else self.fed
