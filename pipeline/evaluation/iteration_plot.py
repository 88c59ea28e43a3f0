"""The plot of ``backfeed iterate``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.evaluation.iteration import Pass
from pipeline.files import write_atomically

FORMATS = ("svg", "png", "pdf")


def check(path: Path) -> None:
    """Raise ConfigError unless a plot can be written to ``path``."""
    if path.suffix.removeprefix(".") not in FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in one of .{', .'.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'backfeed[plots]'") from None


def plot(found: Mapping[str, Sequence[Pass]], path: Path) -> None:
    """Draw loss and residual by pass for every model, and write the picture to ``path``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    settings: dict[Any, Any] = {"svg.hashsalt": "backfeed", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
        for name, passes in found.items():
            left.plot([each.number for each in passes], [each.loss for each in passes], marker=".", label=name)
            moved = [(each.number, each.residual) for each in passes if each.residual]
            right.plot([number for number, _ in moved], [residual for _, residual in moved], marker=".", label=name)
        left.set(xlabel="pass", ylabel="loss (nats a token)")
        right.set(xlabel="pass", ylabel="residual (share of rms)", yscale="log")
        left.legend()
        buffer = io.BytesIO()
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(buffer, format=path.suffix.removeprefix("."), metadata=metadata)
        pyplot.close(figure)
    write_atomically(path, buffer.getvalue())
