"""Attention outside autograd, as a link of a chain (``links``): inference takes the chains of loops in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipeline.models.inputs import Visibility


@dataclass(frozen=True)
class Attention:
    """Attention of one layer.

    Attributes:
        attend: of queries, and keys and values if they are the step's own, what they see, and dropout.
    """

    attend: Callable[..., Tensor]

    def __call__(self, *args: Any) -> Tensor:
        """Attend."""
        return self.attend(*args)

    @property
    def link(self) -> Callable[[Visibility, float], AttentionLink] | None:
        """What makes it a link; None under autograd."""
        return None if torch.is_grad_enabled() else self._link

    def _link(self, visible: Visibility, dropout: float) -> AttentionLink:
        return AttentionLink(self.attend, visible, dropout)


class AttentionLink:
    """Attention as a ``links.Link`` that goes forward only.

    Args:
        attend: see ``Attention``.
        visible: what queries see.
        dropout: share of the attention weights set to zero.
    """

    def __init__(self, attend: Callable[..., Tensor], visible: Visibility, dropout: float) -> None:
        self._attend, self._visible, self._dropout = attend, visible, dropout

    def forward(self, x: Any, out: Tensor | None = None) -> tuple[Tensor, None]:
        """Map queries [rows, n, heads, head_dim], or a tuple of queries, keys and values, to [rows, n, width]."""
        given = x if isinstance(x, tuple) else (x,)
        return self._attend(*given, self._visible, self._dropout).flatten(2), None

    def backward(self, kept: Any, gradient: Any, out: Tensor | None = None) -> NoReturn:
        """Refuse: nothing was kept."""
        raise RuntimeError("attention in inference has no backward")
