"""Imports point one way, and no package knows more than it should."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "pipeline"

# What each package or module may import of the others. Nothing else of this project, and of Lightning only training.
BASE = {"errors", "files", "choices", "cores", "progress", "pipeline"}
ALLOWED = {
    "pipeline": set(),
    "errors": set(),
    "choices": {"errors"},
    "files": {"errors"},
    "cores": set(),
    "progress": set(),
    "devices": {"errors"},
    "config_files": BASE,
    "data": BASE,
    "models": BASE,
    "solvers": BASE | {"models"},
    "config": BASE | {"models", "solvers"},
    "config_reference": BASE | {"config_files", "config", "data"},
    "runs": BASE | {"config_files", "config", "data", "models", "solvers"},
    "evaluation": BASE | {"config", "data", "models", "solvers", "runs"},
    "generation": BASE | {"models", "solvers"},
    "conversion": BASE | {"config_files", "config", "data", "models", "runs"},
    "training": BASE
    | {"config_files", "conversion", "devices", "config", "data", "models", "solvers", "runs", "evaluation"},
    "description": BASE | {"config", "data", "models", "solvers"},
    # Of training it takes the objective and the optimisers' groups, which know nothing of Lightning.
    "planning": BASE | {"config", "data", "description", "models", "solvers", "training"},
    "bench": BASE | {"config", "data", "models", "solvers", "runs", "evaluation", "generation", "training"},
    "cli": None,  # joins all of them
    "__main__": {"cli"},
}
FILES = sorted(ROOT.rglob("*.py"))


def part(module):
    names = module.split(".")
    return names[1] if len(names) > 1 else "pipeline"


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "pipeline":
                yield from (f"pipeline.{alias.name}" for alias in node.names if alias.name != "__version__")
            else:
                yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_direction(path):
    here = part(".".join(["pipeline", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"))
    allowed = ALLOWED[here]
    for module in imports(path):
        if module.split(".")[0] == "pipeline" and allowed is not None:
            assert part(module) in allowed | {here}, f"{here} must not import {module}"
        if module.split(".")[0] in {"lightning", "pytorch_lightning", "deepspeed", "wandb"}:
            assert here == "training", f"{here} must not import {module}"


def test_every_package_has_its_place():
    found = {path.stem if path.parent == ROOT else path.relative_to(ROOT).parts[0] for path in FILES}
    assert found - {"__init__"} == set(ALLOWED) - {"pipeline"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pipeline.cli", ["torch", "lightning", "omegaconf"]),
        ("pipeline.config_files", ["torch", "lightning"]),
        ("pipeline.data.prepare", ["torch", "lightning"]),
        ("pipeline.config", ["lightning"]),
        ("pipeline.data.stream", ["lightning"]),
        ("pipeline.runs.loading", ["lightning"]),
        ("pipeline.planning.report", ["lightning", "deepspeed"]),
        ("pipeline.conversion.convert", ["lightning", "transformers"]),
    ],
)
def test_what_an_import_does_not_load(module, absent):
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
