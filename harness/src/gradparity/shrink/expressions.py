"""Cuts of expressions: an operand in the place of a call, fewer arguments, smaller numbers, plain dtypes.

In: a script. Out: edits, each of which gives a smaller one.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from functools import partial

from gradparity.generate.script import Script
from gradparity.shrink.cut import Cut
from gradparity.shrink.parsed import Parsed, Trees, nodes

NARROW = ("bfloat16", "float16", "float64", "complex64", "complex128")


def operands(script: Script) -> Iterator[Cut]:
    """Each expression as one of its parts."""
    parsed = Parsed.of(script)
    for number, node in enumerate(nodes(parsed.trees)):
        if isinstance(node, ast.expr):
            for place in range(len(_parts(node))):
                yield partial(parsed.edited, partial(_replace, number, place))


def plain_operators(script: Script) -> Iterator[Cut]:
    """Each call as a product of one of its parts, or the sum of two: an operator that does not matter becomes
    one that is known not to.
    """
    parsed = Parsed.of(script)
    for number, node in enumerate(nodes(parsed.trees)):
        if isinstance(node, ast.Call) and not _is_recording(node):
            count = len(_parts(node))
            for place in range(count):
                yield partial(parsed.edited, partial(_multiply, number, place))
            if count > 1:
                yield partial(parsed.edited, partial(_add, number))


def arguments(script: Script) -> Iterator[Cut]:
    """Each call without one of its keywords or its last argument; each tuple and list without one item."""
    parsed = Parsed.of(script)
    for number, node in enumerate(nodes(parsed.trees)):
        if isinstance(node, ast.Call):
            for place in range(len(node.keywords)):
                yield partial(parsed.edited, partial(_drop, number, "keywords", place))
            if len(node.args) > 1:
                yield partial(parsed.edited, partial(_drop, number, "args", len(node.args) - 1))
        if isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load):
            for place in range(len(node.elts)):
                yield partial(parsed.edited, partial(_drop, number, "elts", place))


def constants(script: Script) -> Iterator[Cut]:
    """Each name that the top of the program gives to a constant or a lambda, as what it stands for; each
    entry of a table there that is looked up by a constant, in the place of the lookup.
    """
    parsed = Parsed.of(script)
    held = _held(parsed.trees)
    for name, value in held.items():
        if isinstance(value, (ast.Constant, ast.Lambda)):
            yield partial(parsed.edited, partial(_write_out, name))
    for number, node in enumerate(nodes(parsed.trees)):
        if _entry(node, held) is not None:
            yield partial(parsed.edited, partial(_look_up, number))


def called_lambdas(script: Script) -> Iterator[Cut]:
    """Each call of a lambda as its body."""
    parsed = Parsed.of(script)
    for number, node in enumerate(nodes(parsed.trees)):
        call = node if isinstance(node, ast.Call) and not node.keywords else None
        if call and isinstance(call.func, ast.Lambda) and len(call.args) == len(call.func.args.args):
            yield partial(parsed.edited, partial(_apply, number))


def sizes(script: Script) -> Iterator[Cut]:
    """Each whole number, made smaller wherever it stands; then each place alone."""
    parsed = Parsed.of(script)
    found = {number: value for number, node in enumerate(nodes(parsed.trees)) if (value := _whole(node))}
    for value in sorted(set(found.values()), reverse=True):
        for smaller in _smaller(value):
            yield partial(parsed.edited, partial(_renumber, value, smaller))
    for number, value in found.items():
        for smaller in _smaller(value):
            yield partial(parsed.edited, partial(_set, number, smaller))


def numbers(script: Script) -> Iterator[Cut]:
    """Each fraction as 2.0 or 1.0, each word of a mode as the shortest."""
    parsed = Parsed.of(script)
    for number, node in enumerate(nodes(parsed.trees)):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in (1.0, 2.0):
            yield partial(parsed.edited, partial(_set, number, 2.0))


def dtypes(script: Script) -> Iterator[Cut]:
    """Each narrow or wide dtype as float32, everywhere."""
    parsed = Parsed.of(script)
    for name in NARROW:
        if any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes(parsed.trees)):
            yield partial(parsed.edited, partial(_plain_dtype, name))


def _parts(node: ast.expr) -> list[ast.expr]:
    """The expressions that may stand for this one."""
    if isinstance(node, ast.Call):
        receiver = (
            [node.func.value]
            if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value)
            else []
        )
        return [*receiver, *(each for each in node.args if not isinstance(each, ast.Starred))]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not _is_module(node.value):
        return [node.value]
    return [node.elts[0]] if isinstance(node, ast.Tuple) and len(node.elts) == 1 else []


def _is_module(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "p", "ctx", "math", "gc", "threading")


def _is_recording(node: ast.Call) -> bool:
    base: ast.expr = node.func
    while isinstance(base, ast.Attribute):
        base = base.value
    return isinstance(base, ast.Name) and base.id in ("p", "ctx", "f", "super")


def _replace(number: int, place: int, trees: Trees) -> None:
    old = list(nodes(trees))[number]
    assert isinstance(old, ast.expr)
    _swap(old, _parts(old)[place], trees)


def _multiply(number: int, place: int, trees: Trees) -> None:
    old = list(nodes(trees))[number]
    assert isinstance(old, ast.expr)
    _swap(old, ast.BinOp(_parts(old)[place], ast.Mult(), ast.Constant(2)), trees)


def _add(number: int, trees: Trees) -> None:
    old = list(nodes(trees))[number]
    assert isinstance(old, ast.expr)
    one, two, *_ = _parts(old)
    _swap(old, ast.BinOp(one, ast.Add(), two), trees)


def _held(trees: Trees | tuple[ast.Module, ...]) -> dict[str, ast.expr]:
    """What names stand for that the top of the program assigns, and nothing else does."""
    stored = [
        node.id for node in nodes(trees) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    found = {}
    for tree in trees:
        for statement in tree.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
                if isinstance(target, ast.Name) and stored.count(target.id) == 1:
                    found[target.id] = statement.value
    return found


def _entry(node: ast.AST, held: dict[str, ast.expr]) -> ast.expr | None:
    """The entry of a table at the top of the program that this expression looks up."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
        return None
    table = held.get(node.value.id) if isinstance(node.value, ast.Name) else node.value
    wanted = node.slice.value
    if isinstance(table, ast.Dict):
        pairs = zip(table.keys, table.values, strict=True)
        return next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == wanted), None)
    if isinstance(table, (ast.Tuple, ast.List)) and type(wanted) is int and -1 <= wanted < len(table.elts):
        return table.elts[wanted]
    return None


