"""Arguments that are not tensors, as parts of a key: by value where possible, else by identity.

In: a leaf of the arguments. Out: something hashable, equal for two leaves that a capture cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

#: types whose values are compared, rather than their identities.
PLAIN_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice}
)

#: for these, ``==`` says that 0.0 is -0.0, and that nan is not nan.
_FLOATING = (float, complex)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object, equal only to itself. It is kept alive, so that no other object gets its identity."""

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


def is_same_constant(one: Any, other: Any) -> bool:
    """Whether two values are the same to a program that only reads them; other objects say so by ``==``."""
    if type(one) is not type(other) or (one is other and type(one) in PLAIN_VALUES):
        return one is other
    key = constant_key(one)
    return bool(one == other) if isinstance(key, _Same) else constant_key(other) == key
