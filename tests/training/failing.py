"""``backfeed train`` in which something happens to one rank at a named place of the run.

Usage: python -m tests.training.failing PLAN FILE ARGUMENTS OF BACKFEED...

PLAN is JSON: ``rank``, ``step``, ``phase`` (of ``pipeline.training.phases``), ``action``, and, if it is to happen
within the phase rather than at its begin, ``delay`` in seconds. FILE is that of ``tests.training.recorder``, or ``-``.
"""

import contextlib
import ctypes
import errno
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import torch.distributed as dist

from pipeline import cli
from pipeline.training import phases
from pipeline.training.module import PretrainingModule
from tests.training import recorder


def act(action: str) -> None:
    """Do to this process what the plan says."""
    if action.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, action))
    elif action == "sleep":  # hangs, and lets other threads run
        time.sleep(10_000)
    elif action == "lock":  # hangs, and holds Python's lock
        ctypes.PyDLL(None).sleep(10_000)
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/model.safetensors")
    elif action == "error":
        raise ArithmeticError("a fault of the program")
    elif action == "slow":  # longer than the silence that the others bear
        time.sleep(5)
    elif action == "pause":  # the whole job, for longer than that
        group = os.getpgid(0)
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP -{group}; sleep 5; kill -CONT -{group}"], process_group=0)
    elif action == "nan":
        for each in gc.get_objects():
            if isinstance(each, PretrainingModule):
                next(each.parameters()).data.fill_(math.nan)
    elif action == "exit":
        os._exit(3)
    else:
        raise AssertionError(action)


def follow(plan: dict) -> None:
    """Let the plan happen."""
    if plan["phase"] == phases.START and os.environ.get("LOCAL_RANK") == str(plan["rank"]):
        act(plan["action"])
    plain = phases.enter

    def enter(phase: str, step: int | None = None) -> None:
        plain(phase, step)
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("LOCAL_RANK", 0))
        if (rank, phases.now().step, phase) == (plan["rank"], plan["step"], plan["phase"]):
            if plan.get("delay"):
                threading.Timer(plan["delay"], act, [plan["action"]]).start()
            else:
                act(plan["action"])

    phases.enter = enter


def main() -> int:
    plan, record, arguments = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if plan.get("action"):
        follow(plan)
    if record == "-":
        return cli.main(arguments)
    with contextlib.suppress(IndexError):
        sys.argv[1:] = [record, *arguments]
    return recorder.main()


if __name__ == "__main__":
    sys.exit(main())
