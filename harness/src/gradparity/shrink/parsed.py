"""Parsed: a script as syntax trees, for edits.

In: a script. Out: trees, one for each definition and each line, and from edited copies of them a script
again. An edit works on a copy, so a script that was tried never changes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradparity.generate.script import Script, Step

Trees = list[ast.Module]
Edit = Callable[[Trees], None]
BLOCKS = ("body", "orelse", "finalbody")
GIVEN = frozenset(("torch", "F", "p", "ctx", "self", "super", "range", "len", "tuple", "str", "float", "int"))
"""Names that are no variables of the program."""


@dataclass(frozen=True)
class Parsed:
    """A script and the trees of its definitions and lines, in the order in which they are written."""

    script: Script
    trees: tuple[ast.Module, ...]

    @classmethod
    def of(cls, script: Script) -> Parsed:
        """Parses every definition and every line."""
        texts = [*script.definitions, *(line for step in script.steps for line in step.lines)]
        return cls(script, tuple(ast.parse(text) for text in texts))

    def edited(self, edit: Edit) -> Script:
        """The script after an edit of copies of the trees; what became empty is gone."""
        trees = [copy.deepcopy(tree) for tree in self.trees]
        edit(trees)
        texts = iter([_text(tree) for tree in trees])
        definitions = tuple(filter(None, (next(texts) for _ in self.script.definitions)))
        steps = []
        for step in self.script.steps:
            lines = tuple(filter(None, [next(texts) for _ in step.lines]))
            if lines:
                steps.append(Step(title=step.title, lines=lines))
        return self.script.model_copy(update={"definitions": definitions, "steps": tuple(steps)})


def nodes(trees: Trees | tuple[ast.Module, ...]) -> Iterator[ast.AST]:
    """All nodes, in an order that copies share."""
    for tree in trees:
        yield from ast.walk(tree)


def blocks(trees: Trees | tuple[ast.Module, ...]) -> list[list[ast.stmt]]:
    """All lists of statements, outer ones first."""
    return [
        found
        for node in nodes(trees)
        for field in BLOCKS
        if isinstance(found := getattr(node, field, None), list)
    ]


def variables(node: ast.AST) -> list[str]:
    """Names that the node reads, except those that are given."""
    found = (
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    )
    return list(dict.fromkeys(name for name in found if name not in GIVEN))


def targets(statement: ast.stmt) -> list[str]:
    """Plain names that a statement assigns."""
    if not isinstance(statement, ast.Assign):
        return []
    return [
        each.id for target in statement.targets for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]  # fmt: skip


def rename(trees: Trees, old: str, new: str) -> None:
    """Every use of one name becomes another."""
    for node in nodes(trees):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = new


def _text(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.With, ast.If, ast.For, ast.Try))
            and not node.body
        ):
            node.body.append(ast.Pass())
    return ast.unparse(ast.fix_missing_locations(tree)) if tree.body else ""
