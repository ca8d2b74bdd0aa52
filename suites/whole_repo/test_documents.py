"""The Python in documents runs: the blocks of a page one after the other, in one process. What a block prints
is what stands behind it, between `<!-- output -->` and `<!-- /output -->`.

A block after the line `<!-- not run: WHY -->` does not run, and one after `<!-- needs: PACKAGE -->` only if
that package is installed, as it is in the environment of `nox -s env`. `EXPECTTEST_ACCEPT=1`, without xdist,
writes what is printed now into the pages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from retrograd.probe import TESTED

pytestmark = pytest.mark.programs

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?P<skip><!-- not run: .+ -->\n)?(?:<!-- needs: (?P<needs>\w+) -->\n)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```\n"
    r"(?:\n<!-- output -->\n```\n(?P<output>.*?)```\n<!-- /output -->\n)?",
    re.DOTALL | re.MULTILINE,
)
#: is printed between two blocks.
BETWEEN = "-- the next block --"
LONGEST = 200
#: the most words that a document may have, and the most lines.
KINDS = ("guides", "tutorials", "explanations")
GUIDES = sorted(page for name in KINDS for page in (ROOT / "docs" / name).glob("*.md"))
ECOSYSTEM = sorted((ROOT / "docs/ecosystem").glob("*.md"))
MOST = {
    "README.md": (900, 200),
    "docs/comparison.md": (1500, 120),
    **{page.relative_to(ROOT).as_posix(): (1200, 250) for page in GUIDES},
    **{page.relative_to(ROOT).as_posix(): (600, 200) for page in ECOSYSTEM},
}


def pages() -> list[Path]:
    """Documents with Python in them. Findings are left out: their programs show what stock does wrong."""
    tops = ("README.md", "CONTRIBUTING.md", "packages/retrograd/README.md", "harness/README.md")
    found = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "findings" not in path.parts]
    return [path for path in (*(ROOT / top for top in tops), *found) if program(path.read_text())]


def blocks(text: str) -> list[re.Match[str]]:
    """The blocks of a page that are to be run."""
    return [found for found in BLOCK.finditer(text) if not found["skip"] and is_there(found["needs"])]


def is_there(package: str | None) -> bool:
    """Whether what a block needs is installed."""
    return package is None or find_spec(package) is not None


def program(text: str) -> str:
    """These blocks as one program."""
    return f"print({BETWEEN!r})\n".join(textwrap.dedent(found["code"]) for found in blocks(text))


def printed(page: Path, folder: Path) -> list[str]:
    """What each block of a page prints."""
    script = folder / f"{page.stem}.py"
    script.write_text(program(page.read_text()))
    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, script], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [lines(part) for part in done.stdout.split(f"{BETWEEN}\n")]


def lines(text: str) -> str:
    """`text` without blanks at the ends of its lines, and without blank lines around it."""
    return "".join(f"{line.rstrip()}\n" for line in text.strip().splitlines())


def timeless(text: str) -> str:
    """`text` without the seconds that a compilation took, which no two runs share, and which a fast one does
    not print."""
    return re.sub(r"(?m)^compiling took \d+\.\d s\n", "", text)


def outputs(text: str, parts: list[str]) -> Iterator[tuple[re.Match[str], str]]:
    """Each block behind which its output stands, with what it prints now."""
    for block, part in zip(blocks(text), parts, strict=True):
        if block["output"] is not None:
            yield block, part


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    found = [*outputs(text, printed(page, tmp_path))]
    if os.environ.get("EXPECTTEST_ACCEPT"):
        for block, now in reversed(found):
            start, end = block.span("output")
            text = text[:start] + now + text[end:]
        page.write_text(text)
    else:
        assert [timeless(now) for _, now in found] == [timeless(block["output"]) for block, _ in found]


@pytest.mark.parametrize("name", ["README.md", "packages/retrograd/README.md", "harness/README.md"])
def test_a_readme_is_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("name", MOST)
def test_a_document_is_no_longer_than_it_may_be(name: str) -> None:
    text = (ROOT / name).read_text()
    size = (sum(1 for word in text.split() if re.search(r"\w", word)), len(text.splitlines()))
    assert max(size[0] - MOST[name][0], size[1] - MOST[name][1]) <= 0, size


def test_the_environment_has_what_blocks_need() -> None:
    wanted = {found["needs"] for page in pages() for found in BLOCK.finditer(page.read_text())} - {None}
    installed = (ROOT / "requirements/dev.txt").read_text().split()
    assert sorted(wanted - {*installed}) == []


@pytest.mark.parametrize("name", ["README.md", "packages/retrograd/README.md"])
def test_a_readme_names_the_releases_of_torch_that_are_accepted(name: str) -> None:
    assert f"PyTorch {TESTED[0]} to {TESTED[-1]}" in (ROOT / name).read_text()


def test_blocks_are_found_and_left_out() -> None:
    text = "```python\na = 1\n```\n\n1. x\n\n   ```python\n   b = a\n   ```\n\n```sh\nls\n```\n"
    assert program(text) == f"a = 1\nprint({BETWEEN!r})\nb = a\n"
    assert program("<!-- not run: it takes an hour -->\n```python\na = 1\n```\n") == ""
    assert program("<!-- needs: torch -->\n```python\na = 1\n```\n") == "a = 1\n"
    assert program("<!-- needs: no_such_package -->\n```python\na = 1\n```\n") == ""
    shown = "```python\nprint(1)\n```\n\n<!-- output -->\n```\n2\n```\n<!-- /output -->\n"
    ((block, now),) = outputs(shown, ["1\n"])
    assert (block["output"], now) == ("2\n", "1\n")
