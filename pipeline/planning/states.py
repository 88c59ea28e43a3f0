"""Bytes of weights, masters, moments, gradients and buffers on each rank, for each strategy.

Read off from what the strategies allocate (torch's DistributedDataParallel; DeepSpeed 0.19.8, runtime/zero/
stage_1_and_2.py, stage3.py and partition_parameters.py), paddings included; tests compare with real runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from pipeline.config import Config, MuonConfig
from pipeline.models import Architecture
from pipeline.planning.passes import Gradients
from pipeline.training import optimizers

FLOAT32 = 4
BUCKET = 50_000_000
"""Elements that ZeRO reduces at once, as ``training.strategies.deepspeed_options`` sets it."""
SUB_GROUP = 100_000_000
"""Elements that ZeRO-3 updates at once, likewise."""
SWAP_BUFFERS = 4
"""Sub-groups of states that DeepSpeed keeps room for in the host's memory when they lie on a disk."""

WEIGHTS, GRADIENTS = "weights", "gradients"
MASTERS = "float32 masters"
MOMENTS = "optimizer's moments"
BUCKETS = "gradient buckets"
GATHERED = "gathered weights"
UPDATE = "copies for the update"


@dataclass(frozen=True)
class Sizes:
    """Numbers of a model's parameters.

    Attributes:
        parameters: of each parameter.
        groups: of each trained parameter, by group of the optimiser.
        moments: numbers that the optimiser keeps of each, likewise: 2 a number for AdamW, 1 for Muon's matrices.
        largest_matrix: numbers of the largest matrix that Muon orthogonalises; 0 without Muon.
    """

    parameters: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    moments: tuple[int, ...]
    largest_matrix: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters)

    @property
    def trained(self) -> int:
        """Trained ones."""
        return sum(map(sum, self.groups))


@dataclass(frozen=True)
class States:
    """What a rank holds, in bytes, by what it is for.

    Attributes:
        device: all the time.
        in_pass: beside that during a pass.
        arriving: beside it from a pass's first gradient on.
        in_update: beside it during the optimiser's update.
        gather: twice in backward's first moment: weights, and what they are gathered through.
        gradients: what becomes of a pass's gradients (``passes.Case``).
        host: in the host's memory, a rank.
        disk: on its disk, a rank.
    """

    device: dict[str, int]
    in_pass: dict[str, int] = field(default_factory=dict)
    arriving: dict[str, int] = field(default_factory=dict)
    in_update: dict[str, int] = field(default_factory=dict)
    gather: int = 0
    gradients: Gradients = "fresh"
    host: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)


def sizes_of(config: Config, model: Architecture) -> Sizes:
    """Return the numbers of a model, which may be on the meta device, set up for training (``Solver.adapt``)."""
    built: Optimizer = optimizers.build(config.optimizer, model, config.learning_rate.peak)
    groups: list[dict[str, Any]] = built.param_groups
    muon = isinstance(config.optimizer, MuonConfig)
    matrices = [group for group in groups if muon and "momentum" in group and "betas" not in group]
    rows = optimizers.packed_matrices(model)
    largest = 0
    for group in matrices:
        for parameter in group["params"]:
            most = max(rows.get(parameter, (parameter.shape[0],)))
            largest = max(largest, most * parameter.shape[1])
    return Sizes(
        tuple(each.numel() for each in model.parameters()),
        tuple(tuple(each.numel() for each in group["params"]) for group in groups),
        tuple(1 if any(group is each for each in matrices) else 2 for group in groups),
        largest,
    )


def states(config: Config, sizes: Sizes, *, cuda: bool) -> States:
    """Return what a rank holds under the run's strategy, at the present number of ranks."""
    training = config.training
    if not training.zero_stage:
        return replicated(config, sizes)
    ranks = training.ranks
    return (sharded if training.zero_stage == 3 else divided)(config, sizes, ranks, cuda=cuda)


def moments_of(numbers: Sequence[int], kinds: Sequence[int]) -> int:
    """Return the bytes of the optimiser's moments of so many numbers in each group."""
    return sum(FLOAT32 * count * kind for count, kind in zip(numbers, kinds, strict=True))


def replicated(config: Config, sizes: Sizes) -> States:
    """Return the states of a single rank, or of replicas."""
    training = config.training
    counts = [sum(group) for group in sizes.groups]
    steps = FLOAT32 * sum(len(group) for group, kind in zip(sizes.groups, sizes.moments, strict=True) if kind == 2)
    device = {WEIGHTS: FLOAT32 * sizes.total, MOMENTS: moments_of(counts, sizes.moments) + steps}
    update = {UPDATE: muon_copies(sizes)} if sizes.largest_matrix else {}
    if training.strategy == "ddp" or training.ranks > 1:
        device[GRADIENTS] = FLOAT32 * sizes.trained  # DDP's buckets, of which gradients are views
        return States(device, in_update=update, gradients="taken")
    return States(
        device,
        in_update={GRADIENTS: FLOAT32 * sizes.trained, **update},
        gradients="fresh" if training.accumulation == 1 else "kept",
    )


