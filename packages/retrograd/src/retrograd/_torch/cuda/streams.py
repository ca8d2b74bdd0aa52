"""CUDA streams other than the current one: what runs on one stream is put in order with all of them.

In: the streams that user code switched to, seen from the first context on that was made. Out: waits between
streams. Eager runs each node of a backward on the stream of its forward, and has the caller's stream wait for
those of the leaves. No Python interface tells a node's stream, so a plan runs on the stream that is current
where ``.backward()`` was called. It may then read what another stream has yet to write, and memory that it
lets go may be given to another stream at once; so the plan begins after all that the other streams have been
given, and they go on after it. The same holds around each call of user code in it.

Programs that use one stream wait for nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from retrograd._torch.patches import handle


class SideStreams:
    """The streams that were switched to, by device."""

    def __init__(self) -> None:
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
        if stream.cuda_stream:  # the default stream has no handle
            # torch's own streams come from a pool and outlive their Python objects.
            streams = self._seen if type(stream) is torch.cuda.Stream else self._external
            streams[stream.device_index, stream.cuda_stream] = stream

    def __bool__(self) -> bool:
        return bool(self._seen or self._external)

    def apart(self) -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
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
    if not side_streams:
        yield
        return
    before()
    try:
        yield
    finally:
        after()


def is_captured_beside_streams() -> bool:
    """Whether a CUDA graph is being captured, while there are streams that may not belong to the capture."""
    return bool(side_streams) and torch.cuda.is_current_stream_capturing()


def _join() -> None:
    for current, other in side_streams.apart():
        current.wait_stream(other)


def _part() -> None:
    for current, other in side_streams.apart():
        other.wait_stream(current)
