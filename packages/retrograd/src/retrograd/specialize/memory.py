"""Do inputs share memory as they did when code was made that writes to some of them?

In: the inputs then, and now. Out: `MemoryGuard.fits`. Which tensors share memory, and where each of these
begins in it, must be the same. Tensors that lie where they lay in the last call are not looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd._torch.tensor import addresses_are, storage_of
from retrograd._torch.trace import groups_sharing_memory

#: groups of places that share memory, each with the offsets of its members.
Layout = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def memory_layout(values: Sequence[Any]) -> Layout:
    """Which of the tensors among `values` share memory, and where each of these begins in it."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
    groups = groups_sharing_memory(tensors)
    return tuple((group, tuple(int(tensors[i].storage_offset()) for i in group)) for group in groups)


class MemoryGuard:
    """Guards the sharing of memory.

    Args:
        values: the inputs that the code was made for.
        moving: places of the inputs that lie elsewhere in each call, such as a batch.
    """

    def __init__(self, values: Sequence[Any], moving: Sequence[int]) -> None:
        self._layout = memory_layout(values)
        plain = [i for i, value in enumerate(values) if _is_plain(value)]
        self._moving = [i for i in moving if i in plain]
        self._fixed = [i for i in plain if i not in moving]
        self._is_simple = not self._layout and len(plain) == sum(isinstance(v, torch.Tensor) for v in values)
        self._addresses: list[int] = []
        self._storages: frozenset[int] = frozenset()

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether `values` share memory in the same way."""
        if self._addresses and self._is_simple and addresses_are(list(values), self._addresses, self._fixed):
            found = [storage_of(values[i]) for i in self._moving if values[i].numel()]
            return len(set(found)) == len(found) and self._storages.isdisjoint(found)
        if memory_layout(values) != self._layout:
            return False
        self._addresses = [v.data_ptr() if _is_plain(v) else 0 for v in values]
        self._storages = frozenset(storage_of(values[i]) for i in self._fixed)
        return True


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
