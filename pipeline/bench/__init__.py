"""Benchmarks: each prints a table and returns what it measured."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.files import write_atomically


def run(name: str, file: Path | None) -> int:
    """Run a benchmark by name, print its table, and write the numbers to ``file`` if one is given."""
    if name == "data":
        from pipeline.bench import data

        result: object = data.run()
    elif name == "pairs":
        from pipeline.bench import pairs

        result = pairs.run()
    else:
        from pipeline.bench import memory

        result = memory.run()
    if file is not None:
        write_atomically(file, json.dumps(result, indent=1) + "\n")
    return 0
