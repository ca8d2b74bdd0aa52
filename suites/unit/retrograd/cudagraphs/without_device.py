"""A recorder without a device: it remembers where the inputs were, and computes from there again.

What it records reads the memory that the inputs had, not the inputs of the call, and writes its results to
the same memory in each replay. A replay also spoils what later recordings in its pool have given: it may work
there. So a stale address, a missing copy and a result that is overwritten show as wrong numbers, as they
would on a GPU.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from retrograd.process import ForkSafeLock


class Replayed:
    def __init__(self, fn, inputs: Sequence[Any], outputs: Sequence[Any], recorder: Recorder) -> None:
        self._memory = [
            recorder.unheld(value) if isinstance(value, torch.Tensor) else value for value in inputs
        ]
        self._fn, self._recorder = fn, recorder
        #: recorded later, in the same pool.
        self.later: list[weakref.ref[Replayed]] = []
        given = {value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)}
        self._written = [
            (place, output.data)
            for place, output in enumerate(outputs)
            if isinstance(output, torch.Tensor) and output.untyped_storage()._cdata not in given
        ]
        recorder.written.update(output.untyped_storage().data_ptr() for _, output in self._written)
        self.spoil()  # nothing has been computed yet

    def spoil(self) -> None:
        for _, output in self._written:
            if output.is_floating_point() and output.numel():
                _row(output).fill_(float("nan"))

    def replay(self) -> None:
        self._recorder.replays += 1
        results = self._fn(list(self._memory))
        for later in self.later:
            if (other := later()) is not None:
                other.spoil()
        for place, output in self._written:
            _row(output).copy_(_row(results[place]))


class Recorder:
    """Records on the CPU. `now` is why it does not; `current` the stream."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.records = self.replays = 0
        self.replaying = ForkSafeLock()
        self.written: set[int] = set()
        self.made = self.waits = 0
        self._in_pools: dict[int | None, list[weakref.ref[Replayed]]] = {}
        self.pools: list[int | None] = []
        self.now: str | None = None
        self.current = 0

    def why_not_now(self) -> str | None:
        return self.now

    def stream(self, device: torch.device) -> int:
        return self.current

    def unheld(self, value: torch.Tensor) -> torch.Tensor:
        """The same memory. It is held, so that replays can read it whoever else lets it go, unless a
        recording has made it: then that one holds it, and counts who else does."""
        memory = value.untyped_storage()
        if memory.data_ptr() not in self.written or not memory.nbytes():
            return value.data
        bytes_ = (ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr())
        whole = torch.frombuffer(bytes_, dtype=value.dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    def wait_for_streams(self) -> None:
        self.waits += 1

    def new_pool(self) -> int:
        self.made += 1
        return self.made

    def record(
        self, fn, inputs: Sequence[Any], device: torch.device, pool: int | None
    ) -> tuple[Replayed, Any]:
        given = [_row(value.data) for value in inputs if isinstance(value, torch.Tensor)]
        before = [value.clone() for value in given]
        outputs = fn(list(inputs))
        for value, kept in zip(given, before, strict=True):
            value.copy_(kept)  # a recording runs nothing
        self.records += 1
        self.pools.append(pool)
        made = Replayed(fn, inputs, outputs, self)
        for earlier in self._in_pools.setdefault(pool, []):
            if (other := earlier()) is not None:
                other.later.append(weakref.ref(made))
        self._in_pools[pool].append(weakref.ref(made))
        return made, outputs


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """All elements, each place of the memory once."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
