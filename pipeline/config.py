"""The schema of a run: typed dataclasses for OmegaConf, every field documented where it is defined.

Reading files, merging and error messages live in ``config_files``; the settings of one architecture or solver stand
in that architecture's or solver's own file. ``docs/configuration.md`` is generated from this schema.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING

from pipeline.choices import chosen_by
from pipeline.errors import ConfigError
from pipeline.models import ARCHITECTURES, ArchitectureConfig
from pipeline.solvers import SOLVERS, SolverConfig
from pipeline.solvers.schedules import Mixture


@dataclass
class RunConfig:
    """Name and place of a run."""

    name: str = MISSING
    """Name of the run; its folder is ``root/name``."""
    root: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 0
    """Seed of the initial weights, of the order of the data and of everything else that is drawn."""
    initial_weights: str | None = None
    """Folder whose weights the run starts from: one that ``backfeed convert`` made, or a checkpoint of the same
    architecture. None draws them. A run that is resumed goes on from its own checkpoint."""

    def check(self) -> None:
        """Raise ConfigError unless the name is that of one folder and the seed is one that generators take."""
        at_least("run.seed", self.seed, 0)
        at_most("run.seed", self.seed, 2**63 - 1)
        at_most("the length of run.name", len(self.name), 200)
        if not re.fullmatch(r"[\w][\w.+-]*", self.name):
            raise ConfigError(
                f"run.name is {self.name!r}; it names a folder: letters, digits and . _ + - alone, the first a letter, "
                "digit or _"
            )

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.root) / self.name


@dataclass
class DataConfig:
    """Which tokens are read, and how rows are cut from them."""

    path: str = MISSING
    """Folder that ``backfeed prepare`` made (it holds ``manifest.json``)."""
    sequence_length: int = 1024
    """Positions in a row, in tokens."""
    document_boundaries: Literal["restart", "continue"] = "restart"
    """What happens where a new document begins inside a row: ``restart`` positions, attention and recurrent state, or
    let them ``continue`` as if the row were one document."""
    train_split: str = "train"
    """Split to train on."""
    workers: int = 0
    """Loader processes of each rank; 0 reads in the training process. The order of the data does not depend on it."""
    skip_samples: list[list[int]] = field(default_factory=list)
    """Training samples to leave out, as ranges ``[first, last]``: ``[[1000, 1999], [52000, 52003]]``. A run that went
    wrong names its samples so. May be changed on resume for samples that are still ahead."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        at_least("data.sequence_length", self.sequence_length, 2)
        at_least("data.workers", self.workers, 0)
        self._check_skips()

    def _check_skips(self) -> None:
        """Raise ConfigError unless the ranges are ranges, and each sample is in one at most."""
        for each in self.skip_samples:
            if len(each) != 2 or not 0 <= each[0] <= each[1]:
                raise ConfigError(
                    f"data.skip_samples holds {each}; it must hold ranges [first, last] of sample numbers, 0 <= first "
                    "<= last"
                )
        for one, other in pairwise(sorted(self.skip_samples)):
            if other[0] <= one[1]:
                raise ConfigError(f"data.skip_samples: {one} and {other} overlap; name each sample once")

    def first_unreachable_skip(self, samples: int) -> list[int] | None:
        """Return the first range of ``skip_samples`` that a run over ``samples`` samples ends before, if any."""
        left_out = 0
        for first, last in sorted(self.skip_samples):
            if first - left_out >= samples:
                return [first, last]
            left_out += last - first + 1
        return None


@dataclass
class Stage:
    """One stage of a schedule: from ``at`` on the setting has ``value``, or one of ``draw`` anew in every step."""

    at: float = MISSING
    """Where the stage begins, as a fraction of the run's tokens (0 is the start)."""
    value: Any = None
    """Value of the setting from there on."""
    draw: list[Any] = field(default_factory=list)
    """Values of which one is drawn for every step, from the run's seed and the step, the same on all ranks. Evaluation
    takes the one that comes closest to the exact recurrence."""
    weights: list[float] = field(default_factory=list)
    """How often each value of ``draw`` is drawn, relative to the others; none draws all alike."""

    def setting(self, name: str) -> Any:
        """Return the value, or the mixture of values, of the setting ``name``; raise ConfigError unless it is one."""
        if (self.value is None) == (not self.draw):
            both = "both a value and a draw" if self.draw else "neither a value nor a draw"
            raise ConfigError(f"schedules.{name}: the stage at {self.at} has {both}; it must have one of them")
        if not self.draw:
            if self.weights:
                raise ConfigError(f"schedules.{name}: weights belong to a draw; the stage at {self.at} has a value")
            return self.value
        weights = self.weights or [1.0] * len(self.draw)
        if len(weights) != len(self.draw) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise ConfigError(
                f"schedules.{name}: the stage at {self.at} has weights {weights} for draw {self.draw}; there must be "
                "one for each, none below 0, not all 0, and a finite sum"
            )
        drawn = [(value, weight) for value, weight in zip(self.draw, weights, strict=True) if weight]
        return Mixture(tuple(value for value, _ in drawn), tuple(weight for _, weight in drawn))


