"""Synchronises captures with backwards that enter the stock engine.

In: threads that enter the stock engine, and threads that capture. Out: they wait for each other, or a
`Refusal`.

A capture exchanges the engine's compiler, which is one pointer for the whole process. Every backward reads
that pointer once, when it enters the engine (``Engine::execute``); a later change does not affect it. So a
capture waits only for threads that may be about to enter, and those threads wait for the capture. A capture
runs no user code and takes milliseconds, so threads wait for it without a limit. A capture waits for a
backward only once and briefly, because the backward's user code may be waiting for this thread. A capture
inside a backward does not wait at all: the blocking thread may be waiting for us.

Backwards that began before we replaced the gateway (``facts.patches``) did not register here. The first
capture looks for them in the innermost frame of each other thread, which is the gateway's until user code
runs. We use ``faulthandler``, which creates no frame objects. A frame object for a frame that Dynamo runs on
another thread (``torch/csrc/dynamo/eval_frame.c``) may be freed too early (torch 2.13, CPython 3.11), so
``sys._current_frames`` can crash the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.autograd.graph as autograd_graph
from torch._C._dynamo import compiled_autograd as engine_protocol

from retrograd.errors import Refusal
from retrograd.process import restore_after_errors

stock_run_backward = autograd_graph._engine_run_backward

#: The files of the code that a thread runs before it is in the engine: the gateway checks a logger first.
_BEFORE_ENGINE = {
    function.__code__.co_filename.encode("ascii", "backslashreplace").decode()
    for function in (stock_run_backward, logging.Logger.log)
}
_INNERMOST = re.compile(r'hread (0x[0-9a-f]+) .*\n  File "(.*)", line')
_A_MOMENT = 0.001
_UNSEEN = -1


def innermost_files() -> list[tuple[int, str]]:
    """Each thread's identifier, and the file of its innermost frame, in ASCII with backslash escapes."""
    with tempfile.TemporaryFile() as written:
        faulthandler.dump_traceback(written)
        written.seek(0)
        stacks = written.read().decode()
    return [(int(thread, 16), file) for thread, file in _INNERMOST.findall(stacks)]


class Turn:
    """A block in which the thread that made this object has access to the engine. It is not a generator,
    because a generator that an error leaves suspended could resume later. Every backward of a compiled
    forward enters such a block."""

    __slots__ = ("_begin", "_end", "_is_inside", "_thread")

    def __init__(self, begin: Callable[[int], None] | None, end: Callable[[int], None]) -> None:
        self._begin, self._end, self._is_inside = begin, end, False
        self._thread = threading.get_ident()  # torch may end a deeply nested backward on another thread

    def __enter__(self) -> Callable[[], None]:
        """Begin the turn. Returns a function that ends it early, for callers that know when it is over."""
        if self._begin is not None:
            self._begin(self._thread)
            self._is_inside = True
        return self.over

    def __exit__(self, *_: object) -> None:
        self.over()

    def over(self) -> None:
        """End the turn."""
        if self._is_inside:
            self._is_inside = False
            self._end(self._thread)


class Place(NamedTuple):
    """What one thread does: whether it captures, whether it runs user code in the engine's frame, how many of
    its backwards may be about to enter the engine, and whether it holds the lock."""

    is_owner: bool
    is_in_frame: bool
    entering: int | None
    is_locking: bool


