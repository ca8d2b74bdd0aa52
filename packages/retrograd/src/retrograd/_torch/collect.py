"""The capture window: the short time during which torch's engine talks to our object.

In: an `EngineRequest` and a factory of capture objects. Out: `Collected`, that is everything the engine
lifted out of the autograd graph, and the artifact that the capture object made of the graph's structure
(kept by the engine in its structural cache: a later backward of equal structure returns the same one).

The engine's compiler is installed here and nowhere else, and only while the window is open. It is one
pointer for the whole process, so a window opens only if no other thread is starting a backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._dynamo.utils import counters as dynamo_counters

from retrograd._torch.engine import EngineRequest, run_stock

__all__ = ["Collected", "EngineBusyError", "Window", "clear_engine_cache", "collect", "window"]


class EngineBusyError(Exception):
    """Another thread is in a backward, so that the engine's compiler cannot be installed."""


@dataclass
class Collected:
    """One backward as the engine handed it over. The lists are ours: whoever reads them may empty them.

    Attributes:
        artifact: what the capture object returned for this structure: a callable that runs a `Collected`
            (called if stock compiled autograd meets the structure), with ``n_outputs`` and
            ``needs_engine_frame``.
        inputs: tensors lifted from the graph. sizes: sizes that are no longer static.
        scalars: lifted numbers. hooks: hook objects and Function contexts. packed: packed saved tensors.
    """

    artifact: Any
    inputs: list[torch.Tensor]
    sizes: list[int]
    scalars: list[int | float]
    hooks: list[Any]
    packed: list[Any]


class Window:
    """Keeps threads apart: one may capture while no other starts a backward.

    A stock backward passes at once unless a capture is under way (milliseconds; no user code runs in
    it), then it waits. A capture never waits: it is refused while another thread is in a backward.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._inside: dict[int, int] = {}

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Around every backward that the stock engine runs."""
        me = threading.get_ident()
        with self._condition:
            self._condition.wait_for(lambda: self._owner in (None, me))
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._condition:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around a capture. Raises `EngineBusyError` if another thread is in a backward."""
        me = threading.get_ident()
        with self._condition:
            if self._owner is not None or any(thread != me for thread in self._inside):
                raise EngineBusyError("another thread is in a backward")
            self._owner = me
        try:
            yield
        finally:
            self._release(me)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside a capture, once the engine's compiler is off: others may run stock backwards again."""
        me = threading.get_ident()
        self._release(me)
        with self.stock():
            yield

    def _release(self, me: int) -> None:
        with self._condition:
            if self._owner == me:
                self._owner = None
                self._condition.notify_all()


window = Window()


class _Collection(threading.local):
    """What the engine hands over on this thread, while a window is open."""

    receive: Callable[[Collected], None] | None = None


_collection = _Collection()
_stock_captures = -1

#: the engine forgets no structure: after so many, all are dropped, and captured again if they are met again.
KEPT_STRUCTURES = 512
_structures = 0


def collect(
    request: EngineRequest,
    factory: Callable[[], Any],
    run_in_frame: Callable[[Collected], None],
) -> Collected | None:
    """Let the engine walk the graph of `request` and hand it over; nothing is computed.

    Args:
        request: the backward.
        factory: makes a capture object when the structure is new; it is closed in any case.
        run_in_frame: runs the backward at once, for artifacts with ``needs_engine_frame``.

    Returns:
        What was collected, or None if it was run in the engine's frame.

    Raises:
        EngineBusyError: another thread is in a backward.
        Exception: whatever the engine or the capture object raised; nothing was consumed then, and the
            same request can still be run on the stock engine.
    """
    collected: list[Collected] = []

    def receive(call: Collected) -> None:
        if call.artifact.needs_engine_frame:
            engine_protocol.set_autograd_compiler(None, False)  # the end of the window restores it
            with window.suspended():
                run_in_frame(call)
        else:
            collected.append(call)

    captures: list[Any] = []

    def make() -> Any:
        global _structures
        _structures += 1
        captures.append(factory())
        return captures[-1]

    quiet = replace(request, allow_unreachable=True, create_graph=False)
    with window.capture(), torch.autograd.set_multithreading_enabled(False):
        _forget_foreign_captures()
        if _structures >= KEPT_STRUCTURES:
            clear_engine_cache()
        _collection.receive = receive
        try:
            with _compiler(functools.partial(_on_own_thread, threading.get_ident(), make)):
                run_stock(quiet)
        finally:
            _collection.receive = None
            for capture in captures:
                capture.close()
    return collected[0] if collected else None


def runtime_wrapper(
    artifact: Any, inputs: Any, sizes: Any, scalars: Any, hooks: Any, packed: Any
) -> list[None]:
    """Called by the engine with a structure's artifact and this backward's lifted values."""
    call = Collected(artifact, list(inputs), list(sizes), list(scalars), list(hooks), list(packed))
    inputs.clear()
    if _collection.receive is not None:
        _collection.receive(call)
        return [None] * artifact.n_outputs
    with _compiler(None):
        return list(artifact(call))


def clear_engine_cache() -> None:
    """Drop every structure that the engine remembers, ours and others'."""
    global _structures
    _structures = 0
    engine_protocol.clear_cache()


def _forget_foreign_captures() -> None:
    """The engine's cache does not know who filled it: drop it when stock compiled autograd captured since."""
    global _stock_captures
    captures = dynamo_counters["compiled_autograd"]["captures"]
    if captures != _stock_captures:
        clear_engine_cache()
        _stock_captures = captures


def _on_own_thread(owner: int, factory: Callable[[], Any]) -> Any:
    if threading.get_ident() != owner:
        raise EngineBusyError("a backward of another thread met our capture window")
    return factory()


@contextmanager
def _compiler(factory: Callable[[], Any] | None) -> Iterator[None]:
    """Install `factory` as the engine's compiler, then restore what was there."""
    prior = engine_protocol.set_autograd_compiler(factory, False)
    try:
        yield
    finally:
        engine_protocol.set_autograd_compiler(*prior)
