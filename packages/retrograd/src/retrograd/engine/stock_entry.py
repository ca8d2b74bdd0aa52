"""Keeps captures apart from backwards that enter the engine.

In: threads that enter the stock engine, and threads that capture. Out: they wait for each other, or a
`Refusal`.

The engine's compiler, which a capture exchanges, is one pointer for the whole process. Every backward reads
it once, when it enters the engine (``Engine::execute``); what is past that point is not concerned by a
change. So a capture waits only for threads that may be about to enter, and they wait for the capture. A
capture runs no user code and takes milliseconds, so whoever waits for a capture waits without a limit. For a
backward, a capture waits once and for a short time only: its user code may be waiting for this thread. Inside
a backward it does not wait at all: whoever is in the way may be who this thread works for.

Backwards that began before the gateway was opened (``facts.patches``) did not come by here. The first
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
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.autograd.graph as autograd_graph
from torch._C._dynamo import compiled_autograd as engine_protocol

from retrograd.errors import Refusal
from retrograd.process import restore_after_errors

stock_run_backward = autograd_graph._engine_run_backward

#: the files of what a thread runs before it is in the engine: the gateway asks a logger.
_BEFORE_ENGINE = {
    function.__code__.co_filename.encode("ascii", "backslashreplace").decode()
    for function in (stock_run_backward, logging.Logger.log)
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


class Turn:
    """A block in which the thread that made this has its turn at the engine. It is no generator: one that an
    error leaves in the middle would go on at some later time, and every backward of a compiled forward comes
    by here."""

    __slots__ = ("_begin", "_end", "_is_inside", "_thread")

    def __init__(self, begin: Callable[[int], None] | None, end: Callable[[int], None]) -> None:
        self._begin, self._end, self._is_inside = begin, end, False
        self._thread = threading.get_ident()  # of a deeply nested backward, torch may end it on another one

    def __enter__(self) -> Callable[[], None]:
        """To be called, if anybody can tell, when the turn is over before the block is."""
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
    """What one thread does: it captures, it runs user code in the engine's frame, so many of its backwards
    may be about to enter the engine, and it holds the lock."""

    is_owner: bool
    is_in_frame: bool
    entering: int | None
    is_locking: bool


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

    def stock(self) -> Turn:
        """Around every backward that the stock engine runs; over when it is known to be past the entrance."""
        return Turn(self.enter, self.leave)

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

    def capture(self) -> Turn:
        """Around a capture, or several of one thread.

        Raises:
            Refusal: this thread is in the engine's frame, or another one was too long in the way.
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

    def suspended(self) -> Turn:
        """Inside a capture, while user code runs in the engine's frame and the compiler is off: others may
        run stock backwards, but the engine has room for one frame only, until its call has returned."""
        return Turn(self.suspend, self.resume)

    def suspend(self, me: int) -> None:
        """User code begins to run in the engine's frame."""
        self._in_frame = me
        self.release(me)

    def resume(self, me: int) -> None:
        """It has run."""
        with self._condition:
            self._in_frame, self._owner = None, me
            self._slow.discard(me)

    def release(self, me: int) -> None:
        """This thread captures no more."""
        with self._condition:
            if self._owner == me:
                self._owner = None
                self._condition.notify_all()

    # errors

    def place(self) -> Place:
        """What this thread does here."""
        me = threading.get_ident()
        is_locking = self._condition._is_owned()  # type: ignore[attr-defined]
        return Place(self._owner == me, self._in_frame == me, self._entering.get(me), is_locking)

    def restore_saved(self, before: Place) -> None:
        """This thread does again what it did `before`, whatever an error has kept it from saying."""
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
            self.release(forking)

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
restore_after_errors(window.place, window.restore_saved)
os.register_at_fork(
    before=window.before_fork,
    after_in_parent=window.after_fork_in_parent,
    after_in_child=window.after_fork_in_child,
)
