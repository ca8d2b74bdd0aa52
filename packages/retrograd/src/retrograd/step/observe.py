"""What Python does while a step is traced, besides calling torch.

In: a block that runs user code. Out: an exception in it just before it prints, reads a clock, draws numbers
outside of torch or takes a batch from a data loader: a plan would do none of it, and the step is going to be
run again. And the names that the code which ran can have read.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = ["Observed", "SideEffectError", "observing", "users_line"]

#: torch, and what it computes with.
_TORCH = tuple(
    os.path.join(os.path.dirname(path), name) + os.sep
    for path in torch.__path__
    for name in ("torch", "sympy", "mpmath", "networkx", "numpy", "triton")
)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_FUNCTIONS = {
    builtins.print: "prints",
    builtins.input: "reads input",
    builtins.open: "opens a file",
    io.open: "opens a file",
    os.open: "opens a file",
    os.write: "writes to a file",
    os.read: "reads a file",
    os.urandom: "draws random bytes",
    os.system: "starts a process",
    time.time: "reads a clock",
    time.time_ns: "reads a clock",
    time.perf_counter: "reads a clock",
    time.perf_counter_ns: "reads a clock",
    time.monotonic: "reads a clock",
    time.monotonic_ns: "reads a clock",
    time.process_time: "reads a clock",
    time.sleep: "sleeps",
}
_CLASSES = {
    random.Random: "draws random numbers outside of torch",
    random.SystemRandom: "draws random numbers outside of torch",
    io.TextIOWrapper: "writes to a stream",
    io.BufferedWriter: "writes to a file",
    io.BufferedReader: "reads a file",
    io.FileIO: "uses a file",
    io.StringIO: "writes to a stream",
    io.BytesIO: "writes to a stream",
    socket.socket: "uses a socket",
}
_LOOKUPS = frozenset({builtins.getattr, builtins.vars, builtins.dir, builtins.eval, builtins.globals})
_STREAMS = {"write", "writelines", "read", "readline", "readlines", "send", "recv"}
_GENERATOR_STATE = {"set_state", "get_state", "manual_seed", "seed", "graphsafe_set_state", "set_offset"}
#: of torch's own Python: what hands out data, or draws.
_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")


class SideEffectError(BaseException):
    """The step is about to do what only Python can do. Not an `Exception`, so that user code lets it pass."""


class Observed:
    """What was seen.

    Attributes:
        effect: the first effect and the line of the user's code that would have it; None if there was none.
        is_state_touched: whether the state of one of torch's generators was read or written.
    """

    def __init__(self) -> None:
        self.effect: tuple[str, str] | None = None
        self.is_state_touched = False
        self._paused = 0
        self._looks_up = False
        self._codes: set[CodeType] = set()

    def names(self) -> frozenset[str] | None:
        """Attributes, globals and strings that the code which ran speaks of; None if the user's code looks
        attributes up by names that may be made up."""
        if self._looks_up:
            return None
        found: set[str] = set()
        for code in self._codes:
            found.update(code.co_names)
            if "__dict__" in code.co_names and _is_users(code.co_filename):
                return None
            found.update(value for value in code.co_consts if isinstance(value, str))
        return frozenset(found)

    def pause(self) -> None:
        """Look away until `resume`; may be nested."""
        self._paused += 1
        if self._paused == 1 and _MAY_SWITCH:
            sys.setprofile(None)

    def resume(self) -> None:
        """Look again, if nobody else paused."""
        self._paused -= 1
        if self._paused == 0 and _MAY_SWITCH and self.effect is None:
            sys.setprofile(self._see)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look in any case: user code runs here."""
        paused, self._paused = self._paused, 1
        self.resume()
        try:
            yield
        finally:
            self.pause()
            self._paused = paused + 1
            self.resume()

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._paused:
            return
        if event == "call":
            self._codes.add(frame.f_code)
            if frame.f_code.co_name == "__next__" and frame.f_code.co_filename.endswith(_LOADER):
                self._stop("takes a batch from a data loader", frame.f_back)
        elif event == "c_call":
            owner = getattr(arg, "__self__", None)
            if type(owner) in _CLASSES:
                if type(owner) not in _WITH_STREAM_METHODS or arg.__name__ in _STREAMS:
                    self._stop(_CLASSES[type(owner)], frame)
            elif type(owner) is torch.Generator and arg.__name__ in _GENERATOR_STATE:
                self.is_state_touched |= not _is_ours(frame)
            elif arg in _LOOKUPS:
                self._looks_up |= _is_users(frame.f_code.co_filename)
            elif arg in _FUNCTIONS:
                self._stop(_FUNCTIONS[arg], frame)
            elif type(owner).__module__.startswith("numpy.random"):
                self._stop("draws random numbers outside of torch", frame)

    def _stop(self, what: str, frame: FrameType | None) -> None:
        line = _line_of(frame)
        if not line:
            return  # torch's own business: nobody of the user's is on the stack
        self.effect = self.effect or (what, line)
        raise SideEffectError(what)


#: before 3.12 it costs nothing to take a profile function away and to put it back.
_MAY_SWITCH = sys.version_info < (3, 12)
_WITH_STREAM_METHODS = frozenset(cls for cls in _CLASSES if not issubclass(cls, random.Random))


@contextmanager
def observing(seen: Observed) -> Iterator[Observed]:
    """Watch the Python of this thread until the end of the block."""
    before = sys.getprofile()
    sys.setprofile(seen._see)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def _logging_caller(frame: FrameType | None) -> FrameType | None:
    """The frame, or who called the logging that it is part of: handlers are no code of the step."""
    start, caller = frame, frame
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_filename == logging.__file__:
            caller = frame.f_back
        frame = frame.f_back
    return caller if caller is not None else start


def _is_ours(frame: FrameType | None) -> bool:
    """Whether we called, perhaps through torch, and not the user."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _is_users(filename: str) -> bool:
    return not filename.startswith((*_TORCH, _OURS, _STANDARD, "<frozen", "<string"))


def _line_of(frame: FrameType | None) -> str:
    """The user's line that called, itself or through Python's own library; empty if torch did."""
    frame = _logging_caller(frame)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_code.co_filename.startswith((*_TORCH, _OURS)):
            return ""
        frame = frame.f_back
    return ""


def users_line(error: BaseException) -> str:
    """The innermost line of user code through which an exception came; empty if it came through none."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame.f_code.co_filename):
            line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
