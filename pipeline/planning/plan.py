"""``backfeed plan``: what each rank would hold, how long the run would take, and what would make it fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline import solvers
from pipeline.config import Config, TrainingConfig
from pipeline.description import with_vocabulary
from pipeline.errors import ConfigError
from pipeline.files import write_atomically
from pipeline.models import Architecture
from pipeline.models.base import build_on_meta
from pipeline.planning.machines import Machine
from pipeline.planning.passes import Case, Memory, memory_of, settings_of_stages
from pipeline.planning.states import Sizes, States, sizes_of, states
from pipeline.solvers import flops_by_stage, mean_over_stages
from pipeline.solvers.chunked import ChunkedConfig

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3")
RESERVED = "CUDA, libraries, gaps"
CONTEXT = 1 << 30
"""Bytes of a GPU that CUDA and its libraries take: an allowance, not measured."""
GAPS = 0.05
"""Share of the peak that the allocator loses to gaps between tensors: likewise."""
DAY = 86_400


@dataclass(frozen=True)
class Option:
    """What a rank holds under one strategy.

    Attributes:
        strategy: ``training.strategy``.
        activation_checkpointing: ``solver.activation_checkpointing``.
        parts: bytes at the peak, by what they are for; their sum is ``peak``.
        peak: most bytes of the device at once.
        when: at which moment of a step.
        settings: values of the solver's scheduled settings at the peak.
        states: bytes that are held between steps.
        host: bytes of the host's memory.
        disk: bytes on a disk.
        fits: whether the device has as many.
        exact: every operation was looked at; if not, a long loop was continued from shorter ones.
    """

    strategy: str
    activation_checkpointing: bool
    parts: dict[str, int]
    peak: int
    when: str
    settings: dict[str, object]
    states: int
    host: int
    disk: int
    fits: bool
    exact: bool


@dataclass(frozen=True)
class Time:
    """How long a run takes at the utilisation asked for.

    Attributes:
        flops: FLOPs of a token, forward, backward and what is computed again, mean over the schedules.
        recomputed: how many of them are computed again.
        tokens_a_day: of all ranks.
        seconds: of the whole run.
        jobs: time limits that makes.
    """

    flops: float
    recomputed: float
    tokens_a_day: float
    seconds: float
    jobs: int


@dataclass(frozen=True)
class Advice:
    """A change with which the run fits.

    Attributes:
        overrides: settings, as on the command line.
        peak: bytes of the device at once, then.
    """

    overrides: list[str]
    peak: int


@dataclass(frozen=True)
class Plan:
    """All of it.

    Attributes:
        run: name of the run.
        architecture: its architecture.
        solver: its solver.
        parameters: all parameters.
        ranks: processes.
        rows: rows of a micro-batch.
        sequence_length: positions of a row.
        accumulation: micro-batches of a step.
        precision: ``training.precision``.
        machine: what it is planned for.
        chosen: the run as it is configured.
        options: other strategies, with and without checkpointing.
        refused: strategies that the configuration rules out, with the reason.
        time: how long it takes.
        advice: what makes it fit; none where it fits, or nothing was found.
        tokens: tokens of the run.
    """

    run: str
    architecture: str
    solver: str
    parameters: int
    ranks: int
    rows: int
    sequence_length: int
    accumulation: int
    precision: str
    machine: Machine
    chosen: Option
    options: list[Option]
    refused: dict[str, str]
    time: Time
    advice: Advice | None
    tokens: int


def plan(config: Config, machine: Machine, *, advanced: Callable[[str], None] = lambda _: None) -> Plan:
    """Plan a run.

    Args:
        config: the run, checked; its number of ranks is the one planned for.
        machine: what it runs on.
        advanced: told what is looked at next.

    Raises:
        ConfigError: the size of the vocabulary is neither set nor known from the data.
    """
    config = settled(config)
    model = on_meta(config)
    sizes = sizes_of(config, model)
    advanced("the run as configured")
    chosen = option(config, machine, sizes)
    options: list[Option] = []
    refused: dict[str, str] = {}
    highest: dict[bool, Option] = {}  # which stage takes most hardly hangs on the strategy
    for strategy in STRATEGIES:
        if (strategy == "single") != (config.training.ranks == 1):
            continue
        for checkpointing in (False, True):
            try:
                other = changed(config, strategy=strategy, activation_checkpointing=checkpointing)
            except ConfigError as error:
                refused[strategy] = str(error)
                break
            advanced(f"{strategy}, {'with' if checkpointing else 'without'} checkpointing")
            like = highest.get(checkpointing)
            options.append(option(other, machine, sizes, like.settings if like else None))
            highest.setdefault(checkpointing, options[-1])
    advice = None if chosen.fits else advise(config, machine, chosen, advanced)
    training = config.training
    return Plan(
        run=config.run.name,
        architecture=config.model.architecture,
        solver=config.solver.name,
        parameters=sizes.total,
        ranks=training.ranks,
        rows=training.micro_batch_tokens // config.data.sequence_length,
        sequence_length=config.data.sequence_length,
        accumulation=training.accumulation,
        precision=training.precision,
        machine=machine,
        chosen=chosen,
        options=options,
        refused=refused,
        time=time_of(config, model, machine),
        advice=advice,
        tokens=training.steps * training.batch_tokens,
    )


def settled(config: Config) -> Config:
    """Return the run with its vocabulary and its strategy named."""
    training = config.training
    strategy = training.strategy
    if strategy == "auto":
        strategy = "single" if training.ranks == 1 else "ddp"
    return replace(config, model=with_vocabulary(config), training=replace(training, strategy=strategy))


def on_meta(config: Config) -> Architecture:
    """Return the model set up for training, without memory for its weights."""
    model = build_on_meta(config.model)
    solvers.build(config.solver).adapt(model)
    return model


def option(config: Config, machine: Machine, sizes: Sizes, settings_at: Mapping[str, object] | None = None) -> Option:
    """Return what a rank holds under the run's strategy.

    Args:
        config: the run.
        machine: what it runs on.
        sizes: of its model.
        settings_at: look at these values of scheduled settings alone; none: at the stage that takes most.
    """
    held = states(config, sizes, cuda=machine.cuda)
    looked_at = [tuple(settings_at.items())] if settings_at else all_settings(config)
    passes = [(settings, memory_of(case(config, held, settings, machine.cuda))) for settings in looked_at]
    moments = [
        *(during_pass(held, memory, dict(settings)) for settings, memory in passes),
        *([gathering(held, max(passes, key=lambda each: each[1].kept)[1])] if held.gather else []),
        ("update", summed(held.device, held.in_update), {}),
    ]
    when, parts, settings = max(moments, key=lambda each: sum(each[1].values()))
    parts = {name: size for name, size in parts.items() if size}
    if machine.cuda:
        parts[RESERVED] = CONTEXT + round(GAPS * sum(parts.values()))
    peak = sum(parts.values())
    return Option(
        strategy=config.training.strategy,
        activation_checkpointing=config.solver.activation_checkpointing,
        parts=parts,
        peak=peak,
        when=when,
        settings=dict(settings),
        states=sum(held.device.values()),
        host=sum(held.host.values()),
        disk=sum(held.disk.values()),
        fits=peak <= machine.memory,
        exact=all(memory.exact for _, memory in passes),
    )


Moment = tuple[str, dict[str, int], dict[str, object]]


def during_pass(held: States, memory: Memory, settings: dict[str, object]) -> Moment:
    """Return what is held at the peak of a pass."""
    return memory.phase, summed(summed(held.device, held.in_pass), memory.parts), settings


def gathering(held: States, memory: Memory) -> Moment:
    """Return what is held when backward has gathered all weights, and not yet let go of what they came through."""
    before = {"kept for backward": memory.kept, "gathered weights": 2 * held.gather}
    return "gathering for backward", summed(held.device, before), {}


def summed(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the sums by name."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def all_settings(config: Config) -> list[tuple[tuple[str, object], ...]]:
    """Return all values that the solver's scheduled settings take."""
    return list(settings_of_stages(config.stages)) or [()]


