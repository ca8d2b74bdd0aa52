"""The README's examples: each is run, and what it prints is what the README says it prints.

`EXPECTTEST_ACCEPT=1`, without xdist, writes what they print now into the README.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    printed = printed_by(example["language"], example["code"])
    if os.environ.get("EXPECTTEST_ACCEPT"):
        start, end = example.span("output")
        readme.write_text(text[:start] + printed + text[end:])
    else:
        assert printed == example["output"]
