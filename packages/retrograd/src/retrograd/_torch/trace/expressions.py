"""Symbolic sizes as plain data, and back, without evaluating any text.

In: sizes of fake tensors and the guards of their shape environment. Out: trees of lists, strings and
integers; of such trees, a new shape environment with equal symbols and guards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions

from retrograd.errors import Refusal

#: an integer, the name of a symbol, or ``[function, *arguments]``.
Tree = Any

_OF_SYMPY = (
    sympy.Add, sympy.Mul, sympy.Pow, sympy.Eq, sympy.Ne, sympy.StrictLessThan, sympy.LessThan,
    sympy.StrictGreaterThan, sympy.GreaterThan, sympy.And, sympy.Or, sympy.Not,
)  # fmt: skip
_OF_TORCH = (
    "FloorDiv", "Mod", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "IntTrueDiv", "FloatTrueDiv",
    "ToFloat", "Max", "Min", "PowByNatural", "FloatPow", "TruncToInt", "RoundToInt", "ModularIndexing",
    "Where", "Identity",
)  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    **{cls.__name__: cls for cls in _OF_SYMPY},
    **{name: getattr(functions, name) for name in _OF_TORCH},
}


@dataclass(frozen=True)
class Symbol:
    """A size that may differ.

    Attributes:
        hint: its value at capture.
        lower, upper: what it may be; None for no limit.
    """

    hint: int
    lower: int | None
    upper: int | None


def encoded(size: Any) -> Tree:
    """A size, or an expression over symbols, as a tree."""
    if isinstance(size, (torch.SymInt, torch.SymBool)):
        size = size.node.expr
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    if isinstance(size, sympy.Integer):
        return int(size)
    if isinstance(size, sympy.Symbol):
        return size.name
    if isinstance(size, sympy.Basic) and _FUNCTIONS.get(type(size).__name__) is type(size):
        return [type(size).__name__, *map(encoded, size.args)]
    raise Refusal("size", f"the size {size}")


def decoded(tree: Tree, symbols: Mapping[str, Any]) -> Any:
    """The expression of a tree."""
    if type(tree) is int:
        return sympy.Integer(tree)
    if isinstance(tree, str) and tree in symbols:
        return symbols[tree]
    if isinstance(tree, list) and tree and tree[0] in _FUNCTIONS:
        return _FUNCTIONS[tree[0]](*[decoded(argument, symbols) for argument in tree[1:]])
    raise ValueError(f"the size {tree!r}")


def symbols_of(shape_env: ShapeEnv | None, sizes: Sequence[Any]) -> dict[str, Symbol]:
    """The symbols of which `sizes` are made."""
    found: dict[str, Symbol] = {}
    for size in sizes:
        for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
            assert shape_env is not None
            if symbol not in shape_env.backed_var_to_val:
                raise Refusal("size", f"the size {symbol}, which depends on data,")
            allowed = shape_env.var_to_range[symbol]
            hint = int(shape_env.backed_var_to_val[symbol])
            found[symbol.name] = Symbol(hint, _integer(allowed.lower), _integer(allowed.upper))
    return found


def _integer(limit: Any) -> int | None:
    return int(limit) if isinstance(limit, (int, sympy.Integer)) else None


def guards_of(shape_env: ShapeEnv | None) -> list[Tree]:
    """What tracing relied on, beyond the sizes that have become static.

    Raises:
        Refusal: as `encoded`.
    """
    if shape_env is None:
        return []
    left = [shape_env.replace(guard.expr) for guard in shape_env.guards]
    return [encoded(guard) for guard in left if guard is not sympy.true]


def symbolic_mode(
    symbols: Mapping[str, Symbol], guards: Sequence[Tree]
) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """A fake mode with these symbols and guards, and for each symbol a size."""
    env = ShapeEnv()
    made = {
        name: env.create_symbol(symbol.hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
        for name, symbol in symbols.items()
    }
    for guard in guards:
        env.evaluate_expr(decoded(guard, made))
    sizes: dict[str, Any] = {
        name: env.create_symintnode(expression, hint=symbols[name].hint, source=ConstantSource(name))
        for name, expression in made.items()
    }
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True), sizes


def size_of(tree: Tree, mode: FakeTensorMode, sizes: Mapping[str, torch.SymInt]) -> Any:
    """The size that a tree stands for, in the environment that `symbolic_mode` made."""
    if type(tree) is int:
        return tree
    expression = decoded(tree, {name: size.node.expr for name, size in sizes.items()})
    hint = _valued(tree, {name: int(size.node.hint) for name, size in sizes.items()})
    assert mode.shape_env is not None
    return mode.shape_env.create_symintnode(expression, hint=int(hint))


def _valued(tree: Tree, values: Mapping[str, int]) -> Any:
    return decoded(tree, {name: sympy.Integer(value) for name, value in values.items()})


def shown(tree: Tree, names: Mapping[str, str]) -> int | str:
    """The tree for people; symbols by other names, which do not depend on the process."""
    if type(tree) is int:
        return tree
    return str(
        decoded(
            tree, {name: sympy.Symbol(short, integer=True, positive=True) for name, short in names.items()}
        )
    )


def value_of(tree: Tree, values: Mapping[str, int]) -> int:
    """The size that a tree gives for these values of its symbols."""
    return int(_valued(tree, values))


def holds(guard: Tree, values: Mapping[str, int]) -> bool:
    """Whether a guard holds for these values of its symbols."""
    return bool(_valued(guard, values))
