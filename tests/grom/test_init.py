"""Importing the package gives every public name, and does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Literal

import pytest

import grom
import grom.benchmarks
import grom.metrics

ROOT = Path(grom.__file__).parents[1]
PACKAGES = (grom, grom.benchmarks, grom.metrics)
MODULES = sorted(path for path in (ROOT / "grom").rglob("*.py"))
FOREIGN = ("prefect", "mlflow", "pyarrow", "datasets", "fsspec", "s3fs", "boto3", "typer")
"""Orchestrator, registry and storage."""
SCRIPT = f"""
import json, logging, os, random, sys, warnings
before = dict(os.environ)
import torch, transformers
known, settings = set(sys.modules), (torch.get_num_threads(), torch.get_default_dtype())
filters, state = list(warnings.filters), random.getstate()
{{}}
print(json.dumps({{{{
    "environment": dict(os.environ) == before,
    "torch": settings == (torch.get_num_threads(), torch.get_default_dtype()),
    "warnings": filters == list(warnings.filters),
    "random": state == random.getstate(),
    "handlers": len(logging.getLogger().handlers) + len(logging.getLogger("grom").handlers),
    "foreign": [name for name in {FOREIGN} if name in sys.modules],
}}}}))
"""


def after(statement: str, home: Path) -> dict[str, object]:
    """What a fresh interpreter in an empty home finds after a statement."""
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(statement)],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_are_sorted_and_all_there(package: ModuleType) -> None:
    assert package.__all__ == sorted(set(package.__all__))
    for name in package.__all__:
        public = getattr(package, name)
        if isinstance(public, type | FunctionType):
            assert public.__module__.startswith(f"{package.__name__}.")
            assert public.__doc__
        else:
            assert isinstance(public, dict | type(Literal["a"])), name  # a table or a kind of word


@pytest.mark.parametrize("package", [grom, grom.metrics], ids=lambda package: package.__name__)
def test_every_name_that_the_package_imports_is_public(package: ModuleType) -> None:
    folder = Path(package.__path__[0])
    modules = {path.stem for path in folder.glob("*.py")}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    names = {name for name in vars(package) if not name.startswith("_")}
    assert names - modules == set(package.__all__) - modules


def test_every_benchmark_that_the_package_imports_is_in_its_table() -> None:
    table = grom.benchmarks.BENCHMARKS.values()
    for name, public in vars(grom.benchmarks).items():
        assert not isinstance(public, grom.benchmarks.Benchmark) or public in table, name


def test_importing_does_nothing_else(tmp_path: Path) -> None:
    assert after("import grom, grom.benchmarks, grom.metrics", tmp_path) == {
        "environment": True,
        "torch": True,
        "warnings": True,
        "random": True,
        "handlers": 0,
        "foreign": [],
    }
    assert list(tmp_path.iterdir()) == []


def test_what_importing_must_not_do_would_be_seen(tmp_path: Path) -> None:
    found = after("import os, fsspec; os.environ['A'] = 'b'; open('file', 'w')", tmp_path)
    assert found["environment"] is False
    assert found["foreign"] == ["fsspec"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "grom")))
def test_every_module_has_its_tests(path: Path) -> None:
    place = path.relative_to(ROOT).parent
    if path.stem == "__init__":
        place = Path("grom")  # here
    assert (ROOT / "tests" / place / f"test_{path.stem.strip('_')}.py").is_file()
