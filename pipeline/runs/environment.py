"""What a run ran with: versions, machine, command line and the state of the code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pipeline

PACKAGES = ("torch", "lightning", "numpy", "omegaconf", "tokenizers", "webdataset", "wandb", "safetensors", "deepspeed")
# Of the environment only what explains where a run ran; never the whole, which may hold keys.
VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_RESTART_COUNT")


def environment() -> dict[str, Any]:
    """Return the environment as plain values."""
    return {
        "backfeed": pipeline.__version__,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def installed(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_state() -> tuple[dict[str, Any], str]:
    """Return commit, branch and whether the code differs from it, and the difference as a patch ("" if none).

    It is that of the repository which holds this package; empty where the package was installed without one.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {}, ""
    patch = _git("diff", "HEAD") or ""
    untracked = (_git("ls-files", "--others", "--exclude-standard") or "").split("\n")
    state = {
        "commit": commit.strip(),
        "branch": (_git("rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "changed": bool(patch),
        "untracked": [name for name in untracked if name],
    }
    return state, patch


def _git(*arguments: str) -> str | None:
    folder = Path(pipeline.__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
