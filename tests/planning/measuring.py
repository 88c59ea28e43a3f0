"""``backfeed train`` that also measures what a rank holds: after its second step, and at most during the third.

Usage: python -m tests.planning.measuring FILE ARGUMENTS OF BACKFEED...
Writes FILE.RANK: bytes of all tensors after the step by who holds them, and the most alive at once in the next.
"""

import gc
import json
import sys

import torch

from pipeline import cli
from pipeline.bench.live_memory import LiveMemory
from pipeline.training.callbacks.steps import StepCallback
from pipeline.training.module import PretrainingModule


def held():
    """Return the bytes of all tensors that Python knows of, each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.layout is torch.strided and not each.is_meta:
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def main() -> int:
    path, arguments = sys.argv[1], sys.argv[2:]
    plain_step, plain_end = PretrainingModule.training_step, StepCallback.on_train_batch_end
    memory = LiveMemory()
    before: list[int] = []

    def training_step(self, batch, batch_idx):
        if not before:
            before.append(0)
        if self.trainer.global_step == 2 and len(before) == 1:
            self.zero_grad()  # as the step itself will begin
            before.append(held())
            memory.__enter__()
        return plain_step(self, batch, batch_idx)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        last = (batch_idx + 1) % module.config.training.accumulation == 0
        if last and type(self).__name__ == "DataPosition" and trainer.global_step == 3:
            memory.__exit__(None, None, None)
            found = {"states": before[1], "peak": before[1] + memory.peak}
            with open(f"{path}.{trainer.global_rank}", "w") as file:
                file.write(json.dumps(found))
        return plain_end(self, trainer, module, outputs, batch, batch_idx)

    PretrainingModule.training_step = training_step
    StepCallback.on_train_batch_end = on_train_batch_end
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
