"""Cuts of interfaces: parameters that a function does not need, results that nobody needs.

In: a script. Out: edits that change a definition and all calls and unpackings of it together.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from gradparity.generate.script import Script
from gradparity.shrink.cut import Cut
from gradparity.shrink.parsed import Parsed, Trees, blocks, nodes

CALLED_AS = {"program": "f", "forward": "f"}
"""The name under which the run calls what is compiled."""


def parameters(script: Script) -> Iterator[Cut]:
    """Each parameter of a compiled or nested function, with its argument in every call."""
    parsed = Parsed.of(script)
    for number, node in enumerate(nodes(parsed.trees)):
        if isinstance(node, ast.FunctionDef) and node.name != "run":
            for place in range(len(node.args.args)):
                yield partial(parsed.edited, partial(_drop_parameter, number, place))


def results(script: Script) -> Iterator[Cut]:
    """Each item of a returned tuple, with its name in the run and the lines there that use it."""
    parsed = Parsed.of(script)
    for number, node in enumerate(nodes(parsed.trees)):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            for place in range(len(node.value.elts)):
                yield partial(parsed.edited, partial(_drop_result, number, place))


def _drop_parameter(number: int, place: int, trees: Trees) -> None:
    function = list(nodes(trees))[number]
    assert isinstance(function, ast.FunctionDef)
    name = CALLED_AS.get(function.name, function.name)
    shift = 1 if function.args.args and function.args.args[0].arg in ("self", "ctx") else 0
    del function.args.args[place]
    for node in nodes(trees):
        if isinstance(node, ast.Call) and _called(node.func) == name and 0 <= place - shift < len(node.args):
            del node.args[place - shift]


def _called(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else ""


def _drop_result(number: int, place: int, trees: Trees) -> None:
    returned = list(nodes(trees))[number]
    assert isinstance(returned, ast.Return)
    assert isinstance(returned.value, ast.Tuple)
    count = len(returned.value.elts)
    returned.value = _without(returned.value, place)
    gone: set[str] = set()
    for node in nodes(trees):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            continue
        target = node.targets[0]
        if len(target.elts) == count and isinstance(node.value, ast.Call) and _called(node.value.func) == "f":
            gone |= {each.id for each in ast.walk(target.elts[place]) if isinstance(each, ast.Name)}
            node.targets[0] = _without(target, place)
    _drop_uses(gone, trees)


def _without(items: ast.Tuple, place: int) -> ast.expr:
    rest = items.elts[:place] + items.elts[place + 1 :]
    return rest[0] if len(rest) == 1 else ast.Tuple(rest, items.ctx)


def _drop_uses(names: set[str], trees: Trees) -> None:
    """Deletes every simple statement that reads one of the names."""
    for block in blocks(trees):
        block[:] = [each for each in block if not (isinstance(each, ast.Expr) and _reads(each, names))]


def _reads(statement: ast.stmt, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(statement))
