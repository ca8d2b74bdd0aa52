"""A recorder without a device: it remembers where the inputs were, and computes from there again.

What it records reads the memory that the inputs had, not the inputs of the call, and writes its results to
the same memory in each replay. A replay also spoils what nobody owned when it was recorded, and what later
recordings in its pool have given: it may work there. So does the end of a pool. So a stale address, a missing
copy and a result that is overwritten show as wrong numbers, as they would on a GPU.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from retrograd.cudagraphs.program import Program
from retrograd.runtime.tensor import placed_on, unowned

#: outlives every tensor that shows it.
_memory: list[torch.Tensor] = []


class Block:
    """Memory of a pool, in use as long as somebody owns the storage that was handed out for it."""

    def __init__(self, like: torch.UntypedStorage) -> None:
        self._row = torch.tensor([], dtype=torch.uint8).set_(like).clone()
        _memory.append(self._row)
        self.storage: torch.UntypedStorage | None = unowned(self._row)
        self._used = StorageWeakRef(self.storage)

    def is_free(self) -> bool:
        return bool(self._used.expired())

    def spoil(self) -> None:
        # no number, as a float of any size; without torch, which may be tracing when a pool ends
        ctypes.memset(self._row.data_ptr(), 255, self._row.nbytes)

    def shown(self, like: torch.Tensor) -> torch.Tensor:
        """The memory as `like` shows its own; without owning it."""
        return placed_on(unowned(self._row), like)


class Memory:
    """A pool. What lies in it is gone with its last recording, unless somebody owns it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.blocks: list[Block] = []
        self.recordings: weakref.WeakSet[Replayed] = weakref.WeakSet()
        weakref.finalize(self, _end, self.blocks)


def _end(blocks: Sequence[Block]) -> None:
    for block in blocks:
        if block.is_free():
            block.spoil()


class Replayed:
    """What replays `fn`; `outputs` are put into the pool."""

    def __init__(
        self, fn, memory: Sequence[Any], outputs: list[Any], given: set[int], recorder: Recorder, pool: Memory
    ) -> None:
        self._fn, self._memory, self._recorder, self._pool = fn, memory, recorder, pool
        blocks: dict[int, Block] = {}
        made: dict[int, torch.Tensor] = {}
        self._written: dict[int, torch.Tensor] = {}
        for place, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor) or output.untyped_storage()._cdata in given:
                continue
            storage = output.untyped_storage()
            if storage._cdata not in blocks:
                blocks[storage._cdata] = Block(storage)
            block = blocks[storage._cdata]
            if id(output) not in made:
                made[id(output)] = placed_on(block.storage, output)
            self._written[place] = block.shown(output)
        for place in self._written:
            outputs[place] = made[id(outputs[place])]
        for block in blocks.values():
            block.storage = None
            block.spoil()  # nothing has been computed yet
        #: in which it may work.
        self.free = [block for block in pool.blocks if block.is_free()]
        for earlier in pool.recordings:
            earlier.free += blocks.values()
        pool.blocks += blocks.values()
        pool.recordings.add(self)

    def replay(self) -> None:
        self._recorder.replays += 1
        results = self._fn(list(self._memory))
        for block in self.free:
            block.spoil()
        for place, row in self._written.items():
            _row(row).copy_(_row(results[place]))


class Recorder:
    """Records on the CPU. `now` is why it does not; `current` the stream."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.records = self.replays = 0
        self.made = self.waits = 0
        self.program: Any = Program(self)  # type: ignore[arg-type]
        #: the pools of recordings, in the order in which they were made.
        self.lie_in: list[int] = []
        self.now: str | None = None
        self.current = 0

    def why_not_now(self) -> str | None:
        return self.now

    def stream(self, device: torch.device) -> int:
        return self.current

    def wait_for_streams(self) -> None:
        self.waits += 1

    def new_pool(self, device: torch.device) -> Memory:
        self.made += 1
        return Memory(self.made)

    def record(self, fn, inputs: list[Any], device: torch.device, pool: Memory) -> tuple[Replayed, Any]:
        memory = [_remembered(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        rows = [_row(value) for value in memory if isinstance(value, torch.Tensor)]
        before = [row.clone() for row in rows]
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        used = [StorageWeakRef(value.untyped_storage()) for value in tensors]
        given = {one.cdata for one in used}  # no other storage comes to be there while they are referred to
        del tensors
        outputs = list(fn(inputs))
        inputs.clear()
        for row, kept in zip(rows, before, strict=True):
            row.copy_(kept)  # a recording runs nothing
        self.records += 1
        self.lie_in.append(pool.number)
        return Replayed(fn, memory, outputs, given, self, pool), outputs


def _remembered(value: torch.Tensor) -> torch.Tensor:
    """The same memory. It is held, so that replays can read it whoever else lets it go, unless it is a
    pool's: then that one holds it, and its owners are counted."""
    is_pools = any(value.untyped_storage().data_ptr() == row.data_ptr() for row in _memory)
    return placed_on(unowned(value), value) if is_pools else value.data


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """All elements, each place of the memory once."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
