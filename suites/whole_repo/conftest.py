"""The repository as a value for the tests that look at it: its root, and the files that belong to it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def files(root: Path) -> list[Path]:
    """Every file of the repository: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for line in listed.stdout.splitlines() if (path := root / line).is_file()]


@pytest.fixture(scope="session")
def sources(files: list[Path], root: Path) -> list[Path]:
    """The Python files of the two packages."""
    homes = (root / "packages", root / "harness")
    return [path for path in files if path.suffix == ".py" and any(home in path.parents for home in homes)]
