"""Weights and optimiser states of a run by parameter, whole and in float32, however the ranks hold them.

So a checkpoint does not know how many ranks wrote it, or under which strategy, and any number of ranks under any other
go on from it. Replicas hold all there is; ZeRO cuts it up (Rajbhandari et al. 2020), and DeepSpeed's own functions put
a parameter together or take it apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.errors import RunError
from pipeline.runs.tensors import TensorShape

STEP = "step"  # the one state of torch's optimisers that is a number: updates done, for Adam's bias correction


class TrainingState(ABC):
    """What a run consists of beside its position.

    Every rank makes the same calls in the same order: some of them are collective.

    Args:
        shapes: shape of every parameter, by name, in the model's order.
        optimizer: torch's optimiser.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], optimizer: Optimizer) -> None:
        self.shapes = shapes
        self.optimizer = optimizer

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """Return a weight whole, float32: the master where passes use another type."""

    @abstractmethod
    def set_weight(self, name: str, value: Tensor) -> None:
        """Set a weight from its whole value; ``commit`` lets passes see it."""

    @abstractmethod
    def moments(self, name: str) -> dict[str, Tensor]:
        """Return what the optimiser keeps of a parameter, whole; nothing before its first update."""

    @abstractmethod
    def moment_shapes(self, name: str) -> dict[str, TensorShape]:
        """Return the shapes of ``moments``, without a word to the other ranks."""

    @abstractmethod
    def set_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set what the optimiser keeps of all parameters; of those that are missing it keeps nothing.

        Raises:
            RunError: they cannot be held in parts as the ranks hold them.
        """

    def commit(self) -> None:  # noqa: B027 (where passes use the weights themselves, nothing is to do)
        """Let passes use the weights that were set."""

    def close(self) -> None:  # noqa: B027 (likewise)
        """Put away what was read from disk; called when all that is needed was read."""

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimiser's settings of each group: rates, decays."""
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]

    def set_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Set the optimiser's settings of each group."""
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(values)


class ReplicatedState(TrainingState):
    """Every rank has all of it.

    Args:
        parameters: of the model, by name.
        optimizer: torch's optimiser over them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        super().__init__({name: each.shape for name, each in parameters.items()}, optimizer)
        self._parameters = parameters

    def weight(self, name: str) -> Tensor:
        """See ``TrainingState.weight``."""
        return self._parameters[name].detach()

    def set_weight(self, name: str, value: Tensor) -> None:
        """See ``TrainingState.set_weight``."""
        with torch.no_grad():
            self._parameters[name].copy_(value)

    def moments(self, name: str) -> dict[str, Tensor]:
        """See ``TrainingState.moments``."""
        return dict(self.optimizer.state.get(self._parameters[name], {}))

    def moment_shapes(self, name: str) -> dict[str, TensorShape]:
        """See ``TrainingState.moment_shapes``."""
        return {key: TensorShape(tuple(each.shape), each.dtype) for key, each in self.moments(name).items()}

    def set_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See ``TrainingState.set_moments``."""
        saved = self.optimizer.state_dict()
        order = [each for group in self.optimizer.param_groups for each in group["params"]]
        names = {parameter: name for name, parameter in self._parameters.items()}
        saved["state"] = {
            number: dict(moments[names[parameter]])
            for number, parameter in enumerate(order)
            if moments.get(names[parameter])
        }
        self.optimizer.load_state_dict(saved)


