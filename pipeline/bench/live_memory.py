"""Counts the bytes of live tensors, operation by operation: exact on any device, the CPU too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While active, follows every storage that an operation makes until it is freed.

    Attributes:
        live: bytes alive now, of those made since it was entered.
        peak: most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}
        self._changes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it returned."""
        before = {id_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and id_of(each) not in before:
                self._follow(each)
        return out

    def _follow(self, tensor: Tensor) -> None:
        key = id_of(tensor)
        if key in self._known:
            return
        holder = tensor if tensor.is_mkldnn else tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size() if tensor.is_mkldnn else tensor.untyped_storage().nbytes()
        number = self._known[key] = len(self._changes)
        self._changes.append((number, size))
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(holder, self._forget, key, number, size)

    def _forget(self, key: int, number: int, size: int) -> None:
        if self._known.get(key) == number:
            del self._known[key]
        self._changes.append((number, -size))
        self.live -= size

    def peak_without(self, tensors: Iterable[Tensor]) -> int:
        """Return the most bytes alive at once, of all storages but those of tensors that are alive now."""
        left_out = {self._known.get(id_of(each)) for each in tensors}
        live = peak = 0
        for number, change in self._changes:
            if number not in left_out:
                live += change
                peak = max(peak, live)
        return peak


def id_of(tensor: Tensor) -> int:
    """Return what tells one storage from another; a weight in oneDNN's own layout has none, and stands for itself."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata
