"""Buffers for inputs that a recording does not read at their own address.

In: inputs. Out: `Buffer`, memory with an input's layout. Its content matters only from the copy to the end of
the replay. The recordings of a pool are replayed one at a time, on one stream, so they share the buffers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Sequence

import torch

from retrograd.runtime.tensor import geometry_of, is_dense, new_memory, whole_of


class Buffer:
    """A copy's destination, like `value`. The function reads `tensor`; we write `target`, which has the same
    memory. If elements overlap or leave gaps, we copy the memory from the first to the last element as one
    row."""

    def __init__(self, value: torch.Tensor) -> None:
        with torch.inference_mode(False):
            make = new_memory(value.device)
            self.tensor = make(tuple(value.shape), tuple(value.stride()), value.dtype)
        self.target = self.tensor if is_dense(self.tensor) else whole_of([self.tensor])

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor to copy from: `value`, or its memory as one row."""
        return value if self.target is self.tensor else whole_of([value])


class Buffers:
    """The buffers of one pool. Each lives as long as a recording uses it."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, Buffer] = weakref.WeakValueDictionary()

    def like(self, values: Sequence[torch.Tensor]) -> list[Buffer]:
        """A buffer for each value. One recording copies all of them, so no two share a buffer."""
        alike: Counter[Hashable] = Counter()
        found = []
        for value in values:
            kind = value.dtype, geometry_of(value)
            key = kind, alike[kind]
            alike[kind] += 1
            buffer = self._known.get(key) or Buffer(value)
            self._known[key] = buffer
            found.append(buffer)
        return found
