"""Where inputs are copied that a recording does not read where they are.

In: inputs. Out: `Buffer`, memory like that of an input. What is in a buffer matters from the copy to the end
of the replay. Recordings of one pool are replayed one after the other, on one stream, so all of them copy to
the same buffers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from retrograd.runtime.tensor import geometry_of, is_dense, new_memory, whole_of


@dataclass(frozen=True, eq=False)
class Buffer:
    """Where an input is copied to: the function gets `tensor`; `target` is its memory as it is written."""

    tensor: torch.Tensor
    target: torch.Tensor

    @staticmethod
    def of(value: torch.Tensor) -> Buffer:
        """A buffer like `value`. One whose elements do not fill their memory, each place once, is copied as a
        row from its first to its last element."""
        with torch.inference_mode(False):
            make = new_memory(value.device)
            tensor = make(tuple(value.shape), tuple(value.stride()), value.dtype)
        return Buffer(tensor, tensor if is_dense(tensor) else whole_of([tensor]))

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, as it is read."""
        return value if self.target is self.tensor else whole_of([value])


class Buffers:
    """Those of one pool, for as long as a recording has them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, Buffer] = weakref.WeakValueDictionary()

    def like(self, values: Sequence[torch.Tensor]) -> list[Buffer]:
        """A buffer for each of the values, which one recording copies."""
        alike: Counter[Hashable] = Counter()
        found = []
        for value in values:
            kind = value.dtype, geometry_of(value)
            key = kind, alike[kind]
            alike[kind] += 1
            buffer = self._known.get(key) or Buffer.of(value)
            self._known[key] = buffer
            found.append(buffer)
        return found