class Window:
    """A lock between captures and backwards that enter the engine."""

    def __init__(self, patience: float = 0.25) -> None:
        self.patience = patience
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._in_frame: int | None = None
        self._entering: dict[int, int] = {}
        #: Blocking threads for which a capture has already waited in vain.
        self._slow: set[int] = set()
        self._may_be_unseen = True
        self._lost = False

    def stock(self) -> Turn:
        """Use this around every stock backward. The turn ends once we know that it is in the engine."""
        return Turn(self.enter, self.leave)

    def enter(self, thread: int) -> None:
        """`thread` may enter the engine from now on."""
        with self._condition:
            if self._owner not in (None, thread):
                self._condition.wait_for(lambda: self._owner in (None, thread))
            self._entering[thread] = self._entering.get(thread, 0) + 1

    def leave(self, thread: int) -> None:
        """`thread` is in the engine."""
        with self._condition:
            self._entering[thread] -= 1
            if not self._entering[thread]:
                del self._entering[thread]
                self._slow.discard(thread)
                self._condition.notify_all()

    def capture(self) -> Turn:
        """Use this around one capture, or several captures of one thread.

        Raises:
            Refusal: this thread is in the engine's frame, or another thread blocked for too long.
        """
        return Turn(None if self._owner == threading.get_ident() else self.take, self.release)

    def take(self, me: int) -> None:
        """This thread captures from now on."""
        with self._condition:
            if self._in_frame == me:
                text = "a backward inside one with retain_grad or C++ tensor hooks"
                raise Refusal("nested-in-engine-frame", text)
            if self._lost:
                raise Refusal("forked-while-capturing", "this process was forked during a capture")
            self._wait_until_free(me)
            self._owner = me

    def _wait_until_free(self, me: int) -> None:
        is_inside = torch._C._current_graph_task_id() != -1
        deadline = time.monotonic() + (0 if is_inside else self.patience)
        while way := self._in_the_way(me):
            left = deadline - time.monotonic()
            if self._owner is None and (left <= 0 or not self._slow.isdisjoint(way)):
                if not is_inside:
                    self._slow |= way
                raise Refusal("engine-busy", "another thread is in a backward")
            # Nothing notifies us when an unregistered backward ends.
            self._condition.wait(_A_MOMENT if self._may_be_unseen else max(left, _A_MOMENT))

    def _in_the_way(self, me: int) -> set[int]:
        """The threads that block a capture; `_UNSEEN` stands for unregistered backwards."""
        others = (*self._entering, self._in_frame, self._owner)
        found = {other for other in others if other not in (me, None)}
        if not found and self._may_be_unseen:
            self._may_be_unseen = self._has_unseen(me)
        return found | {_UNSEEN} if self._may_be_unseen else found

    def _has_unseen(self, me: int) -> bool:
        """Whether another thread may be about to enter unregistered. Called if no registered thread is."""
        return any(thread != me and file in _BEFORE_ENGINE for thread, file in innermost_files())

    def suspended(self) -> Turn:
        """Use this inside a capture, while user code runs in the engine's frame with the compiler off. Other
        threads may run stock backwards but not capture: until its call returns, the engine has room for only
        one frame."""
        return Turn(self.suspend, self.resume)

    def suspend(self, me: int) -> None:
        """User code begins to run in the engine's frame."""
        self._in_frame = me
        self.release(me)

    def resume(self, me: int) -> None:
        """The user code has finished."""
        with self._condition:
            self._in_frame, self._owner = None, me
            self._slow.discard(me)

    def release(self, me: int) -> None:
        """This thread no longer captures."""
        with self._condition:
            if self._owner == me:
                self._owner = None
                self._condition.notify_all()

    # errors

    def place(self) -> Place:
        """This thread's state here."""
        me = threading.get_ident()
        is_locking = self._condition._is_owned()  # type: ignore[attr-defined]
        return Place(self._owner == me, self._in_frame == me, self._entering.get(me), is_locking)

    def restore_saved(self, before: Place) -> None:
        """Return this thread to its state `before`, after an error that skipped the usual exits."""
        me = threading.get_ident()
        while self.place().is_locking:
            self._condition.release()
        with self._condition:
            if before.is_owner or self._owner == me:
                self._owner = me if before.is_owner else None
            if before.is_in_frame or self._in_frame == me:
                self._in_frame = me if before.is_in_frame else None
            if before.entering:
                self._entering[me] = before.entering
            else:
                self._entering.pop(me, None)
                self._slow.discard(me)
            self._condition.notify_all()

    # fork

    def after_fork(self) -> None:
        """In the child, only the forking thread survives. What another thread held in the engine is never
        released."""
        me = threading.get_ident()
        self._condition = threading.Condition()
        self._lost |= not {self._owner, self._in_frame} <= {None, me}
        if self._owner not in (None, me):
            engine_protocol.set_autograd_compiler(None, False)
        self._owner = me if self._owner == me else None
        self._in_frame = me if self._in_frame == me else None
        self._slow.clear()
        self._entering = {thread: count for thread, count in self._entering.items() if thread == me}


window = Window()
restore_after_errors(window.place, window.restore_saved)
os.register_at_fork(after_in_child=window.after_fork)