class PartitionedState(TrainingState):
    """ZeRO: flat groups of parameters in float32, of which every rank holds a part, with the optimiser's state of it.

    Args:
        shapes: see ``TrainingState``.
        engine: DeepSpeed's, whose module has the parameters.
        parameters: the same by name, as the module holds them.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], engine: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self._zero = engine.optimizer
        super().__init__(shapes, self._zero.optimizer)
        self._parameters = parameters

    @abstractmethod
    def _flat(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of the flat group that a parameter lies in."""

    def moment_shapes(self, name: str) -> dict[str, TensorShape]:
        """See ``TrainingState.moment_shapes``."""
        return {
            key: TensorShape(() if key == STEP else tuple(self.shapes[name]))
            for key in self._held(self._parameters[name])
        }

    def _held(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return this rank's part of the optimiser's state of a parameter's group; nothing before the first update."""
        found: dict[str, Any] = self.optimizer.state.get(self._flat(parameter), {})
        return found if float(found.get(STEP, 1)) else {}

    def _make_room(self, flat: Tensor, first: Mapping[str, Tensor]) -> None:
        """Give a flat part states, of zeros, where its first parameter has any, and its count of updates."""
        fused = bool(self.optimizer.defaults.get("fused"))
        held = self.optimizer.state[flat]
        for key in first:
            if key == STEP:
                held[key] = first[key].reshape(()).float().to(flat.device if fused else "cpu", copy=True)
            elif key not in held:
                held[key] = torch.zeros_like(flat, requires_grad=False)
        if STEP in held and not first:  # DeepSpeed may have made it by an update that moved nothing
            held[STEP].zero_()

    def _by_flat(self, moments: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[Tensor, list[str]]]:
        """Return this rank's flat parts, each with the names of its parameters, all of which have had equal updates."""
        found: dict[int, tuple[Tensor, list[str]]] = {}
        for name, parameter in self._parameters.items():
            flat = self._flat(parameter)
            found.setdefault(id(flat), (flat, []))[1].append(name)
        for _, names in found.values():
            steps = {float(moments.get(name, {}).get(STEP, 0)): name for name in names}
            if len(steps) > 1:
                told = " and ".join(f"{name} {step:.0f}" for step, name in steps.items())
                raise RunError(f"ZeRO keeps one count of updates a group, but the checkpoint has others: {told}")
        return list(found.values())


class PartitionedGradients(PartitionedState):
    """ZeRO-1 and ZeRO-2: passes use whole weights."""

    def __init__(self, shapes: Mapping[str, torch.Size], engine: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(shapes, engine, parameters)
        self._group = {id(each): number for number, group in enumerate(self._zero.bit16_groups) for each in group}

    def weight(self, name: str) -> Tensor:
        """See ``TrainingState.weight``."""
        from deepspeed.utils import safe_get_full_fp32_param

        found: Tensor = safe_get_full_fp32_param(self._parameters[name])
        return found.detach().view(self.shapes[name])

    def moments(self, name: str) -> dict[str, Tensor]:
        """See ``TrainingState.moments``."""
        from deepspeed.utils import safe_get_full_optimizer_state

        # DeepSpeed looks at the states once, after the first update, when some groups may have been asleep.
        self._zero._hp_optimizer_states_linked = False
        self._zero._lazy_init_hp_params_optimizer_state()
        parameter = self._parameters[name]
        return {
            key: (
                self._held(parameter)[key].reshape(()).float()
                if key == STEP
                else safe_get_full_optimizer_state(parameter, key).detach().view(self.shapes[name])
            )
            for key in self.moment_shapes(name)
        }

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        found: Tensor = self._zero.single_partition_of_fp32_groups[self._group[id(parameter)]]
        return found

    def set_weight(self, name: str, value: Tensor) -> None:
        """See ``TrainingState.set_weight``."""
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(self._parameters[name], value)

    def set_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See ``TrainingState.set_moments``."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for flat, names in self._by_flat(moments):
            self._make_room(flat, moments.get(names[0], {}))
        if not any(moments.values()):
            return
        self._zero._lazy_init_hp_params_optimizer_state()
        for name, parameter in self._parameters.items():
            for key, value in moments.get(name, {}).items():
                if key != STEP:
                    safe_set_full_optimizer_state(parameter, value.to(self._flat(parameter)), key)

    def commit(self) -> None:
        """See ``TrainingState.commit``."""
        self._zero.update_lp_params()


class PartitionedWeights(PartitionedState):
    """ZeRO-3: passes use weights that are gathered for them.

    What is offloaded to disk is held in groups, of which one at a time is read; so ``shapes`` goes group by group.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], engine: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(shapes, engine, parameters)
        self.shapes = {name: shapes[name] for name in sorted(shapes, key=lambda each: self._place(each)[0])}
        self._read: int | None = None
        self._changed = False

    def weight(self, name: str) -> Tensor:
        """See ``TrainingState.weight``."""
        return self._whole(name, self._part(name))

    def moments(self, name: str) -> dict[str, Tensor]:
        """See ``TrainingState.moments``."""
        held = self._held(self._parameters[name])
        return {
            key: held[key].reshape(()).float() if key == STEP else self._whole(name, self._part(name, key))
            for key in held
        }

    def set_weight(self, name: str, value: Tensor) -> None:
        """See ``TrainingState.set_weight``."""
        self._set(name, None, value)

    def set_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See ``TrainingState.set_moments``."""
        for flat, names in self._by_flat(moments):
            self._open(self._place(names[0])[0], changed=True)
            self._make_room(flat, moments.get(names[0], {}))
            for name in names:
                for key, value in moments.get(name, {}).items():
                    if key != STEP:
                        self._set(name, key, value)
        self.close()

    def commit(self) -> None:
        """See ``TrainingState.commit``."""
        for number in range(len(self._zero.fp32_partitioned_groups_flat)):
            self._open(number, changed=False)
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        self.close()
        self._zero.parameter_offload.empty_partition_cache()

    def close(self) -> None:
        """See ``TrainingState.close``."""
        if self._read is None:
            return
        if self._changed:
            self._zero._optimizer_states_and_gradient_swap_out(self._read)
        else:
            self._zero._release_swap_buffers(self._read)
        self._read, self._changed = None, False

    def _place(self, name: str) -> tuple[int, int, int]:
        """Return a parameter's group, and where this rank's part of it begins there, and its size."""
        found: tuple[int, int, int] = self._zero.grad_position[self._zero.get_param_id(self._parameters[name])]
        return found

    def _open(self, group: int, changed: bool) -> None:
        """Have a group in memory, and write it back later if it is changed."""
        if not self._zero._swappable_optimizer_subgroup(group):
            return
        if self._read != group:
            self.close()
            self._zero._optimizer_states_and_gradient_swap_in(group)
            self._read = group
        self._changed = self._changed or changed

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        found: Tensor = self._zero.fp32_partitioned_groups_flat[
            self._zero.grad_position[self._zero.get_param_id(parameter)][0]
        ]
        return found

    def _part(self, name: str, key: str | None = None, changed: bool = False) -> Tensor:
        """Return this rank's part of a master weight, or of a state."""
        group, first, size = self._place(name)
        self._open(group, changed)
        flat = self._zero.fp32_partitioned_groups_flat[group]
        source: Tensor = flat if key is None else self.optimizer.state[flat][key]
        return source.detach().narrow(0, first, size)

    def _whole(self, name: str, part: Tensor) -> Tensor:
        device = self._zero.device if self._zero.device != "cpu" else torch.device("cpu")
        found: Tensor = self._zero._fp32_state_allgather(self._parameters[name], part.to(device))
        return found.view(self.shapes[name])

    def _set(self, name: str, key: str | None, value: Tensor) -> None:
        part = self._part(name, key, changed=True)
        first = len(part) * self._zero._get_param_partition_rank(self._parameters[name])
        own = value.flatten()[first : first + len(part)]
        part.zero_()  # the last rank's ends in zeros where it does not come out even
        part[: len(own)].copy_(own)
