"""Rewrites: one expression in another spelling that means the same.

In: a syntax tree of a function. Out: the tree rewritten, and how often. A rewrite keeps values to the bit,
gradients within what their dtype allows, and whether autograd saves anything: a second backward through a
graph that is not retained fails only where something was saved.
"""

from __future__ import annotations

import ast

METHODS = frozenset((
    "sin", "cos", "tanh", "exp", "sigmoid", "relu", "abs", "sqrt", "log", "square", "sum", "mean", "prod",
    "amax", "amin", "cumsum", "softmax", "log_softmax", "matmul", "mm", "bmm", "flip", "roll", "tril", "triu",
    "clamp", "masked_fill",
))  # fmt: skip
"""Functions of torch that are methods of their first argument too."""


class Rewriter(ast.NodeTransformer):
    """Rewrites what it can, from the inside out. `count`: how often."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """`torch.sin(x)` becomes `x.sin()`."""
        self.generic_visit(node)
        function = node.func
        if (
            not isinstance(function, ast.Attribute)
            or not isinstance(function.value, ast.Name)
            or function.value.id != "torch"
            or function.attr not in METHODS
            or not node.args
            or not isinstance(node.args[0], ast.Name)
        ):
            return node
        self.count += 1
        method = ast.Attribute(node.args[0], function.attr, ast.Load())
        return ast.Call(method, node.args[1:], node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """`x.mT` becomes `x.transpose(-2, -1)`."""
        self.generic_visit(node)
        if node.attr != "mT" or not isinstance(node.ctx, ast.Load):
            return node
        self.count += 1
        return _call(ast.Attribute(node.value, "transpose", ast.Load()), _number(-2), _number(-1))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """`a @ b` becomes `torch.matmul(a, b)`, `a - b` `a + -b`, `a ** 2` `a * a`."""
        self.generic_visit(node)
        made = _operator(node)
        self.count += made is not node
        return made


def _operator(node: ast.BinOp) -> ast.expr:
    left, right = node.left, node.right
    if isinstance(node.op, ast.MatMult):
        return _call(ast.Attribute(ast.Name("torch", ast.Load()), "matmul", ast.Load()), left, right)
    if isinstance(left, ast.Name) and _is_two(right) and isinstance(node.op, ast.Pow):
        return ast.BinOp(left, ast.Mult(), left)
    if isinstance(node.op, ast.Sub) and isinstance(left, ast.Name) and isinstance(right, ast.Name):
        return ast.BinOp(left, ast.Add(), ast.UnaryOp(ast.USub(), right))
    return node


def _is_two(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 2


def _call(function: ast.expr, *args: ast.expr) -> ast.Call:
    return ast.Call(function, list(args), [])


def _number(value: int) -> ast.expr:
    return ast.UnaryOp(ast.USub(), ast.Constant(-value))
