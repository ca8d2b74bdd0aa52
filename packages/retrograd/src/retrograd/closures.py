"""Inspects Python functions: closure variables, nested code objects, and the defining package.

In: functions and code. Out: values, code, and whether torch or this package defines something.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any


def closed_over(fn: types.FunctionType) -> dict[str, Any]:
    """The closure variables of `fn` by name. An unassigned variable is represented by its cell."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    return {name: cell.cell_contents if is_assigned(cell) else cell for name, cell in cells}


def is_assigned(cell: types.CellType) -> bool:
    """Whether the variable of a cell has a value."""
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code` and the code of all functions nested in it, outermost first."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def is_defined_here(value: Any) -> bool:
    """Whether torch or this package defines `value`: a function, a class, or the class of another object."""
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return str(getattr(owner, "__module__", "")).partition(".")[0] in ("torch", "retrograd")