@dataclass
class OptimizerConfig:
    """What all optimisers share."""

    name: str = MISSING
    """Optimiser: ``adamw`` or ``muon``."""


@dataclass
class AdamConfig(OptimizerConfig):
    """What optimisers with AdamW in them share."""

    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """Added to the square root of AdamW's second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of weight matrices. Norm weights, biases, embeddings and initial states are not decayed."""
    decay_to_zero: bool = False
    """Let weight decay fall linearly over the run, from its full value in the first step to 0 after the last."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        for name in ("beta1", "beta2"):
            below_one(f"optimizer.{name}", getattr(self, name))
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        above_zero("optimizer.eps", self.eps)


@dataclass
class AdamWConfig(AdamConfig):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), decaying matrices only."""

    base_width: int | None = None
    """Width at which ``learning_rate.peak`` holds for all parameters: the rate of hidden matrices is multiplied by
    base_width / ``model.width``; embeddings, head and vectors keep theirs. None: no scaling."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        super().check()
        if self.base_width is not None:
            at_least("optimizer.base_width", self.base_width, 1)


@dataclass
class MuonConfig(AdamConfig):
    """Muon (Jordan et al. 2024) for the hidden weight matrices, AdamW for all the rest.

    Matrices that are packed into one weight (queries, keys and values, for one) are orthogonalised each by itself.
    """

    momentum: float = 0.95
    """Decay of Muon's average of gradients."""
    nesterov: bool = True
    """Add the gradient once more to the average before it is orthogonalised (Nesterov's momentum)."""
    ns_steps: int = 5
    """Newton-Schulz iterations of the orthogonalisation."""
    adjust_rate: Literal["original", "match_rms_adamw"] = "original"
    """How a matrix's shape scales its rate: ``original`` multiplies by sqrt(max(1, rows / columns)),
    ``match_rms_adamw`` by 0.2 sqrt(max(rows, columns)), which suits rates and decay found for AdamW."""
    embedding_peak: float | None = None
    """Peak rate of embeddings; the schedule scales it as it does ``learning_rate.peak``, which is Muon's. None takes
    ``learning_rate.peak``."""
    head_peak: float | None = None
    """Peak rate of an untied head's matrix; none takes ``learning_rate.peak``."""
    vector_peak: float | None = None
    """Peak rate of norm weights, biases, scalars and initial states; none takes ``learning_rate.peak``."""
    head_weight_decay: float | None = None
    """Decoupled decay of an untied head's matrix; none takes ``weight_decay``."""
    base_width: int | None = None
    """Width at which the rates of embeddings and head hold: they are multiplied by
    (``model.width`` / base_width)^-1/2. None: no scaling."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        super().check()
        below_one("optimizer.momentum", self.momentum)
        at_least("optimizer.ns_steps", self.ns_steps, 1)
        at_most("optimizer.ns_steps", self.ns_steps, 99)
        for name in ("embedding_peak", "head_peak", "vector_peak"):
            if getattr(self, name) is not None:
                above_zero(f"optimizer.{name}", getattr(self, name))
        if self.head_weight_decay is not None:
            at_least("optimizer.head_weight_decay", self.head_weight_decay, 0)
        if self.base_width is not None:
            at_least("optimizer.base_width", self.base_width, 1)


@dataclass
class LearningRateConfig:
    """What all learning-rate schedules share."""

    name: str = MISSING
    """Schedule: ``constant``, ``cosine`` or ``wsd``."""
    peak: float = MISSING
    """Highest learning rate, reached at the end of the warm-up."""
    warmup_tokens: int = 0
    """Tokens over which the rate rises linearly from 0 to ``peak``."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        above_zero("learning_rate.peak", self.peak)
        at_least("learning_rate.warmup_tokens", self.warmup_tokens, 0)


