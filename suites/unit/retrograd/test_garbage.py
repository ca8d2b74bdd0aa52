"""While graphs are made the collector of reference cycles is off, and afterwards it is what it was."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

import retrograd
from retrograd._torch.garbage import GarbagePause
from unit.retrograd.programs import leaf


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_is_off_inside_and_on_again_after_the_outermost() -> None:
    pause = GarbagePause()
    with pause:
        with pause:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_stays_off_if_it_was() -> None:
    gc.disable()
    with GarbagePause():
        pass
    assert not gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), GarbagePause():
        raise ValueError("inside")
    assert gc.isenabled()


def test_the_last_thread_switches_it_on() -> None:
    pause, entered, leave = GarbagePause(), threading.Event(), threading.Event()

    def other() -> None:
        with pause:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with pause:
        thread.start()
        entered.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def in_child(check: object) -> int:
    """The exit status of a forked child: 0 if `check` holds there."""
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)  # type: ignore[operator]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_that_it_does_not_have() -> None:
    pause, entered, leave = GarbagePause(), threading.Event(), threading.Event()

    def other() -> None:
        with pause:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    assert in_child(gc.isenabled) == 0
    with pause:
        assert in_child(lambda: not gc.isenabled()) == 0
    leave.set()
    thread.join()


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_user_code_runs_with_the_collector_on(backend: str) -> None:
    seen: list[bool] = []
    w = leaf()
    y = w.sin()
    y.retain_grad()  # a hook that runs inside the engine's call
    y.register_hook(lambda grad: seen.append(gc.isenabled()))
    with retrograd.compiled_autograd(backend, strict=True):
        y.cos().sum().backward()
    assert seen == [True]
    assert gc.isenabled()


def test_a_capture_that_fails_leaves_it_on() -> None:
    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            raise ValueError("in the backward")

    with pytest.raises(ValueError, match="in the backward"), retrograd.compiled_autograd("eager"):
        Sparse.apply(leaf()).sum().backward()
    assert gc.isenabled()
