"""Programs of several threads and processes, to be run in a process of their own.

Where the engine has ever nested a backward so deep that it started a thread, torch lets no forked child run a
backward at all; so what forks must not share a process with other tests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import retrograd
from retrograd.live.capture.recorder import BackwardRecorder
from retrograd.process import ForkSafeLock
from unit.retrograd.programs import Square, leaf


@contextlib.contextmanager
def another_thread(work: Callable[[], None]) -> Iterator[None]:
    """`work` runs on another thread, which must be done soon after the block."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(timeout=60)
    assert not thread.is_alive()
    assert errors == [], errors


class Meeting:
    """A hook that stops its thread until `done` is set, and says when it is `there`."""

    def __init__(self) -> None:
        self.there, self.done = threading.Event(), threading.Event()

    def hook(self, grad: torch.Tensor) -> None:
        self.there.set()
        assert self.done.wait(60)


def compiled_square(context: retrograd.api.CompiledAutograd) -> None:
    """One compiled backward, with user code in it."""
    w = leaf()
    with context:
        Square.apply(w).sum().backward()
    assert torch.equal(w.grad, 2 * w.detach())


def answer_of_a_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(work()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child.start()
    theirs.close()
    try:
        assert ours.poll(60), "the child is stuck"
        return ours.recv()
    finally:
        child.kill()
        child.join()


def fallbacks_of_a_square() -> list[str]:
    """The reasons for which a compiled backward fell back; fails if its gradient is wrong."""
    context = retrograd.compiled_autograd("eager")
    with torch.enable_grad():
        compiled_square(context)
    return [reason.code for reason in context.explain().fallbacks]


def forked_between_backwards() -> list[Any]:
    """Answers of the parent and of its child."""
    return [fallbacks_of_a_square(), answer_of_a_child(fallbacks_of_a_square)]


def forked_in_a_hook() -> list[Any]:
    """Answers of a child that a hook forked."""
    answers: list[Any] = []
    y = leaf().sin()
    y.register_hook(lambda grad: answers.append(answer_of_a_child(fallbacks_of_a_square)))
    with retrograd.compiled_autograd("eager", strict=True):
        y.sum().backward()
    return answers


def forked_beside_a_running_plan() -> list[Any]:
    """Answer of a child that was forked while another thread was in a hook."""
    meeting = Meeting()

    def work() -> None:
        y = leaf().sin()
        y.register_hook(meeting.hook)
        with retrograd.compiled_autograd("eager"):
            y.sum().backward()

    with another_thread(work):
        assert meeting.there.wait(60)
        answer = answer_of_a_child(fallbacks_of_a_square)
        meeting.done.set()
    return [answer]


def forked_during_a_capture() -> list[Any]:
    """Answers of a child that was forked while another thread captured, and of the parent afterwards."""
    retrograd.reset()
    meeting, original = Meeting(), BackwardRecorder.finish

    def finish(self: BackwardRecorder, outputs: Any) -> Any:
        BackwardRecorder.finish = original  # type: ignore[method-assign]
        meeting.hook(torch.ones(1))
        return original(self, outputs)

    BackwardRecorder.finish = finish  # type: ignore[method-assign]
    with another_thread(lambda: compiled_square(retrograd.compiled_autograd("eager", strict=True))):
        assert meeting.there.wait(60)
        answer = answer_of_a_child(fallbacks_of_a_square)
        meeting.done.set()
    return [answer, fallbacks_of_a_square()]


def forked_beside_a_lock() -> list[Any]:
    """Whether children can take a lock that another thread holds, and one that the forking thread holds."""
    lock, meeting = ForkSafeLock(), Meeting()

    def hold() -> None:
        with lock:
            meeting.hook(torch.ones(1))

    def take() -> str:
        with lock:
            return "taken"

    with another_thread(hold):
        assert meeting.there.wait(60)
        answer = answer_of_a_child(take)
        meeting.done.set()
    with lock:
        return [answer, answer_of_a_child(take)]
