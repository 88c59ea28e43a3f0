"""A model's weights while they stay as they are: put once into the layout that products of few rows read fastest."""

from __future__ import annotations

from pipeline.models import Architecture
from pipeline.models.collector import Collector


class HeldWeights(Collector):
    """Stands in for a model's parameters in inference, as a ``Collector`` does while a loop is trained.

    Layers take the same chains as there (``links``); nothing is put aside, since nothing goes backward. In float32 on a
    CPU a second copy of every weight is held that a product reads. Later changes of the weights are not seen.
    """

    def __init__(self, model: Architecture) -> None:
        super().__init__({}, rows=0, capacity=0)
        # Without gradients nothing need stand in for the parameters: they are found as they are.
        self._parameters = dict(model.named_parameters())
        self._names = {id(each): name for name, each in self._parameters.items()}
