"""Symbolic sizes of example values: which symbols they have, where these can be read, how large a value is.

In: fake tensors and symbolic integers. Out: names of symbols; bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols


def symbols_in(value: Any) -> frozenset[str]:
    """The names of the symbols in the sizes, strides and offset of a tensor, or in a number."""
    if isinstance(value, torch.Tensor):
        numbers: Sequence[Any] = (*value.shape, *value.stride(), value.storage_offset())
    elif isinstance(value, (tuple, list)):
        numbers = value
    else:
        numbers = (value,)
    found = frozenset[str]()
    for number in numbers:
        if isinstance(number, torch.Tensor):
            found |= symbols_in(number)
        elif isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found |= {str(symbol) for symbol in free_symbols(number)}
    return found


def places_of_symbols(values: Sequence[Any]) -> Mapping[str, tuple[int, int | None]]:
    """Where symbols stand by themselves: by name, the position of a value and its dimension (None: the value
    is the symbol)."""
    found: dict[str, tuple[int, int | None]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if _is_symbol(size):
                    found.setdefault(str(size), (i, dim))
        elif _is_symbol(value):
            found[str(value)] = (i, None)
    return found


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and bool(value.node.expr.is_Symbol)


def bytes_of(value: torch.Tensor) -> float:
    """How many bytes the elements take; for symbolic sizes, as many as at capture."""
    count = 1
    for size in value.shape:
        hint = size.node.hint if isinstance(size, torch.SymInt) else size
        count *= 1 if hint is None else int(hint)
    return float(count * value.element_size())
