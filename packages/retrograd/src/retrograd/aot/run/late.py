"""Code that takes longer to compile than the user wants to wait.

In: something to compile, and a limit. Out: the code; or, if it is not there in time, `LateCode`, which is
compiled on another thread meanwhile and says when it is ready.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

from retrograd.backends.base import Boxed
from retrograd.errors import Reason


class LateCode:
    """Code that is being compiled.

    Args:
        compile: gives the code. guards: how many guards the sizes of the graph have by now: code that adds
            to them once nobody installs them is not used.
    """

    def __init__(self, compile: Callable[[], Boxed], guards: Callable[[], int]) -> None:
        self._compile, self._guards = compile, guards
        self._done = threading.Event()
        self._code: Boxed | None = None
        self._error: BaseException | None = None
        self._guards_then: int | None = None
        threading.Thread(
            target=contextvars.copy_context().run, args=(self._work,), name="retrograd-late", daemon=True
        ).start()

    def _work(self) -> None:
        try:
            self._code = self._compile()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it is ready within `seconds`."""
        ready = self._done.wait(seconds)
        self._guards_then = self._guards()
        return ready

    @property
    def is_ready(self) -> bool:
        """Whether it may be called, if only to say why it cannot run."""
        return self._done.is_set() and self._guards() == self._guards_then

    @property
    def code(self) -> Boxed:
        """The code.

        Raises:
            BaseException: what compiling it raised.
        """
        if self._error is not None:
            raise self._error
        assert self._code is not None
        return self._code

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run it."""
        return self.code(args)


def in_time(compile: Callable[[], Boxed], seconds: float | None, guards: Callable[[], int]) -> Boxed:
    """The code, or what becomes it if it is not there after `seconds`.

    Raises:
        BaseException: what compiling it raised.
    """
    if seconds is None:
        return compile()
    late = LateCode(compile, guards)
    return late.code if late.wait(seconds) else late


def is_ready(code: Boxed) -> bool:
    """Whether the code may be called."""
    return code.is_ready if isinstance(code, LateCode) else True


def still_compiling(name: str) -> Reason:
    """Why something runs as eager meanwhile."""
    return Reason(
        "compile-timeout",
        f"{name} takes longer to compile than compile_timeout allows; it is compiled in the background",
        "aot.compile",
        way_out="nothing to do, or a larger compile_timeout",
    )
