"""The fast loop gives every parameter one gradient, once: what replicas and sharding of states and weights wait for.

Two real processes over gloo, each a process of its own that never touches the tests'.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.models import ARCHITECTURES, Architecture
from pipeline.solvers import build
from pipeline.solvers.chunked import ChunkedConfig
from pipeline.training.drawing import draw_weights
from pipeline.training.objective import objective
from tests.solvers.loop_cases import FEEDING, count_as_many
from tests.support import environment

RANKS, ROWS, LENGTH, STEPS = 2, 2, 13, 8
LOOPS: dict[str, dict[str, Any]] = {
    "autograd": {"loop": "autograd"},
    "fast": {"loop": "fast"},
    "segments": {"loop": "fast", "activation_checkpointing": True},
    "sparing": {"loop": "fast", "activation_checkpointing": True, "segment_length": 4},
}
with_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")


# ---------------------------------------------------------------- in the processes


class Trained(nn.Module):
    """A model under its solver and its loss: all that is done with its weights."""

    def __init__(self, architecture: str, loop: str, interval: int) -> None:
        super().__init__()
        if loop == "sparing":
            count_as_many(pytest.MonkeyPatch())
        cls = ARCHITECTURES[architecture]
        self.model: Architecture = cls(cls.variants()["plain"])
        draw_weights(self.model, 0)
        self.solver = build(ChunkedConfig("chunked", interval=interval, **LOOPS[loop]))
        self.solver.adapt(self.model)

    def forward(self, tokens: Tensor, anchor: Tensor) -> Tensor:
        """Return the objective. ``anchor`` is zero; its gradient comes last, after all weights'."""
        return objective(self.model, self.solver, tokens, None).value + anchor


class Root(nn.Module):
    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.trained = trained

    def forward(self, tokens: Tensor) -> Tensor:
        return self.trained(tokens, torch.zeros((), requires_grad=True))


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(29, (ROWS, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def replicated(rank: int) -> dict[str, float]:
    """Return for each case how far the replicas' gradient is from the mean of two processes', computed here."""
    torch.distributed.init_process_group("gloo")
    found = {}
    for architecture in FEEDING:
        for loop in LOOPS:
            trained = Root(Trained(architecture, loop, interval=2))
            trained.trained.model.eval()  # no jitter: each rank's draws would be another's
            expected = [torch.zeros_like(each) for each in trained.parameters()]
            for other in range(RANKS):
                for tokens in batches(other)[:2]:
                    gradients = torch.autograd.grad(trained(tokens), list(trained.parameters()), allow_unused=True)
                    for total, each in zip(expected, gradients, strict=True):
                        total += 0 if each is None else each / RANKS
            replicas = nn.parallel.DistributedDataParallel(
                trained, gradient_as_bucket_view=True, find_unused_parameters=False, bucket_cap_mb=1
            )
            first, second = batches(rank)[:2]
            with replicas.no_sync():
                replicas(first).backward()
            replicas(second).backward()
            differences = [
                float((each.grad - total).abs().max() / total.abs().max().clamp(min=1e-3))
                for each, total in zip(trained.parameters(), expected, strict=True)
                if each.grad is not None
            ]
            found[f"{architecture} {loop}"] = max(differences)
    return found


def sharded(rank: int) -> dict[str, list[float]]:
    """Return the losses of every stage of ZeRO and every loop."""
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    logging.disable(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    found = {}
    for architecture in ("rlt", "lrt"):
        for stage in (1, 2, 3):
            for loop in LOOPS:
                root = Root(Trained(architecture, loop, interval=2))
                set_z3_leaf_modules(root, [Trained])  # gathered once a pass, not once for each of its parts
                settings = {
                    "train_micro_batch_size_per_gpu": ROWS,
                    "gradient_accumulation_steps": 2,
                    "gradient_clipping": 0.5,
                    "zero_force_ds_cpu_optimizer": False,
                    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                }
                optimizer = torch.optim.AdamW(root.parameters(), lr=1e-2)
                engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=settings)
                losses = []
                for tokens in batches(rank):
                    loss = engine(tokens)
                    engine.backward(loss)
                    engine.step()
                    losses.append(float(loss))
                engine.destroy()
                found[f"{architecture} {stage} {loop}"] = losses
    return found


def work() -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    found = {"replicated": replicated, "sharded": sharded}[sys.argv[1]](rank)
    Path(f"{sys.argv[2]}/{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- in the tests' process


def in_processes(what: str, folder: Path) -> list[dict[str, Any]]:
    """Run a function above in two processes; return what it returned in each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.test_loop_distributed", what, str(folder)],
            env={
                **environment(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "DS_ACCELERATOR": "cpu",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_replicas_have_the_gradient_of_one_process(tmp_path):
    for found in in_processes("replicated", tmp_path):
        assert len(found) == len(FEEDING) * len(LOOPS)
        for case, difference in found.items():
            assert difference < 1e-4, case


@with_deepspeed
def test_sharded_training_has_the_losses_of_autograd(tmp_path):
    """ZeRO 1, 2 and 3 with accumulation, clipping and AdamW."""
    for found in in_processes("sharded", tmp_path):
        for case, losses in found.items():
            architecture, stage, _ = case.split()
            assert losses == pytest.approx(found[f"{architecture} {stage} autograd"], rel=1e-5), case
            assert losses[0] != losses[-1]


if __name__ == "__main__":
    work()