@dataclass
class ConstantConfig(LearningRateConfig):
    """The peak rate from the warm-up to the end."""


@dataclass
class CosineConfig(LearningRateConfig):
    """Half a cosine from the peak to the final rate at the last token."""

    final_fraction: float = 0.1
    """Rate at the end of the run as a fraction of ``peak``."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        super().check()
        at_least("learning_rate.final_fraction", self.final_fraction, 0)
        at_most("learning_rate.final_fraction", self.final_fraction, 1)


@dataclass
class WSDConfig(LearningRateConfig):
    """Warm-up, stable, decay: the peak rate, then a straight line to the final rate over the last part of the run."""

    decay_fraction: float = 0.2
    """Part of the run's tokens, at its end, over which the rate falls."""
    final_fraction: float = 0.0
    """Rate at the end of the run as a fraction of ``peak``."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        super().check()
        at_least("learning_rate.final_fraction", self.final_fraction, 0)
        at_most("learning_rate.final_fraction", self.final_fraction, 1)
        if not 0 < self.decay_fraction <= 1:
            raise ConfigError(f"learning_rate.decay_fraction is {self.decay_fraction}; it must be above 0, at most 1")


@dataclass
class TrainingConfig:
    """How long and how to train. Batches and durations are counted in tokens."""

    tokens: int = MISSING
    """Tokens to train on, over all ranks."""
    batch_tokens: int = MISSING
    """Tokens of one optimiser step, over all ranks and micro-batches."""
    micro_batch_tokens: int = MISSING
    """Tokens that one rank puts through the model at once; the rest of the batch is accumulated."""
    precision: Literal["float32", "bf16-mixed", "bf16"] = "float32"
    """``float32``; ``bf16-mixed``: float32 weights with products in bfloat16; ``bf16``, under ZeRO: passes use bfloat16
    weights, and the optimiser updates float32 masters of them."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them as they are."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device; ``auto`` takes GPUs where there are some."""
    strategy: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """``single`` process; ``ddp``: replicas with averaged gradients; ``zero1``, ``zero2``, ``zero3``: ranks divide the
    optimiser's states, gradients too, weights too (DeepSpeed). ``auto`` takes ddp where there are more ranks than
    one. A run may go on under another."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where ZeRO keeps master weights and the optimiser's states, and updates them: on the device (``none``), in the
    host's memory, or on its disk (zero3)."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where zero3 keeps its part of the weights between passes."""
    nvme_path: str | None = None
    """Folder on a fast local disk for what is offloaded to ``nvme``."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's own settings (docs/strategies.md), as in its JSON file, beside those that follow from ours; where the
    two contradict each other, the run is refused."""
    timeout_seconds: int = 600
    """How long a rank waits for the others in a collective, and how long a rank may make no progress though it is alive
    (a whole save, a batch of validation, the first step), before the run ends, in seconds."""
    silence_seconds: int = 60
    """How long a rank may give no sign of life before the others take it for lost, in seconds. A process that has died
    is missed at once; this is for one that is stopped, or whose machine or network is gone."""
    grace_seconds: int = 10
    """Once a rank has failed: how long the others have to end by themselves before they are ended, in seconds."""
    devices: int = 1
    """Ranks on each node."""
    nodes: int = 1
    """Nodes."""
    threads: int = 0
    """Threads of each rank on the CPU; 0 shares the cores that this process may use among the ranks of its node. Losses
    repeat to the last bit only at the same number of threads."""

    def check(self) -> None:
        """Raise ConfigError on values out of range or that contradict each other."""
        for name in ("tokens", "batch_tokens", "micro_batch_tokens", "devices", "nodes"):
            at_least(f"training.{name}", getattr(self, name), 1)
        at_least("training.timeout_seconds", self.timeout_seconds, 1)
        at_most("training.timeout_seconds", self.timeout_seconds, 1_000_000)
        for name in ("silence_seconds", "grace_seconds"):
            at_least(f"training.{name}", getattr(self, name), 1)
            at_most(f"training.{name}", getattr(self, name), 1_000_000)
        self._check_strategy()
        at_least("training.clip_norm", self.clip_norm, 0)
        at_least("training.threads", self.threads, 0)
        for name in ("threads", "devices", "nodes"):
            at_most(f"training.{name}", getattr(self, name), 100_000 if name == "nodes" else 1024)
        if self.strategy == "single" and self.ranks > 1:
            raise ConfigError(f"training.strategy is single, but devices x nodes is {self.ranks}; set strategy=ddp")
        if self.tokens < self.batch_tokens:
            raise ConfigError(
                f"training.tokens is {self.tokens}, less than one batch (training.batch_tokens={self.batch_tokens})"
            )
        if self.batch_tokens % (self.micro_batch_tokens * self.ranks):
            raise ConfigError(
                f"training.batch_tokens is {self.batch_tokens}; it must be a multiple of micro_batch_tokens x ranks = "
                f"{self.micro_batch_tokens} x {self.ranks} = {self.micro_batch_tokens * self.ranks}"
            )

    def _check_strategy(self) -> None:
        """Raise ConfigError where a setting has no use under the strategy."""
        for name in ("offload_optimizer", "offload_parameters"):
            value = getattr(self, name)
            if value == "none":
                continue
            if not self.zero_stage:
                raise ConfigError(f"training.{name} is {value}, but training.strategy is {self.strategy}; set zero3")
            if self.zero_stage < 3 and (name == "offload_parameters" or value == "nvme"):
                raise ConfigError(f"training.{name} is {value}, which {self.strategy} cannot; set strategy=zero3")
            if value == "nvme" and self.nvme_path is None:
                raise ConfigError(f"training.{name} is nvme; set training.nvme_path to a folder on a local disk")
        if self.nvme_path is not None and "nvme" not in (self.offload_optimizer, self.offload_parameters):
            raise ConfigError("training.nvme_path is set, but nothing is offloaded to nvme; set offload_optimizer=nvme")
        if self.deepspeed and not self.zero_stage:
            raise ConfigError(
                f"training.deepspeed is set, but training.strategy is {self.strategy}; set zero1 to zero3"
            )
        if self.precision == "bf16" and not self.zero_stage:
            raise ConfigError(
                f"training.precision is bf16, which needs ZeRO's float32 masters, but strategy is {self.strategy}; set "
                "precision=bf16-mixed, or strategy=zero1, zero2 or zero3"
            )

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO; 0: none."""
        return int(self.strategy[-1]) if self.strategy.startswith("zero") else 0

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.devices * self.nodes

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank accumulates for one optimiser step."""
        return self.batch_tokens // (self.micro_batch_tokens * self.ranks)

    @property
    def steps(self) -> int:
        """Optimiser steps of the run; a last partial batch is not trained on."""
        return self.tokens // self.batch_tokens


