"""What stands in documents because something printed it: commands, which are run, and tables, which are made
from data. (`test_documents.py` runs the Python.)

A table stands between `<!-- made:TABLE FILE -->` and `<!-- /made -->`, what a command prints between
`<!-- output:gradparity -->` and `<!-- /output -->`. `EXPECTTEST_ACCEPT=1`, without xdist, writes what is
printed now into the documents.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retrograd.aot
import retrograd.dynamo
from benchmarks import training_table
from benchmarks.figures import Table
from benchmarks.markdown import MADE
from ecosystem import pages
from retrograd.config import ALLOWED

ROOT = Path(__file__).resolve().parents[2]
#: what a callable takes and returns, in the words of a rule.
CALLABLE = re.compile(r"\(gm.+")
EXAMPLE = re.compile(
    r"```(?:sh)?\n(?P<command>gradparity [^`]*)```\n\n"
    r"<!-- output:gradparity -->\n```\n(?P<text>.*?)```\n<!-- /output -->",
    re.DOTALL,
)


def agreement() -> Any:
    spec = importlib.util.spec_from_file_location("agreement", ROOT / "suites/parity/agreement.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_file(render: Callable[[Table], str]) -> Callable[[str], str]:
    """The table that `render` makes of a file of figures."""
    folder = ROOT / "suites/benchmarks/results"
    return lambda file: render(Table.of_json((folder / file).read_text()))


def options() -> str:
    """Each option with its values, its default, and the ways in that take it."""
    ways = {
        "live": [*inspect.signature(retrograd.compiled_autograd).parameters],
        "Dynamo": retrograd.dynamo.list_options(),
        "step": [*inspect.signature(retrograd.compile_step).parameters],
        "staged": [*inspect.signature(retrograd.aot.function).parameters],
    }
    default = retrograd.Config()
    rows = [["option", "values", "default", "on"], ["---"] * 4]
    for name, (_, values) in ALLOWED.items():
        plain = getattr(default, name)
        shown = f"`{plain!r}`" if plain != frozenset() else "none"
        taken_by = ", ".join(way for way, names in ways.items() if name in names)
        rows.append([f"`{name}`", CALLABLE.sub(r"`\g<0>`", values), shown, taken_by])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


TABLES: dict[str, Callable[[str], str]] = {
    "correctness": lambda _: agreement().short(),
    "agreement": lambda _: agreement().whole(),
    "example": pages.code,
    "gains": pages.gains,
    "options": lambda _: options(),
    **{
        name: of_file(getattr(training_table, name))
        for name in ("short", "spread", "goals", "like_eager", "starts")
    },
}


def found_in(pattern: re.Pattern[str]) -> list[Path]:
    """The documents in which a pattern is found."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if pattern.search(page.read_text())]


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


def table(found: re.Match[str]) -> str:
    return TABLES[found["table"]](found["file"]) + "\n"


@pytest.mark.parametrize(
    ("page", "pattern", "now"),
    [
        *((page, MADE, table) for page in found_in(MADE)),
        *((page, EXAMPLE, lambda found: printed_by(found["command"])) for page in found_in(EXAMPLE)),
    ],
    ids=lambda one: one.relative_to(ROOT).as_posix() if isinstance(one, Path) else "",
)
def test_a_document_says_what_is_printed(
    page: Path, pattern: re.Pattern[str], now: Callable[[re.Match[str]], str]
) -> None:
    text = page.read_text()
    printed = [(found, now(found)) for found in pattern.finditer(text)]
    if os.environ.get("EXPECTTEST_ACCEPT"):
        for found, made in reversed(printed):
            text = text[: found.start("text")] + made + text[found.end("text") :]
        page.write_text(text)
    else:
        assert [made for _, made in printed] == [found["text"] for found, _ in printed]


def test_the_readme_has_a_table_of_speed_and_one_of_correctness() -> None:
    named = [found["table"] for found in MADE.finditer((ROOT / "README.md").read_text())]
    assert named == ["correctness", "spread"]


def test_a_command_is_run_somewhere() -> None:
    assert found_in(EXAMPLE)
