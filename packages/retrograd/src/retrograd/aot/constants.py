"""Arguments that are no tensors, as parts of a key: by value where a value can be told, else by identity.

In: a leaf of the arguments. Out: something hashable, equal for two leaves that a capture may not tell apart.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

#: types whose values ``==`` tells apart.
PLAIN_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice}
)

#: of these, ``==`` takes 0.0 for -0.0, and nan for nothing.
_FLOATING = (float, complex)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object, equal to itself only; it is kept, so that no other gets its identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constant_key(value: Any) -> Hashable:
    """Equal for two values that are the same to a program that only reads them."""
    kind = type(value)
    if kind in _FLOATING:
        return kind, repr(value)
    if kind is slice:
        return kind, constant_key(value.start), constant_key(value.stop), constant_key(value.step)
    if kind in PLAIN_VALUES:
        return kind, value
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind != "O":
        return kind, str(value.dtype), value.shape, value.tobytes()
    return _Same(value)
