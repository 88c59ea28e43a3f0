"""Where metrics go: CSV files always; Weights & Biases and TensorBoard by configuration."""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from pipeline import config_files
from pipeline.config import Config
from pipeline.errors import ConfigError, RunError
from pipeline.files import describe_os_error, write_atomically
from pipeline.runs.folder import RunFolder

STEP = "step"


class CSVMetrics(Logger):
    """One CSV file a kind of row: ``train/loss`` goes to ``train.csv``, ``validation/loss`` to ``validation.csv``.

    Every row is handed to the system at once, so that a killed process loses none. On resume the rows after the
    checkpoint are cut off, since the run writes them again.

    Args:
        folder: where the files lie.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def name(self) -> str:
        """Name of the logger."""
        return "csv"

    @property
    def version(self) -> str:
        """Version of the logger; there is one."""
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the configuration lies beside."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row to the file of the first metric's kind."""
        kind = next(iter(metrics)).split("/")[0]
        path = self.folder / f"{kind}.csv"
        row = {STEP: step, **metrics}
        try:
            self.folder.mkdir(exist_ok=True)  # without parents: a run folder that was moved is an error
            fields = self._fields(path)
            if fields is None:
                fields = list(row)
                with path.open("w", newline="") as file:
                    csv.DictWriter(file, fields).writeheader()
            with path.open("a", newline="") as file:
                csv.DictWriter(file, fields, restval="", extrasaction="ignore").writerow(row)
        except OSError as error:
            raise RunError(describe_os_error(error, path)) from None

    @staticmethod
    def _fields(path: Path) -> list[str] | None:
        if not path.is_file() or path.stat().st_size == 0:
            return None
        with path.open(newline="") as file:
            return next(csv.reader(file))

    def cut(self, step: int) -> None:
        """Remove the rows after ``step``, and a last row that was cut short by a crash."""
        for path in sorted(self.folder.glob("*.csv")):
            with path.open(newline="", errors="replace") as file:
                rows = list(csv.reader(file))
            kept = [row for row in rows[1:] if len(row) == len(rows[0]) and row[0].isdigit() and int(row[0]) <= step]
            if not kept:  # whatever comes next may have other columns
                path.unlink()
                continue
            text = io.StringIO()
            csv.writer(text).writerows([rows[0], *kept])
            write_atomically(path, text.getvalue())


def build(config: Config, folder: RunFolder) -> list[Logger]:
    """Return the loggers of a run."""
    loggers: list[Logger] = [CSVMetrics(folder.metrics)]
    if config.logging.wandb.mode != "disabled":
        loggers.append(_wandb(config, folder))
    if config.logging.tensorboard:
        loggers.append(TensorBoardLogger(save_dir=folder.path, name="tensorboard", version=""))
    return loggers


def _wandb(config: Config, folder: RunFolder) -> WandbLogger:
    """Begin or go on with the run at Weights & Biases; offline, its files lie in the run folder."""
    import wandb

    chosen = config.logging.wandb
    try:
        return WandbLogger(experiment=_begin(wandb, config, folder))
    except wandb.errors.Error as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"logging.wandb (mode {chosen.mode}, project {chosen.project}): {reason}") from None


def _begin(wandb: Any, config: Config, folder: RunFolder) -> Any:
    chosen = config.logging.wandb
    return wandb.init(
        project=chosen.project,
        entity=chosen.entity,
        group=chosen.group,
        tags=list(chosen.tags),
        name=config.run.name,
        id=folder.id,
        resume="allow",
        mode=chosen.mode,
        dir=folder.path,
        config=config_files.flatten(config),
        settings=wandb.Settings(silent=True, console="off", disable_git=True),
    )
