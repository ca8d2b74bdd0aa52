"""What Python keeps of a function: what its closure holds, the code inside its code, who defined it.

In: functions and code. Out: values, code, names of packages.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any


def closed_over(fn: types.FunctionType) -> dict[str, Any]:
    """What the closure of `fn` holds, by name; a cell that nothing is assigned to yet, for itself."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    return {name: cell.cell_contents if is_assigned(cell) else cell for name, cell in cells}


def is_assigned(cell: types.CellType) -> bool:
    """Whether the variable of a cell has a value."""
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code`, and that of the functions inside, from the outside in."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def is_defined_here(value: Any) -> bool:
    """Whether torch or this package defines `value`: a function, a class, or the class of something else."""
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return str(getattr(owner, "__module__", "")).partition(".")[0] in ("torch", "retrograd")
