"""Rows: statements from tables.

In: a scope and a table's name. Out: whether a statement was added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradparity.generate.draft import Scope
from gradparity.generate.holes import fill
from gradparity.generate.tables import elementwise, indexing, inplace, linear, randomness, reductions, views


def rows(table: str) -> tuple[str, ...]:
    """The rows of a table."""
    return tuple(line for line in table.splitlines() if line and not line.startswith("#"))


TABLES: dict[str, tuple[str, ...]] = {
    "unary": rows(elementwise.UNARY),
    "binary": rows(elementwise.BINARY),
    "cast": rows(elementwise.CAST),
    "factory": rows(elementwise.FACTORY),
    "extreme": rows(elementwise.EXTREME),
    "sum": rows(reductions.SUM),
    "reduction": rows(reductions.SUM + reductions.REDUCTION),
    "norm": rows(reductions.NORM),
    "linear": rows(linear.LINEAR),
    "solve": rows(linear.SOLVE),
    "convolution": rows(linear.CONVOLUTION),
    "attention": rows(linear.ATTENTION),
    "view": rows(views.VIEW),
    "relaid": rows(views.RELAID),
    "move": rows(views.MOVE),
    "format": rows(views.FORMAT),
    "index": rows(indexing.INDEX),
    "scatter": rows(indexing.SCATTER),
    "inplace": rows(inplace.INPLACE),
    "through_view": rows(inplace.THROUGH_VIEW),
    "metadata": rows(inplace.METADATA),
    "random": rows(randomness.RANDOM),
    "complex": rows(randomness.COMPLEX),
}
CHANGES = ("inplace", "through_view", "metadata")
"""The tables whose statements change a tensor."""
OPERAND = re.compile(r"\b[a-z]\d+\b")


def add_row(scope: Scope, row: str) -> bool:
    """One row as a statement."""
    text = fill(scope, row[1:] if row.startswith("!") else "{out} = " + row)
    return text is not None and scope.add(text)


def add_from(scope: Scope, table: str) -> bool:
    """A row of this table as a statement."""
    if table in CHANGES:
        scope.draft.intends.add("version")
    return add_row(scope, scope.chance.deal(table, TABLES[table]))


def add_overwritten(scope: Scope) -> bool:
    """A statement that reads a tensor, and at once a change of that tensor in place. Whoever runs the first
    statement in the tensor's memory, or later, shows the change.
    """
    before = len(scope.lines)
    if not add_from(scope, scope.chance.pick(("scatter", "scatter", "view", "move", "unary", "binary"))):
        return False
    named = OPERAND.findall(scope.lines[before].partition("=")[2])
    read = next((each for each in named if each in scope.env), None)
    change = scope.chance.pick(("zero_()", "fill_(2)", "mul_(2)", "add_(1)", "neg_()"))
    scope.draft.intends.add("version")
    return read is not None and scope.add(f"{read}.{change}")


def add_some(scope: Scope, count: int, tables: Sequence[str] = ("unary", "binary", "view")) -> None:
    """About so many statements from these tables."""
    for _ in range(count):
        add_from(scope, scope.chance.pick(tables))


def tables_of(scope: Scope) -> tuple[str, ...]:
    """The tables that the policy uses; the plain ones if it uses none."""
    used = tuple(name for name in scope.draft.policy.kinds if name in TABLES)
    return used or ("unary", "binary", "view")