def case(config: Config, held: States, settings: tuple[tuple[str, object], ...], cuda: bool) -> Case:
    """Return the pass of a micro-batch."""
    training = config.training
    return Case(
        model=config.model,
        solver=config.solver,
        settings=settings,
        rows=training.micro_batch_tokens // config.data.sequence_length,
        length=config.data.sequence_length,
        precision=training.precision,
        gradients=held.gradients,
        documents=config.data.document_boundaries == "restart",
        cuda=cuda,
        cached_casts=bool(training.zero_stage),
        arriving=tuple(held.arriving.items()),
    )


def changed(config: Config, *, activation_checkpointing: bool | None = None, **training: object) -> Config:
    """Return the run with other settings, checked; raise ConfigError where they contradict the rest."""
    solver = config.solver
    if activation_checkpointing is not None:
        solver = replace(solver, activation_checkpointing=activation_checkpointing)
        if isinstance(solver, ChunkedConfig) and not activation_checkpointing:
            solver = replace(solver, segment_length=0)
    other = replace(config, solver=solver, training=replace(config.training, **training))  # type: ignore[arg-type]
    other.training.check()
    other.check()
    return other


# Time


def time_of(config: Config, model: Architecture, machine: Machine) -> Time:
    """Return how long the run takes."""
    solver, training = solvers.build(config.solver), config.training
    forward = mean_over_stages(flops_by_stage(solver, model, config.stages, config.data.sequence_length))
    readout = model.flops(config.data.sequence_length).readout
    recomputed = max(0.0, forward - readout) if config.solver.activation_checkpointing else 0.0
    flops = 3 * forward + recomputed
    rate = training.ranks * machine.peak_flops * machine.utilization / flops
    seconds = training.steps * training.batch_tokens / rate
    return Time(flops, recomputed, rate * DAY, seconds, math.ceil(seconds / machine.time_limit))


