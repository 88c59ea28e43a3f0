"""Other projects' packages: whether they are here, and how they come here without changing what is.

Two extras of this package name them. ``peers`` are packages whose requirements fit ours. ``peers-alone`` are those
that pin other versions of packages of ours (of huggingface_hub, say) though they run with these, and what they need
beside: they are installed without their requirements.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from pipeline.errors import UserError

DISTRIBUTION = "backfeed"
WITH_REQUIREMENTS, ALONE = "peers", "peers-alone"


def version(distribution: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(distribution: str) -> bool:
    """Return whether a package is not installed."""
    return version(distribution) is None


def requirements(extra: str) -> list[str]:
    """Return what an extra of this package names.

    Raises:
        UserError: this package was installed before it had that extra.
    """
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    found = []
    for line in lines:
        requirement = Requirement(line)
        # The extra is the one condition that these have.
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            if requirement.marker.evaluate({"extra": ""}):
                continue
            requirement.marker = None
            found.append(str(requirement))
    if not found:
        raise UserError(f"this installation of {DISTRIBUTION} names no {extra}; install it again (make setup)")
    return found


def absent(extra: str) -> list[str]:
    """Return what an extra names that is not installed, in any version: what is here stays as it is."""
    return [each for each in requirements(extra) if missing(Requirement(each).name)]


def install() -> None:
    """Install what is missing of both extras into this Python.

    Raises:
        UserError: there is no pip, or it failed; what it says stands above the message.
    """
    pip("--no-deps", absent(ALONE))
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "constraints.txt"
        pins.write_text("\n".join(installed()) + "\n")
        pip(f"--constraint={pins}", absent(WITH_REQUIREMENTS))
    importlib.invalidate_caches()


def installed() -> list[str]:
    """Return every installed package pinned to its version, ours left out."""
    found = {each.name: each.version for each in importlib.metadata.distributions() if each.name}
    # A local version ("2.13.0+cpu") is on no index; as a pin the public part is enough to keep it.
    return [f"{name}=={number.partition('+')[0]}" for name, number in sorted(found.items()) if name != DISTRIBUTION]


def pip(option: str, packages: Sequence[str]) -> None:
    """Install packages; see ``install``."""
    if not packages:
        return
    if missing("pip"):  # asked so, since looking for its module makes setuptools believe that this is pip
        raise UserError(f"this Python has no pip; install with another installer {option} {' '.join(packages)}")
    command = [sys.executable, "-m", "pip", "install", option, *packages]
    print(" ".join(command), flush=True)
    if subprocess.run(command).returncode:
        raise UserError(f"pip could not install {', '.join(packages)}; what it says stands above")
