"""read: from a source text back to a script, so that any program with a `run(p)` can be shrunk.

In: a Python text with functions, classes and `def run(p)`. Out: a script with that source. Raises CaseError.
"""

from __future__ import annotations

import ast
from textwrap import dedent

from gradparity.errors import CaseError
from gradparity.generate.script import IMPORTS, Script, Step

GIVEN = ("from __future__ import annotations", "import torch", *IMPORTS.values())
"""Imports that a script makes by itself."""


def from_source(text: str, like: Script | None = None) -> Script:
    """The script of this text; what the text does not say (policy, seed, what it intends) is as in `like`."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise CaseError(f"the source is no Python: {error}") from error
    runs = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    if len(runs) != 1:
        raise CaseError("the source has no function run(p)")
    kept = (node for node in tree.body if node is not runs[0] and not _is_docstring(node))
    definitions = tuple(_segment(text, node) for node in kept if ast.unparse(node) not in GIVEN)
    lines = tuple(_segment(text, node) for node in runs[0].body if not isinstance(node, ast.Pass))
    return (like or Script()).model_copy(
        update={
            "settings": tuple(ast.unparse(decorator) for decorator in runs[0].decorator_list),
            "definitions": definitions,
            "steps": (Step(title="", lines=lines),) if lines else (),
        }
    )


def _segment(text: str, node: ast.stmt) -> str:
    """The node's own lines, decorators included, moved to the margin."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return dedent("\n".join(lines))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