# What would make it fit


def advise(config: Config, machine: Machine, chosen: Option, advanced: Callable[[str], None]) -> Advice | None:
    """Return the first change that fits, the cheapest first; None: none does."""
    for overrides, make in candidates(config):
        try:
            other = make()
        except ConfigError:
            continue
        if not hopeful(other, machine):
            continue
        advanced(" ".join(overrides))
        found = option(other, machine, sizes_of(other, on_meta(other)))
        if found.fits:
            return Advice(overrides, found.peak)
    return None


def hopeful(config: Config, machine: Machine) -> bool:
    """Return whether the states alone leave room; a glance, where a pass takes seconds."""
    held = states(config, sizes_of(config, on_meta(config)), cuda=machine.cuda)
    size = max(sum(held.device.values()) + sum(each.values()) for each in (held.in_pass, held.in_update))
    return (1 + GAPS) * size + CONTEXT <= machine.memory if machine.cuda else size <= machine.memory


Candidate = tuple[list[str], Callable[[], Config]]


def candidates(config: Config) -> list[Candidate]:
    """Return changes, the cheapest first.

    Sharding costs little, checkpointing a third of the time, smaller micro-batches efficiency, offloading much time.
    """
    training = config.training
    result: list[Candidate] = []
    offloads: tuple[dict[str, object], ...] = (
        {},
        {"offload_optimizer": "cpu"},
        {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    )
    for offload in offloads:
        for micro in micro_batches(config):
            for checkpointing in (True,) if config.solver.activation_checkpointing else (False, True):
                for strategy in stronger(training.strategy):
                    values: dict[str, object] = {"strategy": strategy, "micro_batch_tokens": micro, **offload}
                    result.append(candidate(config, checkpointing, values))
    for factor in (2, 4, 8, 16, 32, 64, 128):
        devices = training.devices * factor
        values = {"strategy": "zero3", "micro_batch_tokens": micro_batches(config)[-1], "devices": devices}
        result.append(candidate(config, True, values))
    return [each for each in result if each[0]]


def candidate(config: Config, checkpointing: bool, values: dict[str, object]) -> Candidate:
    """Return a change as overrides, and what makes the changed run."""
    training = config.training
    overrides = [f"training.{name}={value}" for name, value in values.items() if getattr(training, name) != value]
    if checkpointing != config.solver.activation_checkpointing:
        overrides.append("solver.activation_checkpointing=true")
    return overrides, lambda: changed(config, activation_checkpointing=checkpointing, **values)


def stronger(strategy: str) -> Sequence[str]:
    """Return a strategy and those that shard more."""
    return STRATEGIES[STRATEGIES.index(strategy) :] if strategy != "single" else ("single",)


def micro_batches(config: Config) -> list[int]:
    """Return the sizes of a micro-batch, in tokens, from the present one down to one row, halved each time."""
    training: TrainingConfig = config.training
    length, rows = config.data.sequence_length, training.micro_batch_tokens // config.data.sequence_length
    found = []
    while rows >= 1:
        if training.batch_tokens % (rows * length * training.ranks) == 0:
            found.append(rows * length)
        rows //= 2
    return found


def save(found: Plan, path: Path) -> None:
    """Write a plan as JSON."""
    write_atomically(path, json.dumps(asdict(found), indent=1) + "\n")
