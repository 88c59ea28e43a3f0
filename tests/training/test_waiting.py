"""No step of training waits for the device.

The models lie on the meta device: a tensor there has no values, so that whoever asks for one fails, as ``item``,
``tolist``, ``bool`` and indexing by a mask do. Copies to it that a GPU would wait for are counted.
"""

import sys
import traceback
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import solvers
from pipeline.data.manifest import Manifest
from pipeline.errors import ConfigError
from pipeline.models import ARCHITECTURES
from pipeline.models.base import build_on_meta
from pipeline.runs.folder import RunFolder
from pipeline.solvers import SOLVERS
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.solvers.interleaved import InterleavedConfig
from pipeline.solvers.parallel import ParallelConfig
from pipeline.solvers.unrolled import UnrolledConfig
from pipeline.training import optimizers, strategies
from pipeline.training.assembly import Assembly
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.objective import objective
from pipeline.training.sleeping import AdamW
from pipeline.training.train import quieten, with_vocabulary
from tests.support import MODELS, run_config

ROWS, LENGTH = 2, 9
META = torch.device("meta")
ORDERS = [
    ParallelConfig("parallel"),
    ChunkedConfig("chunked"),
    ChunkedConfig("chunked", interval=3),
    ChunkedConfig("chunked", interval=3, loop="autograd"),
    ChunkedConfig("chunked", interval=2, truncation=4, activation_checkpointing=True),
    UnrolledConfig("unrolled", passes=2, loss="plain_and_fed", prefix=0.5),
    UnrolledConfig("unrolled", passes=5, convergence_weight=0.1),
    InterleavedConfig("interleaved"),
    InterleavedConfig("interleaved", subsets=3, refresh_keys_values=True),
]


def fits(config, name):
    try:
        SOLVERS[config.name].check_fits(config, ARCHITECTURES[name])
    except ConfigError:
        return False
    return True


PAIRS = [(name, config) for name in sorted(MODELS) for config in ORDERS if fits(config, name)]


class Copies(TorchDispatchMode):
    """Notes copies from the host to the device that wait for it."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            waits = not (kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and args[2:] == (True,)))
            if source.device != META and result.device == META and waits:
                self.found.append("".join(traceback.format_stack(limit=8)))
        return result


class Constants(TorchFunctionMode):
    """Notes tensors that are made on the device from values on the host."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor) and result.device == META:
            self.found.append("".join(traceback.format_stack(limit=8)))
        return result


@contextmanager
def watched():
    """Fail if the block makes a copy to the device that waits for it."""
    found = []
    with ExitStack() as stack:
        stack.enter_context(Copies(found))
        stack.enter_context(Constants(found))
        yield
    assert not found, found[0]


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("name", "config"), PAIRS, ids=[f"{name}-{solvers.build(config)}" for name, config in PAIRS])
def test_no_pair_waits(name, config, packed):
    starts = None
    if packed:
        starts = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        starts[0, 4:], starts[1, 5:], starts[1, 7:] = 4, 5, 7
    model = build_on_meta(next(iter(ARCHITECTURES[name].variants().values()))).double().train()
    solver = solvers.build(config)
    solver.adapt(model)
    tokens = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64, device=META)
    with watched():
        objective(model, solver, tokens, starts).value.backward()
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


def test_the_watch_sees():
    values = torch.zeros(2, device=META)
    for ask in (lambda: bool(values.any()), lambda: values[0].item(), lambda: values[values > 0], lambda: values.cpu()):
        with pytest.raises((RuntimeError, NotImplementedError)), watched():
            ask()
    for copy in (
        lambda: torch.zeros(2).to(META),
        lambda: values.copy_(torch.zeros(2)),
        lambda: torch.tensor([1.0], device=META),
        lambda: values.new_tensor([1.0]),
    ):
        with pytest.raises(AssertionError), watched():
            copy()
    with watched():
        torch.zeros(2).to(META, non_blocking=True)


class OnMeta(strategies.Resumable, SingleDeviceStrategy):
    """One process, on the meta device."""

    def __init__(self):
        super().__init__(META)

    def setup_environment(self):
        """Do without the accelerator, which knows no such device."""

    def setup(self, trainer):
        """Take float64, which on this device alone goes the way that float32 goes on others."""
        self.lightning_module.double()
        super().setup(trainer)

    def reduce(self, tensor, *args, **kwargs):
        """Answer what Lightning asks once, before the first step: whether there are batches."""
        return torch.ones(())

    def teardown(self):
        """Leave the weights where they are: they cannot be copied back."""


class EnoughError(Exception):
    """The steps that were to be watched are done."""


class Steps(StepCallback):
    """Watches all steps from the second on, from the end of one to the end of the next; ends the run after some."""

    def __init__(self, count):
        self._count = count
        self._watch = None
        self.done = 0

    def on_step_end(self, trainer, module, step):
        assert module.device == META
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self.done += 1
        if self.done == self._count:
            raise EnoughError
        self._watch = watched()
        self._watch.__enter__()


GUARDED = [("rlt", "adamw", True), ("rlt", "muon", True)]
RUNS = [(name, optimizer, False) for name in sorted(MODELS) for optimizer in ("adamw", "muon")] + GUARDED


@pytest.mark.parametrize(("architecture", "optimizer", "guarded"), RUNS)
def test_no_step_of_a_run_waits(tmp_path, data, monkeypatch, architecture, optimizer, guarded):
    """Callbacks, clipping, optimiser, schedules and guards included; what is logged, validated or saved may wait."""
    monkeypatch.setattr(strategies, "build", lambda *run: OnMeta())
    if guarded:  # the optimiser of GPUs, which leaves a step out on the device
        monkeypatch.setattr(sys.modules[Optimizer.__module__], "_get_fused_kernels_supported_devices", lambda: ["meta"])
        monkeypatch.setattr(optimizers, "AdamW", lambda groups, fused, **rest: AdamW(groups, fused=True, **rest))
    never = 1000
    config = run_config(
        tmp_path,
        data,
        f"optimizer.name={optimizer}",
        f"training.tokens={128 * never}",
        "training.micro_batch_tokens=64",
        *(f"{what}.every_steps={never}" for what in ("validation", "checkpoint", "logging")),
        *(["solver.interval=4"] if architecture == "rlt" else []),
        *(["guards.spike_deviations=6", "guards.nonfinite_limit=1"] if guarded else []),
        architecture=architecture,
    )
    manifest = Manifest.load(data)
    config = replace(config, model=with_vocabulary(config.model, manifest))
    quieten()
    folder = RunFolder(config.run.folder)
    folder.open(config, "never", manifest.fingerprint)
    assembly = Assembly(config, folder, manifest, lambda state: None)
    steps = Steps(3)
    assembly.trainer.callbacks.append(steps)
    try:
        with pytest.raises(EnoughError):
            assembly.trainer.fit(assembly.module, train_dataloaders=assembly.loader)
    finally:
        assembly.close()
        folder.close()
    assert steps.done == 3
