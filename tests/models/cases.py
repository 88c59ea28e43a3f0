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

# Settings under which each solver is tried. The last interval feeds back once, the last number of passes and of subsets
# makes the solver exact.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "parallel": [{}],
    "chunked": [{"interval": interval} for interval in (1, 3, 2, 5, LENGTH - 1)],
    "unrolled": [
        {"passes": 3, "loss": "plain_and_fed", "fed_loss_weight": 0.5},
        {"passes": 1},
        {"passes": 2, "loss": "mean", "convergence_weight": 0.5},
        {"passes": 5},
        {"passes": LENGTH + 1},
    ],
    "interleaved": [{"subsets": 2}, {"subsets": 1}, {"subsets": 3}, {"subsets": LENGTH}],
}
REFRESHING: list[dict[str, Any]] = [{"subsets": subsets, "refresh_keys_values": True} for subsets in (3, 2)]

# An architecture's first variant meets every solver under all these settings, the others this many of them.
FEW = {"parallel": 1, "chunked": 2, "unrolled": 1, "interleaved": 1}

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
    # Larger weights make some recurrences chaotic (FBT's above all, where nothing goes past the state): rounding would
    # grow from position to position.
    model = cls(replace(config, hidden_std_factor=0.7, embedding_std=1.0)).double()
    generator = random(seed)
    model.init_weights(generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("bias") or name == "initial" or not bool(parameter.any()):
                parameter.copy_(drawn)
            elif parameter.dim() == 1:  # norms and scales
                parameter.copy_(1 + 0.4 * drawn)
    return model.to(dtype).eval()


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
        return f"{self.architecture}-{self.variant}-{describe(self.solver)}"


def describe(solver: SolverConfig) -> str:
    """Return a solver and the setting that matters most."""
    settings = [getattr(solver, name) for name in ("interval", "passes", "subsets") if hasattr(solver, name)]
    refreshed = "refreshed" if getattr(solver, "refresh_keys_values", False) else ""
    return f"{solver.name}{''.join(map(str, settings))}{refreshed}"


def solver_config(name: str, **settings: Any) -> SolverConfig:
    return SOLVERS[name].Config(name=name, **settings)


def solver_configs(cls: type[Architecture], *, few: bool = False) -> list[SolverConfig]:
    """Return the settings of all solvers that fit an architecture, or a few of each."""
    found = []
    for name, solver in SOLVERS.items():
        settings = SETTINGS[name][: FEW[name] if few else None]
        if name == "interleaved":
            settings = [*settings, *REFRESHING[: 1 if few else None]]
        for each in settings:
            config = solver_config(name, **each)
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
        for number, variant in enumerate(cls.variants())
        for solver in solver_configs(cls, few=number > 0)
    ]


def make_solver(config: SolverConfig, **changes: Any) -> Solver:
    return SOLVERS[config.name](replace(config, **changes))


def interval_of(config: SolverConfig) -> int:
    """Return the number of positions at whose multiples a solver treats positions alike."""
    return getattr(config, "interval", getattr(config, "subsets", 1))


def splits(config: SolverConfig) -> bool:
    """Return whether a solver computes the same, into whatever calls a sequence is cut."""
    return config.name in ("parallel", "chunked")
