"""Runs the code of a training step without its arithmetic, and follows every tensor that it makes.

Results are set aside and never written, so that they take addresses and no memory, whatever their size, and a billion
parameters are as quick as a thousand. What hangs on values (borders of documents, positions) is made of integers, and
small tensors of integers are computed. So memory is that of the code itself: when the code changes, so does the plan.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST_COMPUTED = 1 << 22
"""Integers of more elements than this are not computed."""
LARGE = 1 << 28
"""Bytes from which on a result gets addresses of its own, without a promise of memory."""
UNRESERVED: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
META = torch.device("meta")
PARTS = {
    "models/loop_memory.py": "keys and values of the loop",
    "models/collector.py": "rows for weight gradients",
    "training/chunked_loss.py": "logits and loss",
    "evaluation/loss.py": "logits and loss",
    "training/optimizers.py": "optimizer",
    "training/muon.py": "optimizer",
}
"""What tensors are for, by the innermost module that makes them; all else are activations."""
DEEPEST = 8
"""Calls that are looked through for the module that makes a tensor."""


class Kind(Enum):
    """What an operation does to memory."""

    VIEW = auto()
    """It makes no tensor, or another view of one."""
    IN_PLACE = auto()
    """It writes to its first argument and returns that."""
    OUT = auto()
    """It writes to its last argument and returns that."""
    SILENT = auto()
    """It writes to arguments and returns nothing."""
    FRESH = auto()
    """It makes new tensors."""


VIEWS = {"aten::_unsafe_view", "aten::unsqueeze_", "aten::squeeze_", "aten::transpose_", "aten::t_", "aten::lift_fresh"}


def kind_of(operation: Any) -> Kind:
    """Return what an operation does to memory, by its schema."""
    schema = operation._schema
    if schema.name in VIEWS:
        return Kind.VIEW
    writes = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    if not schema.returns:
        return Kind.SILENT if any(writes) else Kind.VIEW
    returned = [each.alias_info for each in schema.returns]
    if all(each is None for each in returned):
        return Kind.FRESH if any("Tensor" in str(each.type) for each in schema.returns) else Kind.VIEW
    if len(returned) == 1 and returned[0] is not None and returned[0].is_write:
        return Kind.IN_PLACE if writes[0] else Kind.OUT
    return Kind.OUT if any(each is not None and each.is_write for each in returned) else Kind.VIEW


@dataclass
class Stretch:
    """Operations of one phase, one after the other.

    Attributes:
        phase: its name.
        entry: bytes alive before the first, by what they were for.
        peak: the same when most were alive.
        most: the most bytes alive at once.
    """

    phase: str
    entry: dict[str, int]
    peak: dict[str, int] = field(default_factory=dict)
    most: int = 0


class DryRun(TorchDispatchMode):
    """While active, operations on floating-point tensors are not computed; see the module.

    Attributes:
        live: bytes alive now.
        stretches: what a step has been through.
        phase: what a step is going through, set by whoever runs it.
        backward: likewise, whether it is backward.
        cuda: choose attention as on a GPU.
    """

    def __init__(self, *, cuda: bool = False) -> None:
        super().__init__()
        self.live = 0
        self.stretches: list[Stretch] = []
        self.phase, self.backward = "passes", False
        self.cuda = cuda
        self._parts: dict[str, int] = {}
        self._known: dict[int, tuple[Any, str, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what it spares is no concern here, and costs as much as all of this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Set the results of an operation aside, and follow them."""
        kind = _KINDS.get(func)
        if kind is None:
            kind = _KINDS[func] = kind_of(func)
        kwargs = kwargs or {}
        if kind is Kind.VIEW:
            if func is _ATTENTION_CHOICE and self.cuda:
                return cuda_attention(*args, **kwargs)
            return func(*args, **kwargs)
        if computed(args) and computed(kwargs.values()):
            out = func(*args, **kwargs)
        elif kind is Kind.IN_PLACE:
            return args[0]
        elif kind is Kind.OUT:
            return kwargs[func._schema.arguments[-1].name] if kwargs else args[-1]
        elif kind is Kind.SILENT:
            return None
        else:
            out = self._set_aside(func, args, kwargs)
        if type(out) is Tensor:
            self._follow(out)
        elif isinstance(out, list | tuple):
            for each in out:
                if type(each) is Tensor:
                    self._follow(each)
        return out

    def _set_aside(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return results of the right shapes."""
        key = (func, identity(args), identity(tuple(kwargs.items())) if kwargs else None)
        found = _SHAPES.get(key)
        if found is None:
            found = _SHAPES[key] = shapes(func, args, kwargs)
        return filled_in(found)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        part = self._part()
        phase = f"{self.phase}, backward" if self.backward else self.phase
        if not self.stretches or self.stretches[-1].phase != phase:
            self.stretches.append(Stretch(phase, self._parts.copy()))
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), part, size
        self.live += size
        self._parts[part] = self._parts.get(part, 0) + size
        stretch = self.stretches[-1]
        if self.live > stretch.most:
            stretch.most, stretch.peak = self.live, self._parts.copy()

    def _part(self) -> str:
        """Return what a tensor is for that is made now."""
        frame: FrameType | None = sys._getframe(3)
        for _ in range(DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            if code not in _PLACES:
                _PLACES[code] = PARTS.get(code.co_filename.replace("\\", "/").rpartition("pipeline/")[2])
            found = _PLACES[code]
            if found is not None:
                return found
            frame = frame.f_back
        return "temporaries of backward" if self.backward else "activations"

    @contextmanager
    def going_through(self, phase: str) -> Iterator[None]:
        """Set the phase for a while."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def _forget(self, key: int) -> None:
        _, part, size = self._known.pop(key)
        self.live -= size
        self._parts[part] -= size

    def rename(self, tensor: Tensor, part: str) -> None:
        """Say what a tensor is for."""
        key = tensor.untyped_storage()._cdata
        if key in self._known:
            reference, before, size = self._known[key]
            self._known[key] = reference, part, size
            peak = self.stretches[-1].peak if self.stretches else {}
            for parts in (self._parts, peak) if self.live == sum(peak.values()) else (self._parts,):
                parts[before] -= size
                parts[part] = parts.get(part, 0) + size

    def bytes_of(self, part: str) -> int:
        """Return the bytes alive now that are for something."""
        return self._parts.get(part, 0)

    def begin_again(self) -> None:
        """Forget what has been so far."""
        self.stretches = []


def computed(values: Any) -> bool:
    """Return whether arguments are such that their operation is computed: no numbers with a point, and not too many."""
    for each in values:
        if isinstance(each, Tensor):
            if each.is_floating_point() or each.numel() > LARGEST_COMPUTED:
                return False
        elif isinstance(each, list | tuple):
            if not computed(each):
                return False
        elif type(each) is torch.dtype and each.is_floating_point:
            return False
    return True


def identity(value: Any) -> Any:
    """Return what an operation's results look like hangs on, to be looked up by."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([identity(each) for each in value])
    return type(value), value  # True is not 1


def shapes(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation's results look like, by running it on the meta device."""
    if func is _REORDER:
        out: Any = args[0].to(META)
    else:
        moved = {name: to_meta(each) for name, each in kwargs.items()}
        if moved.get("device") is not None:
            moved["device"] = META
        names = {each.name for each in func._schema.arguments}
        if "device" in names and not any(isinstance(each, Tensor) for each in args):
            moved["device"] = META
        out = func(*to_meta(args), **moved)
    return looks(out)


def to_meta(value: Any) -> Any:
    """Return arguments with their tensors on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, list | tuple):
        return type(value)([to_meta(each) for each in value])
    return value


@dataclass(frozen=True)
class Look:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def looks(out: Any) -> Any:
    """Return results as ``Look``s."""
    if isinstance(out, Tensor):
        return Look(tuple(out.shape), out.stride(), out.dtype)
    if isinstance(out, list | tuple):
        return tuple([looks(each) for each in out])
    return out


def filled_in(found: Any) -> Any:
    """Return tensors that look as they should."""
    if type(found) is Look:
        last = sum((count - 1) * step for count, step in zip(found.shape, found.stride, strict=True))
        size = (last + 1) * found.dtype.itemsize
        if size < LARGE or 0 in found.shape:
            return torch.empty_strided(found.shape, found.stride, dtype=found.dtype)
        # The system may refuse to promise so much at once, unless it is told that nothing need be kept ready.
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED)
        return torch.frombuffer(room, dtype=found.dtype).as_strided(found.shape, found.stride)
    if type(found) is tuple:
        return tuple([filled_in(each) for each in found])
    return found


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Return the kernel that torch takes for attention on a GPU: 1 flash, 2 memory-efficient, 0 none of them."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    if half and attn_mask is None and query.shape[-1] <= 256:
        return 1
    return 0 if enable_gqa else 2


_KINDS: dict[Any, Kind] = {}
_SHAPES: dict[Any, Any] = {}
_PLACES: dict[CodeType, str | None] = {}
_ATTENTION_CHOICE = torch.ops.aten._fused_sdp_choice.default
_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_REORDER = None if _reorder is None else _reorder.default


@contextmanager
def calls_mark(run: DryRun, owner: Any, name: str, phase: str) -> Iterator[None]:
    """Let calls of a method or function be a phase of their own."""
    plain = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with run.going_through(phase):
            return plain(*args, **kwargs)

    setattr(owner, name, marked)
    try:
        yield
    finally:
        setattr(owner, name, plain)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Let torch's own products be taken, as on a GPU, though tensors lie on the CPU."""
    from pipeline.models import products

    before = products.LEAST_WORK, products.LEAST_HELD
    products.LEAST_WORK = products.LEAST_HELD = sys.maxsize
    try:
        yield
    finally:
        products.LEAST_WORK, products.LEAST_HELD = before
