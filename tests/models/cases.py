"""What tests of models and solvers run over: models with lively weights, tokens, documents, solvers, one tolerance."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.models import ARCHITECTURES, Architecture, ArchitectureConfig, Transformer
from pipeline.models.inputs import Inputs
from pipeline.models.transformer import TransformerConfig
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


def model_and_tokens(
    cls: type[Architecture], seed: int = 0, variant: str = "plain", length: int = LENGTH
) -> tuple[Architecture, Tensor]:
    config = cls.variants()[variant]
    return make_model(cls, config, seed), make_tokens(config, seed, length=length)


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


def solver(name: str, **settings: Any) -> Solver:
    config = solver_config(name, **settings)
    config.check()
    return make_solver(config)


EXACT, PARALLEL = solver("chunked", interval=1), make_solver(solver_config("parallel"))
FEEDING_SOLVERS = {
    "chunked1": EXACT,
    "chunked3": solver("chunked", interval=3),
    "unrolled3": solver("unrolled", passes=3, loss="mean", convergence_weight=0.1),
    "unrolled13": solver("unrolled", passes=LENGTH + 1, loss="mean"),
    "interleaved2": solver("interleaved", subsets=2),
    "interleaved12": solver("interleaved", subsets=LENGTH),
}


def plain_of(model: Architecture) -> Transformer:
    """Return the plain transformer with the same settings and weights."""
    settings = {field.name: getattr(model.config, field.name) for field in fields(TransformerConfig)}
    plain = Transformer(TransformerConfig(**{**settings, "architecture": "transformer"})).double()
    weights = model.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    return plain.eval()


def own_names(model: Architecture) -> set[str]:
    """Return the names of the weights that a plain transformer of the same settings does not have."""
    return model.state_dict().keys() - plain_of(model).state_dict().keys()


def mute(model: Architecture) -> dict[str, Tensor]:
    """Mute a model's feedback; return the weights that this changed, as they were."""
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.mute_feedback()
    return {name: before[name] for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}


def watched(cls: type[Architecture], config: ArchitectureConfig, seed: int = 0) -> Architecture:
    """Return a model that notes in ``calls`` each call to ``advance``: inputs, what is fed, states, memory after it."""
    model = make_model(cls, config, seed)
    model.calls, advance = [], model.advance

    def noted(inputs, feedback, memory=None):
        states, after = advance(inputs, feedback, memory)
        model.calls.append((inputs, feedback, states, after))
        return states, after

    model.advance = noted
    return model


def prepared(model: Architecture, tokens: Tensor, starts: Tensor | None = None) -> Inputs:
    return model.prepare_feedback(model.prepare(tokens, torch.arange(tokens.shape[1])[None], starts)[0])


def passes_of(model: Architecture, tokens: Tensor, passes: int, starts: Tensor | None = None) -> list[Tensor]:
    """Return the states of every pass."""
    terms = solver("unrolled", passes=passes, loss="mean").run(model, tokens, starts).loss_terms
    assert len(terms) == passes
    return [states for states, _ in terms]


def shifted(states: Tensor, starts: Tensor | None = None) -> Tensor:
    """Return the state of the position before, zero at a document's first."""
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
    if starts is None:
        return before
    return torch.where((starts == torch.arange(starts.shape[1]))[..., None], 0.0, before)


def token_loss(model: Architecture, states: Tensor, tokens: Tensor, where: slice = slice(None)) -> Tensor:
    """Return the mean cross-entropy of the tokens that follow, at the positions ``where``."""
    logits = model.readout(states[:, :-1][:, where])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, where].flatten())


def gradient_vector(model: Architecture, loss: Tensor, *, keep: bool = False) -> Tensor:
    """Return the gradients of ``loss`` for all parameters, zero where there is none; ``keep`` the graph for more."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
    )


def relative(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).norm() / reference.norm())
