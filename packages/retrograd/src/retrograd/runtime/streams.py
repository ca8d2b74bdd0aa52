"""Orders work between CUDA streams, as far as a backward needs it.

In: the streams that user code switches to, seen from the first context on. Out: waits between streams.

Eager runs each node of a backward on the stream of its forward, and makes the caller's stream wait for those
of the leaves. Python cannot query a node's stream, so a plan runs on the stream that is current when
``.backward()`` is called. It could then read what another stream has yet to write, and memory that it frees
may be given to another stream at once. So the plan begins after all work queued on the streams on which nodes
were made, and their later work begins after the plan. The same holds around each call of user code in it.

A stream on which no node was made runs no node in eager either. User code orders it in hooks, as in eager, so
communication and offloading overlap with the plan. We know such streams by the thread's sequence number:
making a node increments it.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from retrograd.facts.patches import handle
from retrograd.process import ThreadValue

#: The index of a device, and the handle of a stream.
_Key = tuple[int, int]

#: What switches streams in Python. Only builds with CUDA have the last two.
_SWITCHES = (
    "torch.cuda:set_stream",
    "torch.accelerator:set_stream",
    "torch.cuda:Stream.__enter__",
    "torch.cuda:Stream.__exit__",
)


class CaptureStream(torch.cuda.Stream):
    """The stream for captures, which the default stream does not allow. It gets no other work, so nothing
    waits for it."""


#: this thread's sequence number when we last looked
_looked_at = ThreadValue(-1)

#: the streams that this thread's plan waits for
_ordered: ThreadValue[frozenset[_Key]] = ThreadValue(frozenset())


def next_sequence_number() -> int:
    """The sequence number that the next node made on this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


class SideStreams:
    """The streams that user code has switched to.

    Attributes:
        any: whether there are any.
    """

    def __init__(self) -> None:
        self.any = False
        self._seen: dict[_Key, torch.cuda.Stream] = {}
        #: Streams that other code created and may destroy.
        self._external: weakref.WeakValueDictionary[_Key, Any] = weakref.WeakValueDictionary()
        #: for each stream on which nodes may have been made, a number above their sequence numbers
        self._above: dict[_Key, int] = {}
        #: streams that are current on a thread; only that thread knows whether it has made nodes since
        self._current_on: dict[int, set[_Key]] = {}
        self._watches = False

    def watch(self) -> None:
        """From now on, record the streams that are switched to. Existing streams count as seen."""
        if self._watches:
            return
        self._watches = True
        if torch.cuda.is_initialized():
            for item in gc.get_objects():
                if type(item) is torch.cuda.Stream:
                    self._note(item)
            self._has_nodes(self._seen)
        for name in _SWITCHES[: 4 if torch.backends.cuda.is_built() else 2]:
            handle(name, self._switching)

    def _switching(self, original: Callable[..., Any], stream: Any, *error: Any) -> Any:
        self._look()
        result = original(stream, *error)
        if torch.cuda.is_initialized():
            self._note(stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.current_stream())
            self._current_on[threading.get_ident()] = self._current()
        return result

    def _note(self, stream: Any) -> None:
        if stream.cuda_stream and not isinstance(stream, CaptureStream):  # the default stream has no handle
            # torch's own streams come from a pool and outlive their Python objects.
            streams = self._seen if type(stream) is torch.cuda.Stream else self._external
            streams[stream.device_index, stream.cuda_stream] = stream
            self.any = True

    def _known(self) -> dict[_Key, torch.cuda.Stream]:
        return {**self._seen, **self._external}

    def _current(self) -> set[_Key]:
        """The streams we have seen that are current on this thread, one a device."""
        known = self._known()
        devices = {device for device, _ in known}
        current = {(device, torch.cuda.current_stream(device).cuda_stream) for device in devices}
        return current & known.keys()

    def _look(self) -> None:
        """Note the current streams if this thread has made nodes since it last looked."""
        if (number := next_sequence_number()) != _looked_at.get():
            self._has_nodes(self._current())
            _looked_at.set(number)

    def _has_nodes(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            self._above[key] = max(self._above.get(key, 0), next_sequence_number())

    def of_nodes(self, oldest: Callable[[], int]) -> frozenset[_Key]:
        """The streams on which nodes of a backward may have been made.

        Args:
            oldest: gives the smallest sequence number of these nodes. Called only if the answer needs it.
        """
        if not self.any:
            return frozenset()
        self._look()
        me = threading.get_ident()
        others = [streams for thread, streams in [*self._current_on.items()] if thread != me]
        first = oldest() if self._above else 0
        return frozenset({key for key, above in self._above.items() if first < above}.union(*others))

    def separate(self, keys: Iterable[_Key]) -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
        """Pairs of a device's current stream and another stream that must be ordered with it: one of `keys`,
        or the default stream of their devices."""
        known = self._known()
        seen = {key: known[key] for key in keys if key in known}
        for device in {device for device, _ in seen}:
            current = torch.cuda.current_stream(device)
            others = [stream for (index, _), stream in seen.items() if index == device]
            for other in (torch.cuda.default_stream(device), *others):
                if other != current:
                    yield current, other

    def join_all(self) -> None:
        """Make the current streams wait for all others seen."""
        _join(self._known())


side_streams = SideStreams()


@contextmanager
def in_order_with_streams(keys: frozenset[_Key]) -> Iterator[None]:
    """Run the block after all work queued on streams `keys`; their later work waits for the block."""
    with _ordered.switched(keys):
        _join(keys)
        try:
            yield
        finally:
            _part(keys)


def user_code_in_order() -> AbstractContextManager[None]:
    """Around user code inside `in_order_with_streams`: the code may queue work on these streams."""
    keys = _ordered.get()
    return _handed_over(keys) if keys else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _handed_over(keys: Iterable[_Key]) -> Iterator[None]:
    _part(keys)
    try:
        yield
    finally:
        _join(keys)


def _join(keys: Iterable[_Key]) -> None:
    for current, other in side_streams.separate(keys):
        current.wait_stream(other)


def _part(keys: Iterable[_Key]) -> None:
    for current, other in side_streams.separate(keys):
        other.wait_stream(current)
