"""Collect a backward: the short time during which torch's engine talks to our object.

In: the arguments of ``torch.autograd.graph._engine_run_backward``, the one Python gateway of
``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad``. Out: the gradients of a stock
run.

In: an `EngineRequest` and a factory of capture objects. Out: `Collected`, that is everything the engine
lifted out of the autograd graph, and the artifact that the capture object made of the graph's structure
(kept by the engine in its structural cache: a later backward of equal structure returns the same one).

The engine's compiler is installed here and nowhere else, and only while the window is open. It is one
pointer for the whole process. Every backward reads it once, when it enters the engine (``Engine::execute``);
what is past that point is not concerned by a change. So a capture waits only for threads that may be about to
enter, and they wait for the capture. A capture runs no user code and takes milliseconds, so whoever waits for
a capture waits without a limit. For a backward, a capture waits once and for a short time only: its user code
may be waiting for this thread. Inside a backward it does not wait at all: whoever is in the way may be who
this thread works for.

Backwards that began before the gateway was opened (``_torch.patches``) did not come by here. The first
capture looks for them in the innermost frame of each other thread, which is the gateway's until user code
runs. It asks ``faulthandler``, which makes no objects of frames: one of a frame that Dynamo runs on another
thread (``torch/csrc/dynamo/eval_frame.c``) may be freed too early (torch 2.13, CPython 3.11), so that
``sys._current_frames`` ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.graph as autograd_graph
from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._dynamo import compiled_autograd as stock
from torch._dynamo.utils import counters as dynamo_counters

from retrograd.errors import Refusal
from retrograd.process import forgotten_by_reset

if TYPE_CHECKING:
    from retrograd._torch.autograd.request import EngineRequest

#: where torch keeps the gateway.
GATEWAYS = ("torch.autograd.graph:_engine_run_backward", "torch.autograd:_engine_run_backward")

_stock_run_backward = autograd_graph._engine_run_backward


def run_stock(request: EngineRequest, allow_unreachable: bool = False) -> tuple[torch.Tensor | None, ...]:
    """Run the backward on the engine as torch would, or as if inputs might be unreachable."""
    return _stock_run_backward(
        request.tensors,
        request.grad_tensors,
        request.keep_graph,
        request.create_graph,
        request.inputs,
        allow_unreachable=request.allow_unreachable or allow_unreachable,
        accumulate_grad=request.accumulate_grad,
    )


#: the files of what a thread runs before it is in the engine: the gateway asks a logger.
_BEFORE_ENGINE = {
    function.__code__.co_filename.encode("ascii", "backslashreplace").decode()
    for function in (_stock_run_backward, logging.Logger.log)
}
_INNERMOST = re.compile(r'hread (0x[0-9a-f]+) .*\n  File "(.*)", line')
_A_MOMENT = 0.001
_UNSEEN = -1


def innermost_files() -> list[tuple[int, str]]:
    """The identifier of each thread, and the file of the code that it is in, in ASCII with backslashes."""
    with tempfile.TemporaryFile() as written:
        faulthandler.dump_traceback(written)
        written.seek(0)
        stacks = written.read().decode()
    return [(int(thread, 16), file) for thread, file in _INNERMOST.findall(stacks)]


class Entrance:
    """Where a backward goes into the stock engine; inside, this thread may be about to.

    It is no generator: every backward of a compiled forward comes by here.
    """

    __slots__ = ("_is_before", "_thread", "_window")

    def __init__(self, window: Window) -> None:
        self._window, self._thread, self._is_before = window, threading.get_ident(), False

    def __enter__(self) -> Callable[[], None]:
        """To be called, if anybody can tell, when the backward is known to be past the entrance."""
        self._window.enter(self._thread)
        self._is_before = True
        return self.passed

    def __exit__(self, *_: object) -> None:
        self.passed()

    def passed(self) -> None:
        """The backward is inside, or over."""
        if self._is_before:
            self._is_before = False
            self._window.leave(self._thread)


class Window:
    """Keeps captures and entering backwards apart."""

    def __init__(self, patience: float = 0.25) -> None:
        self.patience = patience
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._in_frame: int | None = None
        self._forking: int | None = None
        self._entering: dict[int, int] = {}
        #: of the threads in the way, those for which a capture has waited in vain.
        self._slow: set[int] = set()
        self._may_be_unseen = True
        self._lost = False

    def stock(self) -> Entrance:
        """Around every backward that the stock engine runs."""
        return Entrance(self)

    def enter(self, thread: int) -> None:
        """`thread` may enter the engine from now on."""
        with self._condition:
            if self._owner not in (None, thread):
                self._condition.wait_for(lambda: self._owner in (None, thread))
            self._entering[thread] = self._entering.get(thread, 0) + 1

    def leave(self, thread: int) -> None:
        """It is past the entrance."""
        with self._condition:
            self._entering[thread] -= 1
            if not self._entering[thread]:
                del self._entering[thread]
                self._slow.discard(thread)
                self._condition.notify_all()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around a capture, or several of one thread.

        Raises:
            Refusal: this thread is in the engine's frame, or another one was too long in the way.
        """
        me = threading.get_ident()
        if self._owner == me:
            yield
            return
        with self._condition:
            if self._in_frame == me:
                text = "a backward inside one with retain_grad or C++ tensor hooks"
                raise Refusal("nested-in-engine-frame", text)
            if self._lost:
                raise Refusal("forked-while-capturing", "this process was forked during a capture")
            self._wait_until_free(me)
            self._owner = me
        try:
            yield
        finally:
            self._release(me)

    def _wait_until_free(self, me: int) -> None:
        is_inside = torch._C._current_graph_task_id() != -1
        deadline = time.monotonic() + (0 if is_inside else self.patience)
        while way := self._in_the_way(me):
            left = deadline - time.monotonic()
            if self._owner is None and (left <= 0 or not self._slow.isdisjoint(way)):
                if not is_inside:
                    self._slow |= way
                raise Refusal("engine-busy", "another thread is in a backward")
            # Nobody says when an unseen backward ends.
            self._condition.wait(_A_MOMENT if self._may_be_unseen else max(left, _A_MOMENT))

    def _in_the_way(self, me: int) -> set[int]:
        """The threads that a capture has to wait for; `_UNSEEN` for those that did not come by here."""
        others = (*self._entering, self._in_frame, self._owner)
        found = {other for other in others if other not in (me, None)}
        if not found and self._may_be_unseen:
            self._may_be_unseen = self._has_unseen(me)
        return found | {_UNSEEN} if self._may_be_unseen else found

    def _has_unseen(self, me: int) -> bool:
        """Whether another thread may be about to enter; none that came by here is."""
        return any(thread != me and file in _BEFORE_ENGINE for thread, file in innermost_files())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside a capture, while user code runs in the engine's frame and the compiler is off: others may
        run stock backwards, but the engine has room for one frame only, until its call has returned."""
        me = threading.get_ident()
        self._in_frame = me
        self._release(me)
        try:
            yield
        finally:
            with self._condition:
                self._in_frame, self._owner = None, me
                self._slow.discard(me)

    def _release(self, me: int) -> None:
        with self._condition:
            if self._owner == me:
                self._owner = None
                self._condition.notify_all()

    # fork

    def before_fork(self) -> None:
        """Let a capture of another thread come to its end, if it does so soon, and let none begin."""
        me = threading.get_ident()
        with self._condition:
            if self._condition.wait_for(lambda: self._owner is self._in_frame is None, self.patience):
                self._owner = self._forking = me

    def after_fork_in_parent(self) -> None:
        """Go on."""
        forking, self._forking = self._forking, None
        if forking is not None:
            self._release(forking)

    def after_fork_in_child(self) -> None:
        """Only the thread that forked is left. What another one held in the engine is held for ever."""
        me = threading.get_ident()
        self._condition = threading.Condition()
        self._lost |= not {self._owner, self._in_frame} <= {None, me}
        if self._owner not in (None, me):
            engine_protocol.set_autograd_compiler(None, False)
        self._owner = me if self._owner == me != self._forking else None
        self._forking = None
        self._in_frame = me if self._in_frame == me else None
        self._slow.clear()
        self._entering = {thread: count for thread, count in self._entering.items() if thread == me}


window = Window()
os.register_at_fork(
    before=window.before_fork,
    after_in_parent=window.after_fork_in_parent,
    after_in_child=window.after_fork_in_child,
)


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


class Kept:
    """What the engine keeps of a structure. It never lets go of it, even when its cache is dropped: it leaks
    the tuple that ``end_capture`` returns. So the artifact is taken out by us.
    """

    __slots__ = ("artifact",)

    def __init__(self, artifact: Any) -> None:
        self.artifact: Any = artifact
        _kept.append(self)

    def __call__(self, call: Collected) -> Any:
        """What the artifact returns; the engine demands something that can be called."""
        return self.artifact(call)


#: of all structures in the engine's cache.
_kept: list[Kept] = []


class _Collection(threading.local):
    """What the engine hands over on this thread, while a window is open."""

    receive: Callable[[Collected], None] | None = None


_collection = _Collection()
_stock_captures = -1

#: the engine forgets no structure: after so many, all are dropped, and captured again if they are met again.
KEPT_STRUCTURES = 512
_structures = 0


def collect(
    request: EngineRequest, factory: Callable[[], Any], run_in_frame: Callable[[Collected], None]
) -> Collected | None:
    """Let the engine walk the graph of `request` and hand it over; nothing is computed.

    Args:
        request: the backward.
        factory: makes a capture object when the structure is new; it is closed in any case.
        run_in_frame: runs the backward at once, for artifacts with ``needs_engine_frame``.

    Returns:
        What was collected, or None if it was run in the engine's frame.

    Raises:
        Refusal: another thread is in a backward, or this one is in the engine's frame.
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
    owner = threading.get_ident()

    def make() -> Any:
        global _structures
        if threading.get_ident() != owner:
            raise Refusal("engine-busy", "a backward of another thread met our capture window")
        _structures += 1
        captures.append(factory())
        return captures[-1]

    prior = _collection.receive
    with window.capture(), torch.autograd.set_multithreading_enabled(False):
        _forget_foreign_captures()
        if _structures >= KEPT_STRUCTURES:
            clear_engine_cache()
        _collection.receive = receive
        try:
            with _compiler(make):
                run_stock(request, allow_unreachable=True)
        finally:
            _collection.receive = prior
            for capture in captures:
                capture.close()
    return collected[0] if collected else None


