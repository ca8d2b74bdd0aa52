"""Getting Inductor ready on another thread: whoever compiles or forks waits for it, but not for ever."""

from __future__ import annotations

import threading

import pytest

from retrograd._torch import inductor_start


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Thread, threading.Event]:
    """A start that is under way until it is let go."""
    may_end = threading.Event()
    made = threading.Thread(target=may_end.wait, daemon=True)
    monkeypatch.setattr(inductor_start, "_thread", made)
    made.start()
    return made, may_end


def test_whoever_compiles_waits_until_it_is_done(thread: tuple[threading.Thread, threading.Event]) -> None:
    made, may_end = thread
    threading.Timer(0.05, may_end.set).start()
    inductor_start.await_start()
    assert not made.is_alive()


def test_a_fork_does_not_wait_for_ever(thread: tuple[threading.Thread, threading.Event]) -> None:
    made, may_end = thread
    inductor_start.await_start(0.01)
    assert made.is_alive()
    may_end.set()


def test_what_cannot_be_loaded_is_left_to_whoever_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail() -> None:
        tried.append(True)
        raise RuntimeError("no workers here")

    monkeypatch.setattr("torch._inductor.async_compile.AsyncCompile.wakeup", fail)
    inductor_start._start()
    assert tried


def test_without_a_gpu_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_start.torch.cuda, "is_available", lambda: False)
    inductor_start.start_early.cache_clear()
    monkeypatch.setattr(inductor_start, "_thread", None)
    inductor_start.start_early()
    assert inductor_start._thread is None
    inductor_start.start_early.cache_clear()
