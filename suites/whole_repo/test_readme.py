"""What stands in the README because something printed it: examples, each of which is run, and the table of
speed, which is made from its file.

`EXPECTTEST_ACCEPT=1`, without xdist, writes what is printed now into the README.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import Table
from benchmarks.training_table import short

SPEED = re.compile(r"<!-- speed:(?P<file>\S+) -->\n(?P<table>.*?)<!-- /speed -->", re.DOTALL)
EXAMPLE = re.compile(
    r"```(?P<language>\w*)\n(?P<code>[^`]*)```\n\n"
    r"<!-- output:(?P<name>\w+) -->\n```\n(?P<output>.*?)```\n<!-- /output -->",
    re.DOTALL,
)


def printed_by(language: str, code: str) -> str:
    """What an example prints: a Python program, or one command of a module that runs as a program."""
    arguments = ["-c", code] if language == "python" else ["-m", *shlex.split(code)]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "COLUMNS": "110", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.strip().splitlines())


@pytest.mark.parametrize("name", ["retrograd", "gradparity"])
def test_an_example_prints_what_the_readme_says(name: str, root: Path) -> None:
    readme = root / "README.md"
    text = readme.read_text()
    (example,) = (found for found in EXAMPLE.finditer(text) if found["name"] == name)
    expect(readme, example, "output", printed_by(example["language"], example["code"]))


def test_the_table_of_speed_is_made_from_its_file(root: Path) -> None:
    readme = root / "README.md"
    (found,) = SPEED.finditer(readme.read_text())
    file = root / "suites/benchmarks/results" / found["file"]
    expect(readme, found, "table", short(Table.of_json(file.read_text())) + "\n")


def expect(readme: Path, found: re.Match[str], group: str, printed: str) -> None:
    """Compare a part of the README with what is printed now; or write that there, if it is to be accepted."""
    if os.environ.get("EXPECTTEST_ACCEPT"):
        start, end = found.span(group)
        readme.write_text(found.string[:start] + printed + found.string[end:])
    else:
        assert printed == found[group]
