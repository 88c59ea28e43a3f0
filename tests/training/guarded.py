"""Training with steps spoiled on purpose, and a record of all weights and states of the optimiser after each step.

Usage, for a rank in a process of its own: python -m tests.training.guarded SPEC ARGUMENTS OF BACKFEED...
"""

import hashlib
import json
import sys

from pipeline import cli
from pipeline.training.callbacks.data_position import DataPosition
from pipeline.training.module import PretrainingModule
from pipeline.training.strategies import resumable


def install(put, spoil=(), drop=(), record=None):
    """Patch training.

    Args:
        put: sets an attribute, as ``setattr`` does.
        spoil: (step, rank, micro-batch, factor) of the losses to multiply.
        drop: steps whose update is withheld by hand: the optimiser gets no gradients.
        record: called with (rank, what was seen and come to) after each step.
    """
    spoil = {(step, rank, micro): factor for step, rank, micro, factor in spoil}
    plain_step = PretrainingModule.training_step
    plain_clip = PretrainingModule.configure_gradient_clipping
    plain_end = DataPosition.on_step_end
    seen = []

    def training_step(self, batch, batch_idx):
        step, micro = divmod(batch_idx, self.config.training.accumulation)
        if micro == 0:
            seen.clear()
        seen.extend(batch["samples"].tolist())
        loss = plain_step(self, batch, batch_idx)
        factor = spoil.get((step + 1, self.global_rank, micro))
        if factor is None:
            return loss
        self.step_mean = self.step_mean.scaled(factor)
        return loss * factor

    def configure_gradient_clipping(self, *arguments, **settings):
        plain_clip(self, *arguments, **settings)
        if self.trainer.global_step + 1 in drop:
            for parameter in self.parameters():
                parameter.grad = None

    def on_step_end(self, trainer, module, step):
        if record is not None:
            rates = [group["lr"] for group in resumable(trainer).state.groups()]
            entry = {"step": step, "samples": list(seen), "rates": rates, "hash": content(trainer)}
            record(trainer.global_rank, entry)
        plain_end(self, trainer, module, step)

    put(PretrainingModule, "training_step", training_step)
    put(PretrainingModule, "configure_gradient_clipping", configure_gradient_clipping)
    put(DataPosition, "on_step_end", on_step_end)


def content(trainer):
    """Return the hash of all weights and of all that the optimiser keeps of them, whichever rank has them."""
    found, state = hashlib.sha256(), resumable(trainer).state
    for name in state.shapes:
        kept = {"": state.weight(name), **state.moments(name)}
        for key, value in sorted(kept.items()):
            found.update(f"{name}/{key}".encode() + value.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> int:
    spec, arguments = json.loads(sys.argv[1]), sys.argv[2:]

    def record(rank, entry):
        with open(f"{spec['record']}.{rank}", "a") as file:
            file.write(json.dumps(entry) + "\n")

    install(setattr, spec.get("spoil", ()), spec.get("drop", ()), record)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
