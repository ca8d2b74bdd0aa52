"""The two distributions: typed, described, light to import."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

DISTRIBUTIONS = {"retrograd": "packages/retrograd", "gradparity": "harness"}
HEAVY = ("torch._inductor", "torch._dynamo", "torch._functorch.aot_autograd", "sympy", "transformers")


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after the statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(params=sorted(DISTRIBUTIONS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def project(name: str, root: Path) -> dict[str, Any]:
    settings = tomllib.loads((root / DISTRIBUTIONS[name] / "pyproject.toml").read_text())
    return settings["project"]


def test_the_metadata_is_complete(name: str, project: dict[str, Any]) -> None:
    assert project["name"] == name
    assert project["license"] == "BSD-3-Clause"
    assert project["requires-python"] == ">=3.11"
    assert "torch>=2.11" in project["dependencies"]
    assert "Typing :: Typed" in project["classifiers"]
    assert {"version", "description", "readme", "authors", "license-files"} <= set(project)


def test_the_package_is_typed_and_described(name: str, root: Path) -> None:
    home = root / DISTRIBUTIONS[name]
    assert (home / "src" / name / "py.typed").is_file()
    assert len((home / "README.md").read_text().splitlines()) > 10


def test_the_installed_version_is_the_one_in_the_metadata(name: str, project: dict[str, Any]) -> None:
    module = __import__(name)
    assert module.__version__ == project["version"]


def test_importing_a_package_loads_nothing_heavy(name: str) -> None:
    beyond_torch = loaded_by(f"import torch\nimport {name}") - loaded_by("import torch")
    assert sorted(module for module in beyond_torch if module.startswith(HEAVY)) == []


def test_gradparity_does_not_load_retrograd() -> None:
    assert not any(module.startswith("retrograd") for module in loaded_by("import gradparity.cli"))