def runtime_wrapper(kept: Kept, inputs: Any, sizes: Any, scalars: Any, hooks: Any, packed: Any) -> list[None]:
    """Called by the engine with what it keeps of a structure, and this backward's lifted values."""
    artifact = kept.artifact
    call = Collected(artifact, list(inputs), list(sizes), list(scalars), list(hooks), list(packed))
    inputs.clear()
    if _collection.receive is not None:
        _collection.receive(call)
        return [None] * artifact.n_outputs
    with _compiler(None):
        return list(artifact(call))


@forgotten_by_reset
def clear_engine_cache() -> None:
    """Drop every structure that the engine remembers, ours and others'."""
    global _structures
    _structures = 0
    engine_protocol.clear_cache()
    while _kept:
        _kept.pop().artifact = None


def leave_engine_cache_to_stock() -> None:
    """The engine's cache does not know who filled it: stock must not find structures of ours."""
    if _kept:
        clear_engine_cache()


def _forget_foreign_captures() -> None:
    """Nor must we find structures of stock's: drop all when stock compiled autograd captured since."""
    global _stock_captures
    captures = dynamo_counters["compiled_autograd"]["captures"]
    if captures != _stock_captures:
        clear_engine_cache()
        _stock_captures = captures


@contextmanager
def _compiler(factory: Callable[[], Any] | None) -> Iterator[None]:
    """Install `factory` as the engine's compiler, then restore what was there."""
    prior = engine_protocol.set_autograd_compiler(factory, False)
    try:
        yield
    finally:
        engine_protocol.set_autograd_compiler(*prior)


@contextmanager
def stock_compiler_off() -> Iterator[None]:
    """Switch stock compiled autograd off, and on again at the end."""
    with _compiler(None):
        stock.compiled_autograd_enabled = False
        try:
            yield
        finally:
            stock.compiled_autograd_enabled = True
