"""Counts the bytes of live tensors, operation by operation: exact on any device, the CPU too."""

from __future__ import annotations

import weakref
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
        self._known: set[int] = set()

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
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(holder, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def id_of(tensor: Tensor) -> int:
    """Return what tells one storage from another; a weight in oneDNN's own layout has none, and stands for itself."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata
