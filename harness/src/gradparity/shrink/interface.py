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
RESULT_OF = ("f", "program")
"""What gives the results: what is compiled, or, where compiling it was cut, the function itself."""


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
        call = node.value
        if len(target.elts) == count and isinstance(call, ast.Call) and _called(call.func) in RESULT_OF:
            gone |= {each.id for each in ast.walk(target.elts[place]) if isinstance(each, ast.Name)}
            node.targets[0] = _without(target, place)
    _drop_uses(gone, trees)


def _without(items: ast.Tuple, place: int) -> ast.expr:
    rest = items.elts[:place] + items.elts[place + 1 :]
    return rest[0] if len(rest) == 1 else ast.Tuple(rest, items.ctx)


def _drop_uses(names: set[str], trees: Trees) -> None:
    """Takes the names out of sums and out of lists of roots, and deletes every simple statement that reads
    one of them still.
    """
    for block in blocks(trees):
        for statement in block:
            if isinstance(statement, ast.Expr):
                _Less(names).visit(statement)
        block[:] = [each for each in block if not (isinstance(each, ast.Expr) and _reads(each, names))]


class _Less(ast.NodeTransformer):
    """A statement without these names: of a sum the other summands stay, of `torch.autograd.backward` and
    `grad` the other roots with their cotangents.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """The side of a sum that does not read them."""
        self.generic_visit(node)
        left, right = _reads(node.left, self._names), _reads(node.right, self._names)
        if isinstance(node.op, ast.Add) and left is not right:
            return node.right if left else node.left
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The call with fewer roots."""
        self.generic_visit(node)
        lists = [each for each in node.args if isinstance(each, ast.List)]
        if not ast.unparse(node.func).startswith("torch.autograd.") or len(lists) < 2:
            return node
        roots, cotangents = lists[0], lists[-1]
        kept = [place for place, each in enumerate(roots.elts) if not _reads(each, self._names)]
        if kept and len(cotangents.elts) == len(roots.elts):
            for each in (roots, cotangents):
                each.elts = [each.elts[place] for place in kept]
        return node


def _reads(statement: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(statement))
