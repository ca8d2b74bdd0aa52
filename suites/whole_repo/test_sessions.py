"""The sessions of the noxfile: all there, each explained, and the ones that the README promises."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from retrograd.probe import TESTED

SESSIONS = {"parity", "tests", "lint", "types", "imports", "bench"}


@pytest.fixture(scope="module")
def sessions(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    envdir = str(tmp_path_factory.mktemp("nox"))
    every = ("-k", "not nothing")  # without it, only the default sessions are listed
    command = [sys.executable, "-m", "nox", "--list-sessions", "--json", *every, "--envdir", envdir]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(listed.stdout)


def test_all_sessions_are_there_and_explained(sessions: list[dict[str, object]]) -> None:
    assert {str(session["name"]) for session in sessions} >= SESSIONS
    assert [session["session"] for session in sessions if not session["description"]] == []


def test_the_main_job_is_what_nox_alone_runs(root: Path) -> None:
    assert 'nox.options.sessions = ["parity"]' in (root / "noxfile.py").read_text()


def test_a_session_is_explained_in_one_line_of_the_menu(sessions: list[dict[str, object]]) -> None:
    assert [session["description"] for session in sessions if len(str(session["description"])) > 100] == []


def test_the_readme_gives_the_two_commands_and_every_session(root: Path) -> None:
    readme = (root / "README.md").read_text()
    assert "python -m pip install nox && nox -s parity" in readme
    assert sorted(name for name in SESSIONS if f"nox -s {name}" not in readme) == []


def test_the_noxfile_says_what_it_needs(root: Path) -> None:
    text = (root / "noxfile.py").read_text()
    header = [line.removeprefix("# ") for line in text.split("# ///")[1].splitlines()[1:]]
    declared = tomllib.loads("\n".join(header))
    assert declared["requires-python"] == ">=3.11"
    assert any(requirement.startswith("nox") for requirement in declared["dependencies"])


def test_one_torch_is_pinned_everywhere(root: Path) -> None:
    pinned = (root / "requirements/torch.txt").read_text().split("torch==")[1].strip()
    benchmarks = json.loads((root / "asv.conf.json").read_text())
    assert benchmarks["matrix"]["req"]["torch"] == [pinned]
    noxfile = ast.parse((root / "noxfile.py").read_text())
    versions = next(
        ast.literal_eval(node.value)
        for node in noxfile.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TORCH_VERSIONS"
    )
    assert pinned in versions
    assert tuple(version.rpartition(".")[0] for version in versions) == TESTED


def test_the_workflows_test_every_torch_of_the_noxfile(root: Path) -> None:
    noxfile, workflow = (root / "noxfile.py").read_text(), (root / ".github/workflows/ci.yml").read_text()
    (versions,) = re.findall(r"^TORCH_VERSIONS = \((.*)\)$", noxfile, re.MULTILINE)
    assert f"torch: [{versions}]\n" in workflow


def test_the_workflows_only_call_nox(root: Path) -> None:
    workflows = sorted((root / ".github/workflows").glob("*.yml"))
    commands = [line for path in workflows for line in re.findall(r"\brun: (.*)", path.read_text())]
    assert workflows
    install = "python -m pip install -c requirements/pins.txt nox"
    assert [command for command in commands if not command.startswith("nox ") and command != install] == []


def test_every_pin_is_exact(root: Path) -> None:
    lines = [
        line for line in (root / "requirements/pins.txt").read_text().splitlines() if line and line[0] != "#"
    ]
    assert [line for line in lines if line.count("==") != 1] == []
    assert lines == sorted(set(lines), key=str.lower)


def test_pre_commit_runs_the_pinned_versions(root: Path) -> None:
    pins = (root / "requirements/pins.txt").read_text().splitlines()
    pinned = {name: version for name, _, version in (line.partition("==") for line in pins)}
    hooks = (root / ".pre-commit-config.yaml").read_text()
    for name, repository in (("ruff", "ruff-pre-commit"), ("codespell", "codespell")):
        assert f"/{repository}\n    rev: v{pinned[name]}\n" in hooks
