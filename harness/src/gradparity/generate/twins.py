"""Twins: other forms of a program that must give the same gradients and values, within what dtypes allow.

In: a source text with `def run(p)`. Out: by name, other texts: unrelated statements in another order,
operands of commutative operators swapped, operators in another spelling, a loss split into its terms.
Functions that change tensors in place, or draw random numbers, are left as they are: there an order means
something.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from gradparity.generate.rewrites import Rewriter

IMPURE = re.compile(r"(?:\w_|dropout|rand\w*|bernoulli|normal|multinomial|checkpoint|apply|backward|append)$")
"""Names of calls after which an order means something; those with a "_" at the end change a tensor."""

Edit = Callable[[ast.Module], bool]


def twins(source: str) -> dict[str, str]:
    """The other forms that this program has."""
    made = {name: _edited(source, edit) for name, edit in EDITS.items()}
    return {name: text for name, text in made.items() if text is not None}


def reordered(tree: ast.Module) -> bool:
    """Swaps neighbouring assignments of which neither reads what the other writes."""
    changed = False
    for function in _pure_functions(tree):
        place = 0
        while place + 1 < len(function.body):
            one, two = function.body[place : place + 2]
            if _are_unrelated(one, two):
                function.body[place : place + 2] = [two, one]
                changed, place = True, place + 1
            place += 1
    return changed


def commuted(tree: ast.Module) -> bool:
    """Swaps the operands of sums and products of two names."""
    changed = False
    for function in _pure_functions(tree):
        for node in ast.walk(function):
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, (ast.Add, ast.Mult))
                and isinstance(node.left, ast.Name)
                and isinstance(node.right, ast.Name)
            ):
                node.left, node.right, changed = node.right, node.left, True
    return changed


def respelled(tree: ast.Module) -> bool:
    """Writes operators in another way that means the same."""
    rewriter = Rewriter()
    for function in _pure_functions(tree):
        rewriter.visit(function)
    return rewriter.count > 0


def split(tree: ast.Module) -> bool:
    """Runs one backward for each term of a loss, or for each root, instead of one for all."""
    changed = False
    for block in _blocks(tree):
        for place, statement in reversed(list(enumerate(block))):
            terms = _terms(statement)
            if len(terms) > 1:
                block[place : place + 1] = [ast.parse(text).body[0] for text in terms]
                changed = True
    return changed


EDITS: dict[str, Edit] = {
    "unrelated statements reordered": reordered,
    "commuted operands": commuted,
    "equivalent operators": respelled,
    "split losses": split,
}


def _edited(source: str, edit: Edit) -> str | None:
    tree = ast.parse(source)
    return ast.unparse(ast.fix_missing_locations(tree)) if edit(tree) else None


def _pure_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions that are compiled (all but `run` and what stands in classes), if order means nothing
    there.
    """
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef)
            and node.name != "run"
            and not any(map(_is_impure, ast.walk(node)))
        ):
            yield node


def _is_impure(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return bool(IMPURE.search(_last(node.func)))
    stored = isinstance(getattr(node, "ctx", None), ast.Store)
    return isinstance(node, (ast.AugAssign, ast.Global, ast.Nonlocal)) or (
        stored and isinstance(node, (ast.Subscript, ast.Attribute))
    )


def _last(function: ast.expr) -> str:
    """ "sin" of `torch.sin` and of `sin`."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _are_unrelated(one: ast.stmt, two: ast.stmt) -> bool:
    if not isinstance(one, ast.Assign) or not isinstance(two, ast.Assign):
        return False
    writes, reads = zip(*map(_names, (one, two)), strict=True)
    return not (writes[0] & (writes[1] | reads[1]) or writes[1] & reads[0])


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """What a statement writes and what it reads."""
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    written = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return written, {node.id for node in names if isinstance(node.ctx, ast.Load)}


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.With)):
            yield node.body


def _terms(statement: ast.stmt) -> list[str]:
    """The statements that a split backward has; fewer than two if it cannot be split."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.keywords:
        return []
    if ast.unparse(call.func) == "torch.autograd.backward" and len(call.args) == 2:
        roots, cotangents = call.args
        if isinstance(roots, ast.List) and isinstance(cotangents, ast.List):
            pairs = zip(map(ast.unparse, roots.elts), map(ast.unparse, cotangents.elts), strict=True)
            return _kept([f"torch.autograd.backward([{root}], [{other}]" for root, other in pairs])
    if call.func.attr == "backward" and not call.args and isinstance(call.func.value, ast.BinOp):
        return _kept([f"({ast.unparse(term)}).backward(" for term in _summands(call.func.value)])
    return []


def _kept(calls: list[str]) -> list[str]:
    """All but the last keep the graph."""
    kept = [f"{call}{', ' if call[-1] == ']' else ''}retain_graph=True)" for call in calls[:-1]]
    return [*kept, f"{calls[-1]})"] if calls else []


def _summands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_summands(node.left), *_summands(node.right)]
    return [node]
