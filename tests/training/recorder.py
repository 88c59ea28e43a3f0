"""``backfeed train`` that also writes down what every step of this rank has seen, run with and come to.

Usage: python -m tests.training.recorder FILE ARGUMENTS OF BACKFEED...
"""

import hashlib
import json
import sys

import torch

from pipeline import cli
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.module import PretrainingModule


def entry(trainer, module, seen):
    """Return a step's number, samples, settings of the solver, and the hash of the weights after it."""
    weights = torch.cat([parameter.detach().flatten() for parameter in module.model.parameters()])
    return {
        "step": trainer.global_step,
        "samples": seen,
        "solver": module.solver.settings(),
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }


def main() -> int:
    path, arguments = sys.argv[1], sys.argv[2:]
    plain_step, plain_end = PretrainingModule.training_step, StepCallback.on_train_batch_end
    seen: list[int] = []

    def training_step(self, batch, batch_idx):
        if batch_idx % self.config.training.accumulation == 0:
            seen.clear()
        seen.extend(batch["samples"].tolist())
        return plain_step(self, batch, batch_idx)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        last = (batch_idx + 1) % module.config.training.accumulation == 0
        if last and type(self).__name__ == "DataPosition":
            with open(f"{path}.{trainer.global_rank}", "a") as file:
                file.write(json.dumps(entry(trainer, module, seen)) + "\n")
        return plain_end(self, trainer, module, outputs, batch, batch_idx)

    PretrainingModule.training_step = training_step
    StepCallback.on_train_batch_end = on_train_batch_end
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
