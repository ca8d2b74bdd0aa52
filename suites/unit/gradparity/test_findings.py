"""docs/findings: a program has its page and its row in the index, and differs still (`nox -s findings`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "findings"
PROGRAMS = sorted(FOLDER.glob("*.py"))
CRASHES = {"linearize_with_a_number"}
"""Programs that end the process."""


def test_there_are_twenty_and_five_that_nobody_has_described() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(PROGRAMS) >= 20
    assert index.count("| none found") >= 5


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_has_its_page_and_its_row(program: Path) -> None:
    page = program.with_suffix(".md").read_text(encoding="utf-8")
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"]({program.name})" in page
    assert f"]({program.stem}.md)" in index
    assert "| 2.13.0 | **differs** |" in page or program.stem in CRASHES
    assert all(f"| {version} | " in page for version in ("2.9.1", "2.11.0", "2.15.0"))
    imported = re.findall(r"^(?:import|from) (\w+)", program.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(imported) <= {"contextlib", "math", "sys", "threading", "torch"}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_it_differs_still(program: Path) -> None:
    command = [sys.executable, str(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    if program.stem in CRASHES:
        assert found.returncode < 0
    else:
        assert found.returncode == 1, found.stdout + found.stderr
