"""Which device to compute on."""

from __future__ import annotations

import torch

from pipeline.errors import ConfigError


def kind(name: str) -> str:
    """Return the kind of device that ``name`` means, not looking whether it is there; see ``choose``."""
    return choose(name).type if name == "auto" else torch.device(name).type


def choose(name: str) -> torch.device:
    """Return the device that ``name`` means; ``auto`` takes a GPU where there is one.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not to be had here ({' '.join(str(error).split())[:120]})") from None
    return device
