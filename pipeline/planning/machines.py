"""What GPUs can do: matrix products a second, and memory.

From the makers' data sheets (NVIDIA A100, H100 SXM, H200, L40S, HGX B200; AMD Instinct MI300X), dense products: tables
often give sparse ones, twice as many. Memory is about what a program sees of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.errors import ConfigError

UNITS = {"GiB": 2**30, "MiB": 2**20, "TiB": 2**40, "GB": 10**9, "MB": 10**6, "TB": 10**12}


@dataclass(frozen=True)
class Machine:
    """What a run is planned for.

    Attributes:
        name: kind of GPU, or ``cpu``.
        memory: bytes of each rank.
        peak_flops: FLOPs a second of each rank at best.
        utilization: share of them that products get, those that are computed again included.
        time_limit: seconds of a job.
    """

    name: str
    memory: int
    peak_flops: float
    utilization: float
    time_limit: int

    @property
    def cuda(self) -> bool:
        """It is a GPU."""
        return self.name != "cpu"


@dataclass(frozen=True)
class Accelerator:
    """One kind of GPU.

    Attributes:
        bf16: FLOPs a second in bfloat16.
        float32: the same in float32, without TF32.
        memory: bytes.
    """

    bf16: float
    float32: float
    memory: int


ACCELERATORS = {
    "a100": Accelerator(312e12, 19.5e12, 79 * 2**30),
    "a100-40": Accelerator(312e12, 19.5e12, 39 * 2**30),
    "h100": Accelerator(989e12, 67e12, 79 * 2**30),
    "h200": Accelerator(989e12, 67e12, 139 * 2**30),
    "b200": Accelerator(2250e12, 75e12, 178 * 2**30),
    "l40s": Accelerator(362e12, 91.6e12, 44 * 2**30),
    "mi300x": Accelerator(1307e12, 163.4e12, 191 * 2**30),
}


def size(text: str, option: str) -> int:
    """Return the bytes that a text such as 80GiB says, or raise ConfigError that names the option."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text)
    if found is None or found[2] not in UNITS or float(found[1]) <= 0:
        raise ConfigError(f"{option} is {text!r}; it must be a number and a unit, such as 80GiB ({', '.join(UNITS)})")
    return int(float(found[1]) * UNITS[found[2]])


def seconds(text: str, option: str) -> int:
    """Return the seconds that a time of Slurm's says: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; or raise."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(each.isdigit() for each in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        raise ConfigError(f"{option} is {text!r}; it must be a time as Slurm takes it, such as 24:00:00 or 2-00:00:00")
    numbers = [int(each) for each in parts]
    if dash:
        hours, minutes, rest_seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, rest_seconds = numbers
    else:
        hours, (minutes, rest_seconds) = 0, [*numbers, 0][:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest_seconds
    if total <= 0:
        raise ConfigError(f"{option} is {text!r}; it must be above 0")
    return total


def machine(
    name: str,
    precision: str,
    *,
    memory: str | None = None,
    peak_flops: float | None = None,
    utilization: float = 0.4,
    time_limit: str = "24:00:00",
) -> Machine:
    """Return a machine, or raise ConfigError on what is no machine.

    Args:
        name: one of ``ACCELERATORS``, or ``cpu``.
        precision: ``training.precision``.
        memory: of each rank; None: what that kind has.
        peak_flops: likewise.
        utilization: see ``Machine``.
        time_limit: as Slurm takes it.
    """
    known = ACCELERATORS.get(name)
    if known is None and name != "cpu":
        raise ConfigError(f"--gpu is {name!r}; it must be one of: {', '.join([*ACCELERATORS, 'cpu'])}")
    if known is None and (memory is None or peak_flops is None):
        raise ConfigError("--gpu cpu needs --gpu-memory, of a rank, and --peak-flops")
    if not 0 < utilization <= 1:
        raise ConfigError(f"--utilization is {utilization}; it must be above 0, at most 1")
    if peak_flops is not None and not 0 < peak_flops < float("inf"):
        raise ConfigError(f"--peak-flops is {peak_flops}; it must be above 0")
    limit = seconds(time_limit, "--time-limit")
    held = size(memory, "--gpu-memory") if memory is not None else known.memory if known else 0
    fastest = (known.float32 if precision == "float32" else known.bf16) if known else 0.0
    return Machine(name, held, peak_flops or fastest, utilization, limit)
