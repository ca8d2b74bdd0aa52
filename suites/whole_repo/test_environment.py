"""`docs/reference/environment.md` beside the code: it has every variable that the code reads, and no other.

In: the sources of both packages and of the tests, and torch's for its own variables. Out: variables that the
page lacks, and variables of the page that are read nowhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from retrograd.events import LOG_NAMES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/environment.md").read_text()
NAME = re.compile(r"[A-Z][A-Z0-9_]{4,}")
#: how a variable is read; a dictionary with all variables is what a child process gets.
READS = {"get", "setdefault", "getenv"}


def constants(tree: ast.Module) -> dict[str, object]:
    """The constants that a module gives a name."""
    return {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }


def keys(node: ast.AST) -> list[ast.expr | None]:
    """What `node` looks up in the environment, or sets in it."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-2:-1] in (["environ"], ["os"]):
        return node.args[:1] if ast.unparse(node.func).split(".")[-1] in READS else []
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
        return [node.slice]
    if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
        return [node.left]
    if isinstance(node, ast.Dict) and any(ast.unparse(value) == "os.environ" for value in node.values):
        return node.keys
    return []


def variables(source: str) -> Iterator[str]:
    """The environment variables that a source reads or sets."""
    tree = ast.parse(source)
    named = constants(tree)
    for key in (key for node in ast.walk(tree) for key in keys(node) if key is not None):
        value = key.value if isinstance(key, ast.Constant) else named.get(ast.unparse(key))
        if isinstance(value, str) and NAME.fullmatch(value):
            yield value


def of(*folders: str) -> set[str]:
    """The variables of all sources in folders of this repository."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {name for path in paths for name in variables(path.read_text())}


def section(title: str) -> tuple[set[str], set[str]]:
    """The variables in a section of the page: those of its table, and all."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)
    return set(rows), {name for name in re.findall(r"`([A-Z][A-Z0-9_]+)`", text) if NAME.fullmatch(name)}


def test_the_page_has_the_variables_of_retrograd() -> None:
    ours, _ = section("Of retrograd")
    _, read = section("Of torch, read by retrograd")
    assert of("packages/retrograd/src") == ours | read


def test_the_page_has_the_names_of_all_logs() -> None:
    (row,) = re.findall(r"^\| `RETROGRAD_LOGS` \|(.*)", PAGE, re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", row)) == LOG_NAMES
    assert tuple(re.findall(r"^- `(\w+)`:", PAGE, re.MULTILINE)) == LOG_NAMES


def test_the_page_has_the_variables_of_gradparity() -> None:
    _, named = section("Of gradparity")
    assert of("harness/src") == named - {"PYTHONPATH"}


def test_the_page_has_the_variables_of_the_tests() -> None:
    table, _ = section("Of the tests")
    assert table <= of("suites")
    assert {name for name in of("suites") if name.startswith("GRADPARITY_")} <= table


def test_torch_reads_what_retrograd_obeys() -> None:
    table, _ = section("Of torch, obeyed by retrograd")
    torch_reads = {
        name
        for folder in ("compiler", "_inductor", "_dynamo", "_logging")
        for path in (Path(torch.__file__).parent / folder).glob("*.py")
        for name in re.findall(r"['\"]([A-Z][A-Z0-9_]+)['\"]", path.read_text())
    }
    assert table
    assert table - torch_reads == set()


def test_variables_are_found_in_code() -> None:
    source = (
        "HERE = 'SOME_FOLDER'\nos.environ.get(HERE)\nos.environ['OTHER_NAME']\n'THIRD_NAME' in os.environ\n"
        "settings = {**os.environ, 'FOR_A_CHILD': '1'}\nos.getenv('FIFTH_NAME')\nvalues.get('NOT_THIS')\n"
    )
    found = {"SOME_FOLDER", "OTHER_NAME", "THIRD_NAME", "FOR_A_CHILD", "FIFTH_NAME"}
    assert {*variables(source)} == found
