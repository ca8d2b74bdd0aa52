"""Which thread may have the engine's compiler installed, and when.

In: threads that are about to capture, or to run a backward on the stock engine. Out: they take turns.

The compiler is one pointer for the whole process. Every backward reads it once, when it enters the engine
(``Engine::execute``); what is past that point is not concerned by a change. So a capture waits only for
threads that may be about to enter, and they wait for the capture. A capture runs no user code and takes
milliseconds, so whoever waits for a capture waits without a limit. For a backward, a capture waits for a
short time only: its user code may be waiting for this thread.

Backwards that began before the gateway was opened (``_torch.patches``) did not come by here. The first
capture looks for them on the stacks of the other threads.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C._dynamo import compiled_autograd as engine_protocol

from retrograd._torch.autograd.engine import stock_calls_on
from retrograd.errors import Refusal

_A_MOMENT = 0.001


class Window:
    """Keeps captures and entering backwards apart.

    Args:
        patience: for how many seconds a capture waits for the backwards of other threads.
    """

    def __init__(self, patience: float = 0.25) -> None:
        self.patience = patience
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._in_frame: int | None = None
        self._forking: int | None = None
        self._entering: dict[int, int] = {}
        self._running: Counter[int] = Counter()
        self._may_be_unseen = True
        self._lost = False

    @contextmanager
    def stock(self) -> Iterator[Callable[[], None]]:
        """Around every backward that the stock engine runs.

        Yields:
            To be called, if anybody can tell, when the backward is known to be past the entrance.
        """
        me = threading.get_ident()
        with self._condition:
            if self._owner not in (None, me):
                self._condition.wait_for(lambda: self._owner in (None, me))
            self._entering[me] = self._entering.get(me, 0) + 1
            self._running[me] += 1
        entered = False

        def has_entered() -> None:
            nonlocal entered
            if not entered:
                entered = True
                self._leave(me)

        try:
            yield has_entered
        finally:
            with self._condition:
                has_entered()
                self._running[me] -= 1
                if not self._running[me]:
                    del self._running[me]

    def _leave(self, thread: int) -> None:
        with self._condition:
            self._entering[thread] -= 1
            if not self._entering[thread]:
                del self._entering[thread]
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
            self._why_never(me)
            self._wait_until_free(me)
            self._owner = me
        try:
            yield
        finally:
            self._release(me)

    def _why_never(self, me: int) -> None:
        if self._in_frame == me:
            raise Refusal(
                "nested-in-engine-frame", "a backward inside one with retain_grad or C++ tensor hooks"
            )
        if self._lost:
            raise Refusal("forked-while-capturing", "this process was forked during a capture")

    def _wait_until_free(self, me: int) -> None:
        deadline = time.monotonic() + self.patience
        while not self._is_free(me):
            left = deadline - time.monotonic()
            if self._owner is None and left <= 0:
                raise Refusal("engine-busy", "another thread is in a backward")
            # Nobody says when an unseen backward ends.
            self._condition.wait(_A_MOMENT if self._may_be_unseen else max(left, _A_MOMENT))

    def _is_free(self, me: int) -> bool:
        others = any(thread != me for thread in self._entering)
        if self._owner is not None or self._in_frame is not None or others:
            return False
        if self._may_be_unseen:
            self._may_be_unseen = self._has_unseen(me)
        return not self._may_be_unseen

    def _has_unseen(self, me: int) -> bool:
        """Whether another thread is in torch's own gateway, but did not come by here."""
        stacks = sys._current_frames()
        return any(
            thread != me and stock_calls_on(frame) > self._running[thread] for thread, frame in stacks.items()
        )

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
        self._entering = {thread: count for thread, count in self._entering.items() if thread == me}
        self._running = Counter({me: self._running[me]})


window = Window()
os.register_at_fork(
    before=window.before_fork,
    after_in_parent=window.after_fork_in_parent,
    after_in_child=window.after_fork_in_child,
)
