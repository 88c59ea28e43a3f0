"""Small agreements between ranks; without a process group each is the identity."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import UserError

T = TypeVar("T")

_host_group: tuple[Any, dist.ProcessGroup] | None = None


def is_first() -> bool:
    """Return whether this is rank 0, also before the process group exists (then as the launcher's variables say)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    # torchrun sets RANK; Lightning's own launcher NODE_RANK and LOCAL_RANK; srun SLURM_PROCID, which also stands, as 0,
    # in everything that a batch script starts without srun, and so must come last.
    for names in (("RANK",), ("NODE_RANK", "LOCAL_RANK"), ("SLURM_PROCID",)):
        found = [os.environ[name] for name in names if name in os.environ]
        if found:
            return set(found) == {"0"}
    return True


def lost_peer(error: BaseException) -> bool:
    """Return whether a collective, or the meeting of ranks, failed because another rank is gone or does not answer."""
    if dist.is_available() and isinstance(error, dist.DistError):
        return True
    signs = ("closed by peer", "connection reset", "gloo", "nccl")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


def leave() -> None:
    """Destroy the process groups, at the end of a run; nothing is left of them.

    Gloo's threads hold the tensors of their last collective for a moment after all ranks have its result. A process
    that ends within that moment is aborted: to let go of a tensor takes Python's lock, which is closed by then. A group
    that is destroyed waits for its threads, but only when nobody refers to it any more.
    """
    global _host_group
    _host_group = None
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # modules that reduce gradients refer to themselves, and to their group
        dist.destroy_process_group()


def group() -> bool:
    """Return whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return this rank's number."""
    return dist.get_rank() if group() else 0


def ranks() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if group() else 1


def gathered(value: T) -> list[T]:
    """Return every rank's value of a small plain object, by rank."""
    if not group():
        return [value]
    found: list[Any] = [None] * ranks()
    dist.all_gather_object(found, value)
    return found


def total(tensor: Tensor) -> Tensor:
    """Return the sum over ranks."""
    return _reduced(tensor, dist.ReduceOp.SUM) if group() else tensor


def mean(tensor: Tensor) -> Tensor:
    """Return the mean over ranks."""
    return total(tensor) / dist.get_world_size() if group() else tensor


def smallest(tensor: Tensor) -> Tensor:
    """Return the minimum over ranks."""
    return _reduced(tensor, dist.ReduceOp.MIN) if group() else tensor


def largest(number: int) -> int:
    """Return the largest of the ranks' numbers, so that all act on what one has seen; no rank waits for its device."""
    if not group():
        return number
    result = torch.tensor(number)
    dist.all_reduce(result, op=dist.ReduceOp.MAX, group=host_group())
    return int(result)


def host_group() -> dist.ProcessGroup:
    """Return a group of all ranks that talk from host to host, made at the first call."""
    global _host_group
    world = dist.group.WORLD
    if _host_group is None or _host_group[0] is not world:
        _host_group = world, dist.new_group(backend="gloo")
    return _host_group[1]


def from_first(value: T) -> T:
    """Return rank 0's value of a small plain object."""
    if not group():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def first_decides(decide: Callable[[], T]) -> T:
    """Return what ``decide`` returns on rank 0, or raise the UserError that it raises there, on every rank."""
    outcome: tuple[T | None, UserError | None] = (None, None)
    if is_first():
        try:
            outcome = (decide(), None)
        except UserError as error:
            outcome = (None, error)
    value, refusal = from_first(outcome)
    if refusal is not None:
        raise refusal
    return value  # type: ignore[return-value]


def _reduced(tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    result = tensor.clone()
    dist.all_reduce(result, op=how)
    return result
