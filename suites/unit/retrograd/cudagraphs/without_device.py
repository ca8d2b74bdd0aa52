"""A recorder without a device: it remembers where the inputs were, and computes from there again.

What it records reads the memory that the inputs had, not the inputs of the call, and writes its results to
the same memory in each replay. A replay also spoils what later recordings in its pool have given, whether
they still exist or not: it may work there. So a stale address, a missing copy and a result that is
overwritten show as wrong numbers, as they would on a GPU.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from retrograd.process import ForkSafeLock


class Written:
    """Memory that a recording writes, held by others alone."""

    def __init__(self, output: torch.Tensor, recorder: Recorder) -> None:
        self._storage = StorageWeakRef(output.untyped_storage())
        recorder.written.add(output.untyped_storage().data_ptr())
        self._row = _row(recorder.unheld(output))

    def spoil(self) -> None:
        if self._row.is_floating_point() and self._row.numel() and not self._storage.expired():
            self._row.fill_(float("nan"))

    def write(self, result: torch.Tensor) -> None:
        self._row.copy_(_row(result))


class Replayed:
    def __init__(self, fn, inputs: Sequence[Any], outputs: Sequence[Any], recorder: Recorder) -> None:
        self._memory = [
            recorder.unheld(value) if isinstance(value, torch.Tensor) else value for value in inputs
        ]
        self._fn, self._recorder = fn, recorder
        #: of recordings made later, in the same pool.
        self.later: list[Written] = []
        given = {value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)}
        self.written = {
            place: Written(output, recorder)
            for place, output in enumerate(outputs)
            if isinstance(output, torch.Tensor) and output.untyped_storage()._cdata not in given
        }
        for written in self.written.values():
            written.spoil()  # nothing has been computed yet

    def replay(self) -> None:
        self._recorder.replays += 1
        results = self._fn(list(self._memory))
        for later in self.later:
            later.spoil()
        for place, written in self.written.items():
            written.write(results[place])


class Recorder:
    """Records on the CPU. `now` is why it does not; `current` the stream."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.records = self.replays = 0
        self.replaying = ForkSafeLock()
        self.written: set[int] = set()
        self.made = self.waits = 0
        self._in_pools: dict[int, list[weakref.ref[Replayed]]] = {}
        self.pools: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        #: the pools of recordings, in the order in which they were made.
        self.lie_in: list[int] = []
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

    def new_pool(self, device: torch.device) -> int:
        self.made += 1
        return self.made

    def record(self, fn, inputs: Sequence[Any], device: torch.device, pool: int) -> tuple[Replayed, Any]:
        given = [_row(value.data) for value in inputs if isinstance(value, torch.Tensor)]
        before = [value.clone() for value in given]
        outputs = fn(list(inputs))
        for value, kept in zip(given, before, strict=True):
            value.copy_(kept)  # a recording runs nothing
        self.records += 1
        self.lie_in.append(pool)
        made = Replayed(fn, inputs, outputs, self)
        for earlier in self._in_pools.setdefault(pool, []):
            if (other := earlier()) is not None:
                other.later += made.written.values()
        self._in_pools[pool].append(weakref.ref(made))
        return made, outputs


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """All elements, each place of the memory once."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
