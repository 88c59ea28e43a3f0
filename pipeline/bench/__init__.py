"""Benchmarks: each prints a table and returns its rows. ``docs/benchmarks.md`` says how to read them.

A benchmark is a module of this package with two names: ``SHAPES``, the sizes that it knows, and ``run(options)``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.bench.options import Options
from pipeline.errors import ConfigError
from pipeline.files import write_atomically

BENCHMARKS: Mapping[str, str] = {
    "recurrence": "a training step with feedback beside one without",
    "peers": "a training step beside that of other projects' code",
    "decode": "tokens a second, one after the other",
    "memory": "what activation checkpointing saves and costs",
    "overhead": "what Lightning's loop adds to a step",
    "pairs": "every architecture under every solver",
    "data": "the rate of the data stream",
}


def run(name: str, options: Options, *, threads: int = 0, file: Path | None = None) -> int:
    """Run a benchmark, print its table, and write the numbers to ``file`` if one is given.

    Args:
        name: one of ``BENCHMARKS``.
        options: what to measure.
        threads: of the CPU; 0 takes the cores that this process may use.
        file: JSON file to write.

    Raises:
        ConfigError: an option has no use here, or a value is out of range.
    """
    check(name, options, threads)
    module = importlib.import_module(f"pipeline.bench.{name}")
    from pipeline.bench import machine
    from pipeline.training.allocator import keep_freed_memory

    keep_freed_memory()  # as training on a CPU does
    with machine.threads_set(threads):
        described = machine.describe()
        print(f"{name}: {machine.line(described)}", flush=True)
        rows = module.run(options)
    if file is not None:
        write_atomically(file, json.dumps({"benchmark": name, "machine": described, "rows": rows}, indent=1) + "\n")
    return 0


def check(name: str, options: Options, threads: int) -> None:
    """Raise ConfigError if an option has no use for a benchmark or a number is out of range."""
    if options.install and name != "peers":
        raise ConfigError("--install belongs to the benchmark peers")
    if options.data is not None and name != "pairs":
        raise ConfigError("--data belongs to the benchmark pairs; the others make their own")
    if options.repeats is not None and options.repeats < 1:
        raise ConfigError(f"--repeats is {options.repeats}; it must be at least 1")
    if not 0 <= threads <= 1024:
        raise ConfigError(f"--threads is {threads}; it must be from 0 (all cores) to 1024")
