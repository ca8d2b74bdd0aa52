"""Threads and forks: captures and backwards of several threads take turns, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import retrograd
from retrograd.engine.collection import run_stock
from retrograd.engine.request import EngineRequest
from retrograd.engine.stock_entry import Window, window
from retrograd.errors import Refusal
from retrograd.live.capture.recorder import BackwardRecorder
from unit.retrograd.engine import forks
from unit.retrograd.engine.forks import Meeting, another_thread, compiled_square
from unit.retrograd.programs import Square, leaf


def capture_again_and_again(seconds: float) -> None:
    """Each time as if it were the first capture of the process."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with Window().capture():
            pass


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
def test_a_capture_gives_up_where_it_could_wait_for_ever_and_later_ones_do_not_wait(
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
        window.patience = 3600
        for _ in range(3):
            compiled_square(context)
        meeting.done.set()
    compiled_square(context)
    assert torch.equal(w.grad, w.detach().cos())
    assert {reason.code: count for reason, count in context.explain().fallbacks.items()} == {"engine-busy": 4}
    assert retrograd.counters["fallbacks"] == 4
    assert retrograd.counters["runs"] == 1 + retain_grad


class Counted(torch.autograd.Function):
    """Its backward runs one of another graph, of which this is a part again, so many times."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.depth:
            x = torch.ones_like(grads[0]).requires_grad_()
            with torch.enable_grad():
                Counted.apply(x, ctx.depth - 1).sum().backward()
            return grads[0] * x.grad, None
        return grads[0] * 2, None


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_backward_nested_so_deeply_that_threads_change_waits_for_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window, "patience", 3600)
    x = leaf()
    with retrograd.compiled_autograd("eager", strict=False):
        Counted.apply(x, 100).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_a_backward_that_began_before_the_gateway_was_opened_is_seen_until_it_is_in_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_enter, meeting, w = SimpleQueue[int](), Meeting(), leaf()
    # What is C code has no frame: the innermost one is the gateway's.
    monkeypatch.setattr(torch.autograd.graph, "log", SimpleNamespace(getEffectiveLevel=may_enter.get))

    def work() -> None:
        y = w.sin()
        y.register_hook(meeting.hook)
        run_stock(EngineRequest((y,), (torch.ones_like(y),), False, False, accumulate_grad=True))

    with another_thread(work):
        with pytest.raises(Refusal, match="another thread is in a backward"):
            capture_again_and_again(60)
        may_enter.put(logging.WARNING)
        assert meeting.there.wait(60)
        with Window(0).capture():
            meeting.done.set()
    assert torch.equal(w.grad, w.detach().cos())


def test_other_threads_are_looked_at_beside_dynamo() -> None:
    """For a while, because objects of Dynamo's frames, read from another thread, had been freed."""
    end = threading.Event()
    before = sys.getswitchinterval()

    def work() -> None:
        while not end.is_set():
            torch.compiler.reset()
            x = leaf()
            torch.compile(lambda a: (a.sin() * 2).cos(), backend="eager")(x).sum().backward()

    with another_thread(work), contextlib.ExitStack() as stack:
        stack.callback(end.set)
        stack.callback(sys.setswitchinterval, before)
        sys.setswitchinterval(1e-5)
        capture_again_and_again(3)


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


@pytest.fixture(scope="module")
def fresh() -> Iterator[Executor]:
    """Runs things in one process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="torch's engine has threads for CUDA devices: no forked child can use it",
)
@pytest.mark.parametrize(
    ("program", "answers"),
    [
        (forks.forked_between_backwards, [[], []]),
        (forks.forked_in_a_hook, [[]]),
        (forks.forked_beside_a_running_plan, [[]]),
        (forks.forked_during_a_capture, [["forked-while-capturing"], []]),
        (forks.forked_beside_a_lock, ["taken", "taken"]),
    ],
)
def test_forked_children_are_not_stuck_and_right(
    program: Callable[[], list[Any]], answers: list[Any], fresh: Executor
) -> None:
    assert fresh.submit(program).result(timeout=120) == answers
