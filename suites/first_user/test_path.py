"""What a first-time user does, as harness/README.md tells it, in an environment with the wheel only.

`nox -s first_user` makes that environment and says where it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

HOME = os.environ.get("GRADPARITY_USER_BIN")
pytestmark = pytest.mark.skipif(
    not HOME, reason="needs the wheel in an environment of its own: nox -s first_user"
)

README = Path(__file__).parents[2] / "harness" / "README.md"
SECTION = README.read_text().partition("## The first ten minutes")[2].partition("## Three examples")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *words = command.split()
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    settings["PATH"] = f"{HOME}{os.pathsep}{settings['PATH']}"
    arguments = [str(Path(HOME or "") / program), *words]
    return subprocess.run(arguments, cwd=folder, env=settings, capture_output=True, text=True, check=False)


def test_the_readme_has_the_four_steps() -> None:
    assert [command.split()[:2] for command in COMMANDS] == [
        ["pip", "install"],
        ["gradparity", "demo"],
        ["pytest", "--gradparity-subjects=compile:aot_eager"],
        ["gradparity", "fuzz"],
    ]


def test_the_demo_takes_less_than_a_minute_and_leaves_scripts_that_run(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = run(COMMANDS[1], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - begun < 60
    assert "programs differ from eager" in done.stdout
    scripts = sorted(tmp_path.glob("repro_*.py"))
    assert len(scripts) >= 2
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    assert run(f"python {scripts[0].name} check", tmp_path).returncode == 1


def test_the_test_file_is_five_lines_and_passes(tmp_path: Path) -> None:
    (block,) = blocks("python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    (tmp_path / "test_mine.py").write_text(block)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # the user's folder stands in no checkout of ours
    done = run(COMMANDS[2], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "subjects compile:aot_eager" in done.stdout


def test_two_minutes_of_invented_programs_end_with_a_report(tmp_path: Path) -> None:
    done = run(COMMANDS[3], tmp_path)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: it found something of Inductor's own
    assert re.search(r"\d+ cases \(", done.stdout)
    assert "gradparity report" in (tmp_path / "out.html").read_text()
