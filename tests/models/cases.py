"""What the tests of the contract run over: models with lively weights, tokens, documents, and one tolerance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.models import ARCHITECTURES, Architecture, ArchitectureConfig
from pipeline.solvers import SOLVERS, Solver, SolverConfig

SEEDS = (0, 1, 2)
LENGTH = 12  # positions of a row: more than the windows, no multiple of 5, and short enough for the oracles
ROWS = 3

# Settings under which each solver is tried. The last interval is longer than any row.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "parallel": [{}],
    "chunked": [{"interval": interval} for interval in (1, 2, 3, 5, 50)],
}

# The one tolerance. Two ways to add up the same numbers in another order differ by a few units in the last place of
# the largest term; a recurrence hands the difference on and adds its own at each position, so it grows with length.
# The factor is what is left for depth, reductions and the Jacobian of the recurrence. Errors in the formulas are at
# least 1e6 times larger in float64. Measured: less than 1 for everything here; the rest is room for other machines.
ROUNDING = 8


def tolerance(reference: Tensor, dtype: torch.dtype | None = None) -> float:
    """Return how far rounding may move values computed in ``dtype`` from ``reference``."""
    return ROUNDING * torch.finfo(dtype or reference.dtype).eps * LENGTH * float(reference.detach().abs().max())


def assert_close(found: Tensor, reference: Tensor, what: str = "states", dtype: torch.dtype | None = None) -> None:
    """Raise AssertionError unless both are equal up to rounding."""
    assert found.shape == reference.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(reference.shape)}"
    error = float((found.detach().double() - reference.detach().double()).abs().max()) if found.numel() else 0.0
    limit = tolerance(reference, dtype) if found.numel() else 0.0
    assert error <= limit, f"{what}: off by {error:.3g}, of which rounding explains {limit:.3g}"


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_model(
    cls: type[Architecture], config: ArchitectureConfig, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Architecture:
    """Return a model in which nothing is near zero or one by accident."""
    model = cls(replace(config, hidden_std_factor=1.0, embedding_std=1.0)).double()
    generator = random(seed)
    model.init_weights(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, the initial state, the bias of the merge's gate
                parameter.copy_(1 + 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or name == "initial":
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.to(dtype)


def make_tokens(config: ArchitectureConfig, seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(config.vocab_size or 0, (rows, length), generator=random(seed + 1000))


def starts_of(row: list[int], length: int) -> Tensor:
    """Return for each position the last of the borders in ``row`` (ascending from 0) that does not lie after it."""
    return torch.tensor([max(begin for begin in row if begin <= position) for position in range(length)])


def make_starts(seed: int, rows: int = ROWS, length: int = LENGTH, unit: int = 1) -> Tensor:
    """Return random document starts [rows, length], multiples of ``unit``."""
    found = []
    for row in range(rows):
        draw = torch.rand(length, generator=random(7919 * seed + row)) < 0.3
        borders = [0] + [position for position in range(1, length) if draw[position] and position % unit == 0]
        found.append(starts_of(borders, length))
    return torch.stack(found)


def random_cuts(seed: int, length: int = LENGTH) -> list[int]:
    """Return borders of calls, from 0 to ``length``."""
    draw = torch.rand(length, generator=random(seed + 5000)) < 0.4
    return [0, *(position for position in range(1, length) if draw[position]), length]


@dataclass(frozen=True)
class Case:
    """An architecture, one of its variants, and a solver that fits it."""

    architecture: str
    variant: str
    solver: SolverConfig

    @property
    def cls(self) -> type[Architecture]:
        return ARCHITECTURES[self.architecture]

    @property
    def config(self) -> ArchitectureConfig:
        return self.cls.variants()[self.variant]

    def __str__(self) -> str:
        return f"{self.architecture}-{self.variant}-{self.solver.name}{getattr(self.solver, 'interval', '')}"


def solver_config(name: str, **settings: Any) -> SolverConfig:
    return SOLVERS[name].Config(name=name, **settings)


def solver_configs(cls: type[Architecture]) -> list[SolverConfig]:
    """Return the settings of all solvers that fit an architecture."""
    found = []
    for name, solver in SOLVERS.items():
        for settings in SETTINGS[name]:
            config = solver_config(name, **settings)
            try:
                solver.check_fits(config, cls)
            except ConfigError:
                continue
            found.append(config)
    return found


def all_cases() -> list[Case]:
    return [
        Case(name, variant, solver)
        for name, cls in ARCHITECTURES.items()
        for variant in cls.variants()
        for solver in solver_configs(cls)
    ]


def make_solver(config: SolverConfig, **changes: Any) -> Solver:
    return SOLVERS[config.name](replace(config, **changes))


def interval_of(config: SolverConfig) -> int | None:
    """Return every how many positions a solver feeds back; None: never."""
    if config.name == "parallel":
        return None
    if config.name == "chunked":
        return config.interval
    raise NotImplementedError(f"say here which recurrence solver {config.name!r} evaluates")
