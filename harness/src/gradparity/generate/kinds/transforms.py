"""torch.func transforms, derivatives inside the function, and control flow operators.

In: a scope. Out: a nested function and a statement that transforms and calls it.
"""

from __future__ import annotations

import re

from gradparity.generate.draft import Scope, is_float
from gradparity.generate.kinds.functions import apply_function
from gradparity.generate.rows import add_some

OF_SCALAR = (
    "torch.func.grad({f})({x})",
    "torch.func.grad({f})({x})",
    "torch.func.grad_and_value({f})({x})[0]",
    "torch.func.jacrev({f})({x})",
    "torch.func.hessian({f})({x}).sum(0)",
    "torch.autograd.functional.jacobian({f}, {x}, create_graph=True)",
    "torch.autograd.grad({f}({x}), {x}, create_graph=True)[0]",
    "torch.autograd.grad({f}({x}), {x}, create_graph=True)[0] * {x}",
    "torch.autograd.grad({f}({x}), {x})[0]",
    "torch.func.vmap(torch.func.grad({f}))({x})",
)
"""Transforms of a function with one number as its result."""

OF_TENSOR = (
    "torch.func.vjp({f}, {x})[1](torch.ones_like({f}({x})))[0]",
    "torch.func.jvp({f}, ({x},), ({x} * 0.5,))[1]",
    "torch.func.linearize({f}, {x})[1]({x} * 0.5)",
    "torch.func.functionalize({f})({x})",
    "torch.func.jacfwd({f})({x}).sum(0)",
    "torch.autograd.functional.vjp({f}, {x}, torch.ones_like({f}({x})))[1]",
    "torch.autograd.grad({f}({x}), {x}, torch.ones_like({f}({x})), create_graph=True)[0]",
)
OVER_ROWS = (
    "torch.vmap({f})({x})",
    "torch.vmap({f}, out_dims=-1)({x})",
    "torch.vmap({f}, chunk_size=1)({x})",
)
"""Transforms that call the function with one row at a time."""

ENDS_THE_PROCESS = (
    (
        "torch.func.linearize",
        re.compile(r"\b(value|alpha)="),
        "torch 2.11 to 2.15: forward derivatives, inside make_fx, of an operator that takes a number by "
        "keyword, as torch.add(t, a, alpha=0.1), are a segmentation fault",
    ),
)
"""What is not drawn, because torch dies of it: a transform, what stands in its function, and why."""

SMALL = 64
PLAIN = ("unary", "unary", "binary", "reduction")


def transformed(scope: Scope) -> bool:
    """A transform of a nested function, which may apply a custom Function."""
    name = scope.choose(lambda t: is_float(t) and 0 < t.ndim <= 3 and 0 < t.numel() <= SMALL)
    if name is None:
        return False
    table = scope.chance.weighted({OF_SCALAR: 4, OF_TENSOR: 3, OVER_ROWS: 2})
    row = scope.chance.pick(table)
    value = scope.env[name]
    function = _nested(scope, value[0] if "vmap" in row else value, table is OF_SCALAR)
    if function is None or _ends_the_process(scope, row):
        return False
    out = scope.draft.name("v")
    return scope.add(f"{out} = {row.replace('{f}', function).replace('{x}', name)}")


def _ends_the_process(scope: Scope, row: str) -> bool:
    """Whether torch dies of this transform of the function that was just defined."""
    text = "\n".join([*scope.draft.definitions, *scope.lines[-1:]])
    return any(transform in row and inside.search(text) for transform, inside, _ in ENDS_THE_PROCESS)


def higher_order(scope: Scope) -> bool:
    """A branch or a loop as an operator."""
    name = scope.choose(lambda t: is_float(t) and 0 < t.ndim <= 3 and 0 < t.numel() <= SMALL)
    if name is None:
        return False
    one, two = _nested(scope, scope.env[name], False, False), _nested(scope, scope.env[name], False, False)
    if one is None or two is None:
        return False
    out = scope.draft.name("v")
    return scope.add(f"{out} = torch.cond({name}.sum() > 0, {one}, {two}, ({name},))")


def _nested(scope: Scope, value: object, scalar: bool, functions: bool = True) -> str | None:
    """Defines a nested function of one tensor and gives its name."""
    function, param = scope.draft.name("f"), scope.draft.name("t")
    inner = scope.nested({param: value})
    if not functions or scope.chance.flip(0.45) or not apply_function(inner, setup=True, on=param):
        add_some(inner, scope.chance.between(1, 2), PLAIN)
    made = [each for each in inner.tensors(is_float) if each not in scope.env] or [param]
    result = f"{made[-1]}.sum()" if scalar else made[-1]
    return function if scope.close_function(inner, f"def {function}({param}):", result) else None
