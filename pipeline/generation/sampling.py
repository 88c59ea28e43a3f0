"""From logits to a token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the k likeliest; 0 among all.
        top_p: draw among the likeliest tokens whose probabilities add up to p (Holtzman et al. 2020); 1 among all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError on values out of range."""
        if not (self.temperature == 0 or 1e-4 <= self.temperature < math.inf):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 (the likeliest token) or at least 0.0001"
            )
        if self.top_k < 0:
            raise ConfigError(f"top-k is {self.top_k}; it must be at least 0 (0 for no limit)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p is {self.top_p}; it must be above 0 and at most 1 (1 for no limit)")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities to draw from, float32 [rows, V], for logits [rows, V]."""
        logits = logits.float()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p < 1:
            ordered, places = probabilities.sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered  # mass of the likelier ones; the likeliest always stays
            ordered = ordered.masked_fill(before >= self.top_p, 0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, places, ordered)
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities

    def draw(self, logits: Tensor, chances: Tensor) -> Tensor:
        """Draw a token for each row, int64 [rows], on the device of the logits and without a wait for it.

        Args:
            logits: [rows, V].
            chances: uniform numbers from 0 to 1, float64 [rows] (``uniforms``): the same ones draw the same tokens.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        reached = self.probabilities(logits).cumsum(dim=-1, dtype=torch.float64)
        place = torch.searchsorted(reached, chances[:, None] * reached[:, -1:], right=True)[:, 0]
        return place.clamp(max=logits.shape[-1] - 1)  # a product that was rounded up to the whole


def uniforms(count: int, rows: int, seed: int) -> Tensor:
    """Return uniform numbers from 0 to 1, float64 [count, rows], on the CPU, so that all devices draw alike.

    The first of them are the same whatever ``count`` is.
    """
    return torch.rand(count, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
