"""The two distributions: typed, described, light to import."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrograd.probe import TESTED

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
    assert "Typing :: Typed" in project["classifiers"]
    assert {"description", "readme", "authors", "license-files"} <= set(project)


def test_the_torch_that_is_declared_is_the_torch_that_is_tested(project: dict[str, Any]) -> None:
    major, minor = TESTED[-1].split(".")
    assert f"torch>={TESTED[0]},<{major}.{int(minor) + 1}" in project["dependencies"]


def test_the_pythons_that_are_claimed_are_those_of_the_workflow(project: dict[str, Any], root: Path) -> None:
    (tested,) = re.findall(r"python: \[(.*)\]", (root / ".github/workflows/ci.yml").read_text())
    claimed = [one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one]
    assert claimed == re.findall(r"[\d.]+", tested)


def test_every_import_is_declared(name: str, project: dict[str, Any], root: Path) -> None:
    optional = [one for extra in project.get("optional-dependencies", {}).values() for one in extra]
    declared = {re.split(r"[>=<]", one)[0] for one in [*project["dependencies"], *optional]}
    trees = [ast.parse(path.read_text()) for path in (root / DISTRIBUTIONS[name] / "src").rglob("*.py")]
    named = {module.split(".")[0] for tree in trees for module in imports(tree)}
    assert named - declared - sys.stdlib_module_names - {*DISTRIBUTIONS} == set()


def imports(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, at its top or inside its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def test_the_search_for_imports_finds_them() -> None:
    text = "import a.b\nfrom c.d import e\nfrom . import f\ndef g():\n    import h"
    assert [*imports(ast.parse(text))] == ["a.b", "c.d", "h"]


def test_the_package_is_typed_and_described(name: str, root: Path) -> None:
    home = root / DISTRIBUTIONS[name]
    assert (home / "src" / name / "py.typed").is_file()
    assert len((home / "README.md").read_text().splitlines()) > 10


def test_the_version_stands_in_the_package_and_is_that_of_the_newest_changes(
    name: str, project: dict[str, Any], root: Path
) -> None:
    assert project["dynamic"] == ["version"]
    (newest, *_) = re.findall(r"^## (\S+) - ", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert __import__(name).__version__ == importlib.metadata.version(name) == newest


def test_importing_a_package_loads_nothing_heavy(name: str) -> None:
    beyond_torch = loaded_by(f"import torch\nimport {name}") - loaded_by("import torch")
    assert sorted(module for module in beyond_torch if module.startswith(HEAVY)) == []


def test_gradparity_does_not_load_retrograd() -> None:
    assert not any(module.startswith("retrograd") for module in loaded_by("import gradparity.cli"))
