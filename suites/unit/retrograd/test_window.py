"""Threads and forks: captures and backwards of several threads take turns, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import retrograd
from retrograd._torch.locks import ForkSafeLock
from retrograd._torch.window import window
from retrograd.live.capture import BackwardRecorder
from unit.retrograd.programs import Square, leaf

Hook = Callable[[torch.Tensor], None]


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
    assert errors == []


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


def test_a_capture_goes_on_beside_a_plan_that_waits_in_a_hook() -> None:
    meeting, outer, inner = (
        Meeting(),
        retrograd.compiled_autograd("eager"),
        retrograd.compiled_autograd("eager"),
    )
    w = leaf()

    def work() -> None:
        y = w.sin()
        y.register_hook(meeting.hook)
        with outer:
            y.sum().backward()

    with another_thread(work):
        assert meeting.there.wait(60)
        for _ in range(3):
            compiled_square(inner)
        meeting.done.set()
    assert torch.equal(w.grad, w.detach().cos())
    assert outer.explain().fallbacks.total() == inner.explain().fallbacks.total() == 0
    assert retrograd.counters["runs"] == 4


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
@pytest.mark.parametrize("retain_grad", [False, True], ids=["in a stock backward", "in the engine's frame"])
def test_a_capture_gives_up_where_it_could_wait_for_ever(
    retain_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "patience", 0.01)
    meeting, context = Meeting(), retrograd.compiled_autograd("eager")
    w = leaf()

    def work() -> None:
        y = w.sin()
        if retain_grad:
            y.retain_grad()
        y.register_hook(meeting.hook)
        with retrograd.compiled_autograd("eager") if retain_grad else contextlib.nullcontext():
            y.sum().backward()

    with context, another_thread(work):
        assert meeting.there.wait(60)
        compiled_square(context)
        meeting.done.set()
    compiled_square(context)
    assert torch.equal(w.grad, w.detach().cos())
    assert {reason.code: count for reason, count in context.explain().fallbacks.items()} == {"engine-busy": 1}
    assert retrograd.counters["fallbacks"] == 1


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_backward_that_began_before_the_context_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "patience", 0.01)
    meeting, context = Meeting(), retrograd.compiled_autograd("eager")
    w = leaf()

    def work() -> None:
        y = w.sin()
        y.register_hook(meeting.hook)
        y.sum().backward()

    with another_thread(work):
        assert meeting.there.wait(60)
        compiled_square(context)
        assert [reason.code for reason in context.explain().fallbacks] == ["engine-busy"]
        meeting.done.set()
    compiled_square(context)
    assert torch.equal(w.grad, w.detach().cos())
    assert (retrograd.counters["runs"], retrograd.counters["fallbacks"]) == (1, 1)


def test_many_threads_capture_without_a_fallback() -> None:
    context = retrograd.compiled_autograd("eager")
    together = threading.Barrier(4)

    def chain(w: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            w = Square.apply(w).sin()
        return w.sum()

    def train(number: int) -> None:
        together.wait(60)
        for step in range(15):
            w, length = leaf(), number + step % 3
            (expected,) = torch.autograd.grad(chain(w, length), w)
            root = chain(w, length)
            with context:
                root.backward()
            assert torch.equal(w.grad, expected)

    with contextlib.ExitStack() as stack:
        for number in range(1, 5):
            stack.enter_context(another_thread(functools.partial(train, number)))
    assert context.explain().fallbacks.total() == 0
    assert retrograd.counters["runs"] == 60


def test_a_thread_that_captures_keeps_a_stock_backward_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    capturing, original = threading.Event(), BackwardRecorder.finish
    w = leaf()

    def finish(self: BackwardRecorder, outputs: Any) -> Any:
        capturing.set()
        threading.Event().wait(0.05)
        order.append("captured")
        return original(self, outputs)

    def stock() -> None:
        assert capturing.wait(60)
        y = w.sin()
        y.register_hook(lambda grad: order.append("stock"))
        y.sum().backward()

    monkeypatch.setattr(BackwardRecorder, "finish", finish)
    with another_thread(stock):
        compiled_square(retrograd.compiled_autograd("eager", strict=True))
    assert order == ["captured", "stock"]
    assert torch.equal(w.grad, w.detach().cos())


# forks


def answer_of_a_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(work()))
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


pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def test_a_forked_child_captures() -> None:
    assert fallbacks_of_a_square() == []
    assert answer_of_a_child(fallbacks_of_a_square) == []


def test_a_child_forked_in_a_hook_captures() -> None:
    answers: list[Any] = []
    w = leaf()
    y = w.sin()
    y.register_hook(lambda grad: answers.append(answer_of_a_child(fallbacks_of_a_square)))
    with retrograd.compiled_autograd("eager", strict=True):
        y.sum().backward()
    assert answers == [[]]


def test_a_child_forked_beside_a_running_plan_captures() -> None:
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
    assert answer == []


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_child_forked_during_a_capture_runs_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "patience", 0.01)
    meeting, original = Meeting(), BackwardRecorder.finish

    def finish(self: BackwardRecorder, outputs: Any) -> Any:
        monkeypatch.setattr(BackwardRecorder, "finish", original)
        meeting.hook(torch.ones(1))
        return original(self, outputs)

    monkeypatch.setattr(BackwardRecorder, "finish", finish)
    with another_thread(lambda: compiled_square(retrograd.compiled_autograd("eager", strict=True))):
        assert meeting.there.wait(60)
        answer = answer_of_a_child(fallbacks_of_a_square)
        meeting.done.set()
    assert answer == ["forked-while-capturing"]
    assert fallbacks_of_a_square() == []


def test_a_lock_is_free_in_a_child_whose_parent_held_it_elsewhere() -> None:
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
    assert answer == "taken"
    with lock:
        assert answer_of_a_child(take) == "taken"
