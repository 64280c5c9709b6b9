"""Importing the package gives every public name, and does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import grom

ROOT = Path(grom.__file__).parents[1]
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


def test_public_names_are_sorted_and_all_there() -> None:
    assert grom.__all__ == sorted(set(grom.__all__))
    for name in grom.__all__:
        public = getattr(grom, name)
        assert public.__module__.startswith("grom.")
        assert public.__doc__


def test_every_name_that_the_package_imports_is_public() -> None:
    modules = {path.stem for path in (ROOT / "grom").iterdir()}
    names = {name for name in vars(grom) if not name.startswith("_")}
    assert names - modules == set(grom.__all__) - modules


def test_importing_does_nothing_else(tmp_path: Path) -> None:
    assert after("import grom", tmp_path) == {
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


@pytest.mark.parametrize("path", sorted((ROOT / "grom").glob("*.py")), ids=lambda path: path.stem)
def test_every_module_has_its_tests(path: Path) -> None:
    name = path.stem.strip("_")
    assert (ROOT / "tests" / "grom" / f"test_{name}.py").is_file()