@dataclass
class GuardsConfig:
    """What happens to a step that goes wrong; see docs/guards.md."""

    spike_deviations: float = 0.0
    """A step whose loss or gradient norm lies more than this many standard deviations above its mean over the last good
    steps is a spike: its update is left out. 0 takes every finite step as it is; 6 is a common choice."""
    spike_window: int = 128
    """Good steps over which mean and deviation are taken. Before half of them are there, no step is a spike."""
    spike_limit: int = 10
    """More spikes than this within ``guards.spike_span`` steps end the run."""
    spike_span: int = 1000
    """Steps over which ``guards.spike_limit`` counts."""
    nonfinite_limit: int = 0
    """Steps of the whole run whose update may be left out because loss or gradient is not finite; the next one ends the
    run. 0 ends it at the first."""

    def check(self) -> None:
        """Raise ConfigError on values out of range or that contradict each other."""
        at_least("guards.spike_deviations", self.spike_deviations, 0)
        at_least("guards.spike_window", self.spike_window, 4)
        at_most("guards.spike_window", self.spike_window, 1_000_000)
        for name in ("spike_limit", "nonfinite_limit"):
            at_least(f"guards.{name}", getattr(self, name), 0)
        if self.spike_span <= self.spike_limit:
            raise ConfigError(
                f"guards.spike_span is {self.spike_span}; it must be above spike_limit={self.spike_limit}, as there is "
                "one spike a step at most"
            )

    @property
    def leave_out(self) -> bool:
        """Whether any update may be left out."""
        return self.spike_deviations > 0 or self.nonfinite_limit > 0


