"""CUDA graphs and streams: record what a function does on a device; put streams in order.

In: a function over a list of tensors; the streams that user code switched to, seen from the first context on
that was made. Out: a CUDA graph, and results that lie in memory of their own, which each replay writes anew;
waits between streams.

What is recorded allocates from a *pool*, of which each recording holds its results; the rest of it any of
them may write. Their replays run one after the other, on one stream. Who replays looks after the results of
recordings that were made later, and after those that nobody owned when it was made: it may write there.

Eager runs each node of a backward on the stream of its forward, and has the caller's stream wait for those of
the leaves. No Python interface tells a node's stream, so a plan runs on the stream that is current where
``.backward()`` was called. It may then read what another stream has yet to write, and memory that it lets go
may be given to another stream at once; so the plan begins after all that the other streams have been given,
and they go on after it. The same holds around each call of user code in it. Programs that use one stream wait
for nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from retrograd.errors import Refusal
from retrograd.facts.patches import handle
from retrograd.graph.emit import Boxed
from retrograd.process import ForkSafeLock
from retrograd.runtime.tensor import storage_of

_PoolId = Any  # a pair of numbers, of a type that exists for type checkers only


class Handle(NamedTuple):
    """A pool, and a graph in it, which keeps it alive."""

    pool: _PoolId
    tiny: torch.cuda.CUDAGraph


class CaptureStream(torch.cuda.Stream):
    """Where captures are made: the default stream allows none. Nothing else is given to it, so nobody waits
    for it."""


#: captures by several threads would see each other's cuBLAS workspaces.
_one_at_a_time = ForkSafeLock()


def is_memory_scarce() -> bool:
    """Whether less than a quarter of the current device's memory is free, if this process uses one."""
    if not torch.cuda.is_initialized():
        return False
    free, total = torch.cuda.mem_get_info()
    return free < total / 4


@contextmanager
def unused_memory_returned() -> Iterator[None]:
    """Inside, free memory goes back to the device before an optimizer makes a step.

    An optimizer that makes its states in what a large temporary value left keeps all of that from others. A
    pool of recordings has memory of its own, and cannot use it.
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
        """Which state of this thread speaks against recording and replaying."""
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
        """The current stream of `device`."""
        return int(torch._C._cuda_getCurrentRawStream(device.index))

    def wait_for_streams(self) -> None:
        """Have the current streams wait for all others that were seen: they may still read what a replay
        overwrites, though nobody holds it any more."""
        if side_streams.any:
            _join()

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
            inputs: read, and perhaps written, by each replay, where they are now. The list is emptied. What
                lies in the pool and has no other owner is freed as `fn` lets go of it.
            device: of everything.
            handle: of the pool in which it allocates.

        Returns:
            What replays it, and its results. Tensors among these that belong to no input are written by each
            replay, the first time by the first one.

        Raises:
            Refusal: its memory was not that of the recording.
            Exception: whatever `fn` raises because it is recorded. Nothing was run then, and the pool may
                not take another recording.
        """
        with _one_at_a_time, torch.cuda.device(device), _quiet():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what it ran in so far, and what an older recording lay in
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
        """End a capture in which something was raised."""
        try:
            graph.capture_end()
        except RuntimeError:  # the capture itself was invalid
            self._clean(device, pool)

    def _clean(self, device: torch.device, pool: _PoolId) -> None:
        """What torch leaves behind if a capture cannot be ended: the allocator, which goes on serving it, and
        generators, which believe in it until another one ends well. The allocator of pinned memory can not be
        told: it never takes this pool again."""
        for clean in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            try:
                clean(device.index, pool)
            except RuntimeError:
                continue  # torch has done it
        graph, other = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=other, capture_error_mode="thread_local")
        kept = torch.zeros(1, device=device)
        graph.capture_end()
        del kept


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection, which may free what must not be freed during a capture; workspaces of matrix
    products are those of the recording: ones that others free later must not be part of it."""
    collecting = gc.isenabled()
    gc.disable()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collecting:
            gc.enable()


def _refuse_foreign(outputs: Sequence[Any], given: Collection[int], pool: _PoolId) -> None:
    """Results must lie in the pool, or in storages that were given: else somebody (a pool of the user's) gave
    memory that he will give to others too.
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


class SideStreams:
    """The streams that were switched to, by device.

    Attributes:
        any: whether there are any.
    """

    def __init__(self) -> None:
        self.any = False
        self._seen: dict[tuple[int, int], torch.cuda.Stream] = {}
        #: streams that somebody else made, and may destroy.
        self._external: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
        self._watches = False

    def watch(self) -> None:
        """From here on, see which streams are switched to; streams that exist already count as seen."""
        if self._watches:
            return
        self._watches = True
        if torch.cuda.is_initialized():
            for item in gc.get_objects():
                if type(item) is torch.cuda.Stream:
                    self._note(item)
        handle("torch.cuda:set_stream", self._switching)

    def _switching(self, original: Callable[..., Any], stream: Any) -> Any:
        if stream is not None:
            self._note(stream)
        return original(stream)

    def _note(self, stream: Any) -> None:
        if stream.cuda_stream and not isinstance(stream, CaptureStream):  # the default stream has no handle
            # torch's own streams come from a pool and outlive their Python objects.
            streams = self._seen if type(stream) is torch.cuda.Stream else self._external
            streams[stream.device_index, stream.cuda_stream] = stream
            self.any = True

    def separate(self) -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
        """The current stream of each device, with each other one that it has to be put in order with."""
        seen = {**self._seen, **self._external}
        for device in {device for device, _ in seen}:
            current = torch.cuda.current_stream(device)
            others = [stream for (index, _), stream in seen.items() if index == device]
            for other in (torch.cuda.default_stream(device), *others):
                if other != current:
                    yield current, other


side_streams = SideStreams()


def in_order_with_streams() -> AbstractContextManager[None]:
    """Run the block after all that other streams have been given, and let them go on after it."""
    return _between(_join, _part)


def user_code_in_order() -> AbstractContextManager[None]:
    """Inside `in_order_with_streams`: user code may give work to other streams."""
    return _between(_part, _join)


@contextmanager
def _between(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    if not side_streams.any:
        yield
        return
    before()
    try:
        yield
    finally:
        after()


def _join() -> None:
    for current, other in side_streams.separate():
        current.wait_stream(other)


def _part() -> None:
    for current, other in side_streams.separate():
        other.wait_stream(current)