def _write_out(name: str, trees: Trees) -> None:
    value = _held(trees)[name]
    for node in list(nodes(trees)):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            _swap(node, copy.deepcopy(value), trees)


def _look_up(number: int, trees: Trees) -> None:
    node = list(nodes(trees))[number]
    value = _entry(node, _held(trees))
    assert isinstance(node, ast.expr)
    assert value is not None
    _swap(node, copy.deepcopy(value), trees)


def _apply(number: int, trees: Trees) -> None:
    call = list(nodes(trees))[number]
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Lambda)
    body = ast.Expression(call.func.body)
    for parameter, argument in zip(call.func.args.args, call.args, strict=True):
        for node in list(ast.walk(body)):
            if isinstance(node, ast.Name) and node.id == parameter.arg:
                _swap(node, copy.deepcopy(argument), [body])
    _swap(call, body.body, trees)


def _swap(old: ast.expr, new: ast.expr, trees: Sequence[ast.AST]) -> None:
    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else self.generic_visit(node)

    for tree in trees:
        Swap().visit(tree)


def _drop(number: int, field: str, place: int, trees: Trees) -> None:
    del getattr(list(nodes(trees))[number], field)[place]


def _whole(node: ast.AST) -> int:
    """The whole number above 1 that stands here; 0 if none does."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) is int and value > 1 else 0


def _smaller(value: int) -> list[int]:
    return [each for each in dict.fromkeys((1, 2, 3, value // 2, value - 1)) if each < value]


def _renumber(value: int, smaller: int, trees: Trees) -> None:
    for node in nodes(trees):
        if isinstance(node, ast.Constant) and _whole(node) == value:
            node.value = smaller


def _set(number: int, value: float, trees: Trees) -> None:
    node = list(nodes(trees))[number]
    assert isinstance(node, ast.Constant)
    node.value = value


def _plain_dtype(name: str, trees: Trees) -> None:
    for node in nodes(trees):
        if isinstance(node, ast.Attribute) and node.attr == name:
            node.attr = "float32"