@dataclass
class ValidationConfig:
    """When and on what the run is validated."""

    split: str = "validation"
    """Split to validate on."""
    every_steps: int = 250
    """Optimiser steps between validations; there is one more after the last step. 0 turns validation off."""
    tokens: int = 1_048_576
    """Validate on at most this many tokens from the start of the split, in whole rows; 0 takes the whole split."""
    micro_batch_tokens: int = 0
    """Tokens that one rank evaluates at once; 0 takes ``training.micro_batch_tokens``."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        for name in ("every_steps", "tokens", "micro_batch_tokens"):
            at_least(f"validation.{name}", getattr(self, name), 0)


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept. The newest whole one is never deleted."""

    every_steps: int = 1000
    """Optimiser steps between checkpoints; there is one more at the end of the run."""
    background: bool = True
    """Write while training goes on, as soon as the state is copied to the host's memory, which must hold it: 12 bytes a
    parameter over all ranks. The last checkpoint of a process is waited for."""
    keep_last: int = 2
    """Newest checkpoints to keep."""
    keep_every_steps: int = 0
    """Also keep, for ever, each checkpoint whose step is a multiple of this; 0 keeps none for ever."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        at_least("checkpoint.every_steps", self.every_steps, 1)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        at_least("checkpoint.keep_every_steps", self.keep_every_steps, 0)
        if self.keep_every_steps % self.every_steps:
            raise ConfigError(
                f"checkpoint.keep_every_steps is {self.keep_every_steps}; it must be a multiple of "
                f"checkpoint.every_steps={self.every_steps}, since no other step has a checkpoint to keep"
            )


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = "offline"
    """``offline`` writes into the run folder (upload it later with ``wandb sync``), ``online`` sends as it goes,
    ``disabled`` does nothing. The key is taken from the environment or ``wandb login``, never from here."""
    project: str = "backfeed"
    """Project of the run."""
    entity: str | None = None
    """User or team; none takes the account's default."""
    group: str | None = None
    """Group of runs that belong together."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""


@dataclass
class LoggingConfig:
    """What is recorded. CSV files in the run folder are always written."""

    every_steps: int = 10
    """Optimiser steps between rows."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""

    def check(self) -> None:
        """Raise ConfigError on values out of range."""
        at_least("logging.every_steps", self.every_steps, 1)


def architecture_configs() -> Mapping[str, type]:
    """Return the dataclass of every architecture's settings, by name."""
    return {name: entry.Config for name, entry in ARCHITECTURES.items()}


def solver_configs() -> Mapping[str, type]:
    """Return the dataclass of every solver's settings, by name."""
    return {name: entry.Config for name, entry in SOLVERS.items()}


def optimizer_configs() -> Mapping[str, type]:
    """Return the dataclass of every optimiser's settings, by name."""
    return {"adamw": AdamWConfig, "muon": MuonConfig}


def learning_rate_configs() -> Mapping[str, type]:
    """Return the dataclass of every learning-rate schedule's settings, by name."""
    return {"constant": ConstantConfig, "cosine": CosineConfig, "wsd": WSDConfig}