def muon_copies(sizes: Sizes) -> int:
    """Return what Muon's update makes of the largest matrix: the average in float32, and five matrices in bfloat16."""
    return sizes.largest_matrix * (FLOAT32 + 5 * 2)


def divided(config: Config, sizes: Sizes, ranks: int, *, cuda: bool) -> States:
    """Return the states of ZeRO-1 and 2: weights whole, each group's padded and cut into equal parts."""
    training = config.training
    width = 2 if training.precision == "bf16" else FLOAT32
    padded = [-(-sum(group) // (2 * ranks)) * 2 * ranks for group in sizes.groups]
    parts = [count // ranks for count in padded]
    frozen = sizes.total - sizes.trained
    masters, moments = FLOAT32 * sum(parts), moments_of(parts, sizes.moments)
    device = {WEIGHTS: width * (sum(padded) + frozen)}
    arriving = {BUCKETS: bucket(config, sizes) * width * (2 if overlaps(config, cuda) else 1)}
    in_pass: dict[str, int] = {}
    own = width * sum(parts)
    if training.zero_stage == 2 and width < FLOAT32:
        own = FLOAT32 * sum(parts)  # accumulated in float32
    largest = FLOAT32 * max(parts)
    host: dict[str, int] = {}
    if training.offload_optimizer == "cpu":
        host = {MASTERS: masters, MOMENTS: moments, GRADIENTS: FLOAT32 * sum(parts), UPDATE: width * sum(parts)}
        if training.accumulation > 1:
            host[GRADIENTS] += width * sum(parts)
        biggest = width * max(sizes.parameters)
        host[UPDATE] += biggest
        device[BUCKETS] = biggest
    else:
        device.update({MASTERS: masters, MOMENTS: moments})
    if training.zero_stage == 2:
        if not host:
            (arriving if training.accumulation == 1 else in_pass)[GRADIENTS] = own
        update = {} if host else {GRADIENTS: own, UPDATE: largest}
        return States(device, in_pass, arriving, update, gradients="taken", host=host)
    update = {GRADIENTS: width * sizes.trained, **({} if host else {UPDATE: largest})}
    if training.accumulation > 1:  # the buckets of the first micro-batch stay until the last
        return States(device, arriving, {}, update, gradients="kept", host=host)
    return States(device, in_pass, arriving, update, gradients="fresh", host=host)


def sharded(config: Config, sizes: Sizes, ranks: int, *, cuda: bool) -> States:
    """Return the states of ZeRO-3: each parameter cut into equal parts, and gathered whole for a pass."""
    training = config.training
    width = 2 if training.precision == "bf16" else FLOAT32
    part = sum(-(-count // ranks) for count in sizes.parameters)
    groups = [sum(-(-count // ranks) for count in group) for group in sizes.groups]
    masters = FLOAT32 * sum(groups)  # of float32 weights too
    moments, gradients = moments_of(groups, sizes.moments), FLOAT32 * sum(groups)
    whole, at_once = width * sizes.total, min(SUB_GROUP, max(groups, default=0))
    device, host, disk = {BUCKETS: bucket(config, sizes) * width}, dict[str, int](), dict[str, int]()
    places = {"none": device, "cpu": host, "nvme": disk}
    place = places[training.offload_parameters]
    place[WEIGHTS] = width * part
    place = places[training.offload_optimizer]
    place[MASTERS], place[MOMENTS] = masters, moments
    (device if training.offload_optimizer == "none" else host)[GRADIENTS] = gradients
    if training.offload_optimizer == "nvme":
        host[UPDATE] = SWAP_BUFFERS * 3 * FLOAT32 * at_once
    update = {UPDATE: FLOAT32 * at_once} if training.offload_optimizer == "none" else {}
    return States(device, {GATHERED: whole}, {}, update, gather=whole, gradients="fresh", host=host, disk=disk)


def bucket(config: Config, sizes: Sizes) -> int:
    """Return the elements of a bucket of ZeRO's."""
    given = config.training.deepspeed.get("zero_optimization") or {}
    size = given.get("reduce_bucket_size", max(1024, min(BUCKET, sizes.total)))
    return int(size) if size != "auto" else BUCKET


def overlaps(config: Config, cuda: bool) -> bool:
    """Return whether ZeRO reduces while backward goes on, through two buckets."""
    given = config.training.deepspeed.get("zero_optimization") or {}
    return bool(given.get("overlap_comm", cuda))


def gibibytes(size: float) -> float:
    """Return bytes as GiB."""
    return size / math.pow(2, 30)
