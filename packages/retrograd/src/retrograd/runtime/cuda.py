"""CUDA graphs: records what a function does on a device.

In: a function over a list of tensors. Out: a CUDA graph, and results in separate memory that each replay
overwrites.

A recording allocates from a *pool*. It owns the memory of its results there; every recording may write to the
rest. Replays run one after the other, on one stream. Whoever replays must protect two kinds of live results,
since the replay may overwrite them: those of later recordings, and those that no recording owned when this
one was made.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from retrograd.errors import Refusal
from retrograd.graph.emit import Boxed
from retrograd.process import ForkSafeLock
from retrograd.runtime.streams import CaptureStream, side_streams
from retrograd.runtime.tensor import storage_of

_PoolId = Any  # a pair of numbers; torch defines its type for type checkers only


class Handle(NamedTuple):
    """A pool, and a graph in it that keeps it alive."""

    pool: _PoolId
    tiny: torch.cuda.CUDAGraph


#: Without this lock, captures by several threads would share cuBLAS workspaces.
_one_at_a_time = ForkSafeLock()


def is_memory_scarce() -> bool:
    """Whether less than a quarter of the current device's memory is free; False if CUDA is not in use."""
    if not torch.cuda.is_initialized():
        return False
    free, total = torch.cuda.mem_get_info()
    return free < total / 4


@contextmanager
def unused_memory_returned() -> Iterator[None]:
    """Inside, free memory is returned to the device before each optimizer step.

    Otherwise an optimizer may allocate its state in a block that a large temporary has freed, and the rest of
    that block cannot be returned. A pool of recordings has separate memory and could not use that rest.
    """

    def give_back(*_: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    hook = register_optimizer_step_pre_hook(give_back)
    try:
        yield
    finally:
        hook.remove()


class CudaRecorder:
    """Makes recordings on CUDA devices."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._sides: dict[torch.device, CaptureStream] = {}

    def why_not_now(self) -> str | None:
        """Why this thread may not record or replay now; None if it may."""
        if torch.is_anomaly_enabled():
            return "anomaly mode is on"
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms are asked for"
        if torch._C._len_torch_dispatch_stack():
            return "a dispatch mode is active"
        if torch.cuda.is_current_stream_capturing():
            return "another CUDA graph is being captured"
        return None

    def stream(self, device: torch.device) -> int:
        """The handle of the current stream of `device`."""
        return int(torch._C._cuda_getCurrentRawStream(device.index))

    def wait_for_streams(self) -> None:
        """Make the current streams wait for all others seen: these may still read memory that a replay
        overwrites, even if no reference to it is left."""
        side_streams.join_all()

    def new_pool(self, device: torch.device) -> Handle:
        """A pool for recordings on `device`."""
        pool = torch.cuda.graph_pool_handle()
        with _one_at_a_time, torch.cuda.device(device), _quiet():
            torch.cuda.synchronize()
            tiny, _ = self._capture(lambda _: [torch.zeros(1, device=device)], [], device, pool)
        return Handle(pool, tiny)

    def record(
        self, fn: Boxed, inputs: list[Any], device: torch.device, handle: Handle
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """Record `fn`, called with `inputs`, without running it.

        Args:
            fn: allocates on `device` only.
            inputs: each replay reads them, and perhaps writes them, at their current addresses. The list is
                emptied. An input that lies in the pool and has no other owner is freed when `fn` releases it.
            device: the device of all tensors.
            handle: the pool in which the recording allocates.

        Returns:
            The graph that replays the recording, and its results. Result tensors that share no memory with an
            input are undefined until the first replay; each replay overwrites them.

        Raises:
            Refusal: a result lies outside of the pool and the inputs.
            Exception: whatever `fn` raises because it is recorded. Nothing was run then, and the pool may be
                unable to take another recording.
        """
        with _one_at_a_time, torch.cuda.device(device), _quiet():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # memory of earlier eager calls and of dropped recordings
            given = {storage_of(value) for value in inputs if isinstance(value, torch.Tensor)}
            graph, outputs = self._capture(fn, inputs, device, handle.pool)
            _refuse_foreign(outputs, given, handle.pool)
        return graph, outputs

    def _capture(
        self, fn: Boxed, inputs: list[Any], device: torch.device, pool: _PoolId
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._side(device)):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                outputs = fn(inputs)
                inputs.clear()
            except BaseException:
                self._abandon(graph, device, pool)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._clean(device, pool)
                raise
        return graph, outputs

    def _side(self, device: torch.device) -> CaptureStream:
        if device not in self._sides:
            self._sides[device] = CaptureStream(device)
        return self._sides[device]

    # failures

    def _abandon(self, graph: torch.cuda.CUDAGraph, device: torch.device, pool: _PoolId) -> None:
        """End a capture during which an error was raised."""
        try:
            graph.capture_end()
        except RuntimeError:  # the capture itself was invalid
            self._clean(device, pool)

    def _clean(self, device: torch.device, pool: _PoolId) -> None:
        """Clean up after a capture that torch cannot end. The allocator would keep serving it, and generators
        would consider it active until another capture ends normally. The allocator of pinned memory has no
        such function: it never accepts this pool again."""
        for clean in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            try:
                clean(device.index, pool)
            except RuntimeError:
                continue  # torch has already done this
        graph, other = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=other, capture_error_mode="thread_local")
        kept = torch.zeros(1, device=device)
        graph.capture_end()
        del kept


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable garbage collection, which may free what must not be freed during a capture. Clear the cuBLAS
    workspaces before and after, so that a recording uses no workspace that other code frees later. A thread's
    first call of cuBLAS makes a handle, which a capture forbids."""
    collecting = gc.isenabled()
    gc.disable()
    torch.cuda.current_blas_handle()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collecting:
            gc.enable()


def _refuse_foreign(outputs: Sequence[Any], given: Collection[int], pool: _PoolId) -> None:
    """Refuse results outside of the pool and the given storages. Their memory comes from another pool (the
    user's), which may hand it out again.
    """
    segments = torch.cuda.memory_snapshot(pool, include_traces=False)
    segments = [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool)]
    for output in outputs:
        if not isinstance(output, torch.Tensor) or storage_of(output) in given:
            continue
        if output.device.type != "cuda":
            raise Refusal("recording", f"it gives a tensor on {output.device}")
        where = output.untyped_storage().data_ptr()
        inside = (s["address"] <= where < s["address"] + s["total_size"] for s in segments)
        if where and not any(inside):
            raise Refusal("recording", "its memory comes from a pool of somebody else's")