@dataclass
class Config:
    """One run, whole."""

    run: RunConfig = field(default_factory=RunConfig)
    """Name and place."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data."""
    model: ArchitectureConfig = chosen_by(ArchitectureConfig, "architecture", architecture_configs)
    """Architecture and size; the settings depend on ``model.architecture``."""
    solver: SolverConfig = chosen_by(SolverConfig, "name", solver_configs)
    """How the recurrence is evaluated; the settings depend on ``solver.name``."""
    schedules: dict[str, list[Stage]] = field(default_factory=dict)
    """Settings of the solver that change over the run, each as a list of stages: ``interval: [{at: 0, value: 64},
    {at: 0.5, value: 1}]`` anneals the feedback interval, ``passes: [{at: 0, value: 1}, {at: 0.75, draw: [2, 3],
    weights: [0.88, 0.12]}]`` brings feedback in late. A scheduled setting takes its value from here alone. An empty
    list takes a schedule of an earlier file away."""
    optimizer: OptimizerConfig = chosen_by(OptimizerConfig, "name", optimizer_configs)
    """Optimiser; the settings depend on ``optimizer.name``."""
    learning_rate: LearningRateConfig = chosen_by(LearningRateConfig, "name", learning_rate_configs)
    """Learning-rate schedule; the settings depend on ``learning_rate.name``."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Length, batch, precision and ranks."""
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    """Steps that go wrong: spikes, and losses that are no numbers."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Validation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Records."""

    def check(self) -> None:
        """Raise ConfigError where settings of different sections contradict each other."""
        length = self.data.sequence_length
        at_most("learning_rate.warmup_tokens", self.learning_rate.warmup_tokens, self.training.tokens)
        for section, name in (("training", "micro_batch_tokens"), ("validation", "micro_batch_tokens")):
            value = getattr(getattr(self, section), name)
            if value % length:
                raise ConfigError(
                    f"{section}.{name} is {value}; it must be a multiple of data.sequence_length={length}"
                )
        samples = self.training.steps * (self.training.batch_tokens // length)
        if (unreachable := self.data.first_unreachable_skip(samples)) is not None:
            raise ConfigError(
                f"data.skip_samples holds {unreachable}, but the run ends before it: it trains on {samples} samples; "
                "take the range out"
            )
        if self.training.zero_stage and isinstance(self.optimizer, MuonConfig):
            raise ConfigError(
                f"optimizer.name is muon, which needs whole matrices; {self.training.strategy} divides them: set "
                "training.strategy=ddp, or optimizer.name=adamw"
            )
        solver = SOLVERS[self.solver.name]
        solver.check_fits(self.solver, ARCHITECTURES[self.model.architecture])
        solver.check_schedules(self.solver, self.stages)
        defaults = type(self.solver)(name=self.solver.name)
        for name in self.stages:
            value = getattr(self.solver, name)
            if value != getattr(defaults, name):
                raise ConfigError(
                    f"solver.{name} is {value}, but schedules.{name} gives it its values; leave one of them out "
                    f"(schedules.{name}=[] takes the schedule away)"
                )
        self._check_uses()

    def _check_uses(self) -> None:
        """Raise ConfigError on settings that others make useless."""
        if self.model.tied_head and isinstance(self.optimizer, MuonConfig):
            for name in ("head_peak", "head_weight_decay"):
                if getattr(self.optimizer, name) is not None:
                    raise ConfigError(
                        f"optimizer.{name} is set, but model.tied_head is true: there is no head of its own"
                    )
        once = not self.stages.get("passes") and getattr(self.solver, "passes", 2) == 1
        if once and getattr(self.solver, "convergence_weight", 0):
            raise ConfigError("solver.convergence_weight is set; it has no use with solver.passes=1")

    @property
    def stages(self) -> dict[str, list[tuple[float, Any]]]:
        """The schedules as (fraction of the run's tokens, value or mixture of values); empty ones are left out."""
        return {
            name: [(stage.at, stage.setting(name)) for stage in stages]
            for name, stages in self.schedules.items()
            if stages
        }


# Settings that may differ when a run is resumed: they change neither what is learnt nor in which order, or they mend a
# run that went wrong. Everything else belongs to the run's identity.
CHANGEABLE_ON_RESUME = (
    "run.root",
    "data.path",  # the manifest's fingerprint says whether it is the same data
    "data.workers",
    "data.skip_samples",  # what is ahead may be left out or not; the saved position holds what is behind
    "training.micro_batch_tokens",
    "training.accelerator",
    "training.strategy",
    "training.offload_optimizer",
    "training.offload_parameters",
    "training.nvme_path",
    "training.deepspeed",
    "training.timeout_seconds",
    "training.silence_seconds",
    "training.grace_seconds",
    "training.devices",
    "training.nodes",
    "training.threads",
    "guards",
    "solver.activation_checkpointing",
    "solver.segment_length",
    "solver.loop",
    "solver.capture",
    "validation",
    "checkpoint",
    "logging",
)


def at_least(key: str, value: float, bound: float) -> None:
    """Raise ConfigError unless ``value`` is at least ``bound``."""
    if value < bound:
        raise ConfigError(f"{key} is {value}; it must be at least {bound}")


def at_most(key: str, value: float, bound: float) -> None:
    """Raise ConfigError if ``value`` is above ``bound``."""
    if value > bound:
        raise ConfigError(f"{key} is {value}; it must be at most {bound}")


def above_zero(key: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is above 0."""
    if value <= 0:
        raise ConfigError(f"{key} is {value}; it must be above 0")


def below_one(key: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ConfigError(f"{key} is {value}; it must be at least 0 and below 1")
