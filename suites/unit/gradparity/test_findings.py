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


INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
THREAD = re.compile(r"^- Public thread: (.+)\.$", re.MULTILINE)
HOLDS = re.compile(r"^- Holds in: torch (.+)\.$", re.MULTILINE)
RELEASE = re.compile(r"^\| (\d+\.\d+\.\d+) \| (.+) \|$", re.MULTILINE)


def test_the_index_says_how_many_have_no_public_thread() -> None:
    unknown = [row for row in INDEX.splitlines() if " | none found" in row]
    assert f"For {len(unknown)} of them no public thread was found" in " ".join(INDEX.split())
    assert f"{len(PROGRAMS)} programs in plain torch" in INDEX


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_has_its_page_and_its_row(program: Path) -> None:
    page = program.with_suffix(".md").read_text(encoding="utf-8")
    assert f"]({program.name})" in page
    assert f"]({program.stem}.md)" in INDEX
    assert "| 2.13.0 | **differs** |" in page or program.stem in CRASHES
    assert all(f"| {version} | " in page for version in ("2.9.1", "2.11.0", "2.15.0"))
    imported = re.findall(r"^(?:import|from) (\w+)", program.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(imported) <= {"contextlib", "math", "sys", "threading", "torch"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_page_says_which_thread_knows_it_and_in_which_releases_it_holds(program: Path) -> None:
    page = program.with_suffix(".md").read_text(encoding="utf-8")
    (thread,), (releases,) = THREAD.findall(page), HOLDS.findall(page)
    assert thread.startswith("none found") or re.search(r"\]\(https://github\.com/[\w./-]+/\d+\)", thread)
    (row,) = (line for line in INDEX.splitlines() if line.startswith(f"| [{program.stem}]("))
    assert row.endswith(f" | {thread} |")
    measured = RELEASE.findall(page)
    assert releases.split(", ") == [name for name, told in measured if told not in ("as eager", "not run")]


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
