"""The Python in documents runs: the blocks of a page one after the other, in one process.

A block after the line `<!-- not run: WHY -->` does not run. One whose output stands in README.md does not run
here: `test_readme.py` runs it and compares.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from retrograd._torch.probe import TESTED

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?P<skip><!-- not run: .+ -->\n)?^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```\n"
    r"(?P<output>\n<!-- output:)?",
    re.DOTALL | re.MULTILINE,
)
LONGEST = 200


def pages() -> list[Path]:
    """Documents with Python in them. Findings are left out: their programs show what stock does wrong."""
    tops = ("README.md", "CONTRIBUTING.md", "packages/retrograd/README.md", "harness/README.md")
    found = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "findings" not in path.parts]
    return [path for path in (*(ROOT / top for top in tops), *found) if program(path.read_text())]


def program(text: str) -> str:
    """The blocks of a page that are to be run, as one program."""
    blocks = [found for found in BLOCK.finditer(text) if not found["skip"] and not found["output"]]
    return "\n".join(textwrap.dedent(found["code"]) for found in blocks)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(program(page.read_text()))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["README.md", "packages/retrograd/README.md", "harness/README.md"])
def test_a_readme_is_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("name", ["README.md", "packages/retrograd/README.md"])
def test_a_readme_names_the_releases_of_torch_that_are_accepted(name: str) -> None:
    assert f"PyTorch {TESTED[0]} to {TESTED[-1]}" in (ROOT / name).read_text()


def test_blocks_are_found_and_left_out() -> None:
    text = "```python\na = 1\n```\n\n1. x\n\n   ```python\n   b = a\n   ```\n\n```sh\nls\n```\n"
    assert program(text) == "a = 1\n\nb = a\n"
    assert program("<!-- not run: it takes an hour -->\n```python\na = 1\n```\n") == ""
    assert program("```python\na = 1\n```\n\n<!-- output:x -->\n") == ""
