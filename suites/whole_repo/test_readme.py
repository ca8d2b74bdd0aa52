"""What stands in the README because something printed it: a command, which is run, and the table of speed,
which is made from its file. (`test_documents.py` runs the Python.)

`EXPECTTEST_ACCEPT=1`, without xdist, writes what is printed now into the README.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import Table
from benchmarks.training_table import short

SPEED = re.compile(r"<!-- speed:(?P<file>\S+) -->\n(?P<table>.*?)<!-- /speed -->", re.DOTALL)
EXAMPLE = re.compile(
    r"```\n(?P<command>[^`]*)```\n\n"
    r"<!-- output:(?P<name>\w+) -->\n```\n(?P<output>.*?)```\n<!-- /output -->",
    re.DOTALL,
)


def printed_by(command: str) -> str:
    """What a command of a module that runs as a program prints."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        env={**os.environ, "COLUMNS": "110", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.strip().splitlines())


def test_the_command_prints_what_the_readme_says(root: Path) -> None:
    readme = root / "README.md"
    (example,) = EXAMPLE.finditer(readme.read_text())
    expect(readme, example, "output", printed_by(example["command"]))


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
