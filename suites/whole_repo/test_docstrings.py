"""Docstrings match signatures: what they list exists, and public functions list all their parameters.

`nox -s lint` runs ruff's rules on docstrings (pydoclint's). They do not look at the docstrings of classes,
nor at several names before one colon. This does.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ]{4}.*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"(?:^ {4}|[.] )(\*{0,2}[a-z]\w*(?:, \*{0,2}[a-z]\w*)*):(?= |$)", re.MULTILINE)
DOORS = ("retrograd", "retrograd.aot", "retrograd.dynamo")

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sections(docstring: str) -> dict[str, set[str]]:
    """The names that each section lists; several may share one line, and one text."""
    return {
        found[1]: {name.strip(" *") for entry in ENTRY.findall(found[2]) for name in entry.split(",")}
        for found in SECTION.finditer(docstring + "\n")
    }


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Those that a caller gives, without ``self`` and the private."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    names = {one.arg for one in every if one is not None}
    return {name for name in names - {"self", "cls"} if not name.startswith("_")}


def fields(node: ast.ClassDef) -> set[str]:
    """The annotated names of a class: the parameters of a dataclass."""
    named = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    return {ast.unparse(statement.target) for statement in named}


def attributes(node: ast.ClassDef) -> set[str]:
    """What instances of a class have: fields, properties and methods, and whatever is set on ``self``."""
    slots = {word for child in node.body for word in re.findall(r"'(\w+)'", ast.unparse(child))}
    methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    own = {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and ast.unparse(child.value) == "self"
    }
    plain = {
        ast.unparse(target)
        for child in node.body
        if isinstance(child, ast.Assign)
        for target in child.targets
    }
    return fields(node) | slots | methods | own | plain


def initialiser(node: ast.ClassDef) -> ast.FunctionDef | None:
    methods = (child for child in node.body if isinstance(child, ast.FunctionDef))
    return next((child for child in methods if child.name == "__init__"), None)


def taken_by(node: Documented) -> set[str]:
    """The parameters of a function, or of what makes an instance of a class."""
    if not isinstance(node, ast.ClassDef):
        return parameters(node)
    made_by = initialiser(node)
    return fields(node) if made_by is None else parameters(made_by)


def unknown(node: Documented) -> list[str]:
    """What a docstring lists and the code does not have."""
    listed = sections(ast.get_docstring(node) or "")
    missing = listed.get("Args", set()) - taken_by(node)
    if isinstance(node, ast.ClassDef):
        missing |= listed.get("Attributes", set()) - attributes(node)
    return sorted(missing)


def undescribed(node: Documented) -> list[str]:
    """Parameters that a list of parameters leaves out."""
    listed = sections(ast.get_docstring(node) or "")
    return sorted(taken_by(node) - listed["Args"]) if "Args" in listed else []


def public_names() -> set[str]:
    """What the doors of the packages offer to users."""
    return {name for door in DOORS for name in importlib.import_module(door).__all__}


def documented(tree: ast.AST) -> Iterator[Documented]:
    return (node for node in ast.walk(tree) if isinstance(node, Documented))


def test_what_docstrings_list_exists(sources: list[Path], root: Path) -> None:
    found = {
        f"{path.relative_to(root)}:{node.lineno} {node.name}": names
        for path in sources
        for node in documented(ast.parse(path.read_text()))
        if (names := unknown(node))
    }
    assert found == {}


def test_public_docstrings_describe_every_parameter(sources: list[Path], root: Path) -> None:
    public = public_names()
    found = {
        f"{path.relative_to(root)}:{node.lineno} {node.name}": names
        for path in sources
        for node in ast.parse(path.read_text()).body
        if isinstance(node, Documented) and node.name in public and (names := undescribed(node))
    }
    assert found == {}


def docstring_of(parameters: str, *lines: str) -> str:
    return "\n".join(
        (
            f"def f({parameters}):",
            '    """Do.',
            "",
            "    Args:",
            *(f"        {line}" for line in lines),
            '    """',
        )
    )


@pytest.mark.parametrize(
    ("code", "wrong", "left_out"),
    [
        (docstring_of("a, b", "a, b: two."), [], []),
        (docstring_of("a, b", "a: one; None: nothing."), [], ["b"]),
        (docstring_of("a", "a: one. c: more."), ["c"], []),
        (docstring_of("*a, **k", "*a, **k: what `g` takes."), [], []),
        ('def f(a, b):\n    """Do `a` to `b`."""', [], []),
        ('class C:\n    """It.\n\n    Attributes:\n        x: one.\n    """\n    y: int', ["x"], []),
        (
            'class C:\n    """It.\n\n    Args:\n        x: one.\n    """\n    def __init__(self, x): ...',
            [],
            [],
        ),
    ],
)
def test_the_search_for_wrong_docstrings_finds_them(code: str, wrong: list[str], left_out: list[str]) -> None:
    node = ast.parse(code).body[0]
    assert isinstance(node, Documented)
    assert (unknown(node), undescribed(node)) == (wrong, left_out)
