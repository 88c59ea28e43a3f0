"""The plot of ``backfeed iterate``."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.evaluation.iteration import Pass
from pipeline.files import write_atomically

FORMATS = (".svg", ".png", ".pdf")


def check() -> None:
    """Raise ConfigError unless plots can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'backfeed[plots]'") from None


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return for each path its last parts, as many as tell all of them apart."""
    paths = {name: Path(name).parts for name in names}
    for count in range(1, max(map(len, paths.values())) + 1):
        short = {name: "/".join(parts[-count:]) for name, parts in paths.items()}
        if len(set(short.values())) == len(paths):
            return short
    return {name: name for name in paths}


def plot(found: Mapping[str, Sequence[Pass]], path: Path) -> None:
    """Draw loss and residual by pass for every model, and write the picture to ``path``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    settings: dict[Any, Any] = {"svg.hashsalt": "backfeed", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
        named = labels(found)
        for path_of_run, passes in found.items():
            name = named[path_of_run]
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
