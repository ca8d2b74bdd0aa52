"""An exception that arrives between any two instructions leaves the thread, and the process, as they were."""

from __future__ import annotations

import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame
from torch._dynamo import compiled_autograd as stock
from torch._dynamo.types import ConvertFrameReturn

import retrograd
from gradparity.checks.interrupts import Run, deliver, engine_is_free, switches
from retrograd import process
from retrograd.engine import graph_task
from retrograd.engine.collection import _replaced
from retrograd.engine.stock_entry import window
from retrograd.live import contexts
from retrograd.runtime.streams import _looked_at


def state() -> dict[str, Any]:
    """What a backward of ours switches, takes or notes."""
    compiler = engine_protocol.set_autograd_compiler(None, False)
    engine_protocol.set_autograd_compiler(*compiler)
    return switches() | {
        "engine's compiler": (compiler, stock.compiled_autograd_enabled, list(_replaced.compilers)),
        "window": (window._owner, window._in_frame, dict(window._entering), window._condition._is_owned()),
        "locks": ([lock for lock in process._locks if lock._lock._is_owned()], list(process._held.locks)),
        "values": {
            key: value
            for key, value in process._values.__dict__.items()
            if key is not _looked_at and value is not key._default
        },
        "plans": (list(graph_task._body.stack), list(graph_task._watched)),
        "contexts": (contexts._entered.get(), set(contexts._open)),
    }


def interrupted(prepared: Callable[[], Run], tries: int | None = None) -> int:
    """Interrupt at so many instructions, or at each; returns how many interrupts there were."""
    delivered = deliver(prepared, state, tries)
    assert not delivered.left, delivered
    return delivered.count


class Programs:
    """Backwards that are to be interrupted; each method makes one more."""

    def __init__(self) -> None:
        self.x = torch.ones(3, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.x], lr=0.1)

        def step(y: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = (self.x * y).sin().sum()
            loss.backward()
            self.optimizer.step()
            return loss

        self.step = retrograd.compile_step(step, backend="eager")
        self.step._pace = None  # it stays compiled, however slow this machine is

    def plain(self) -> Run:
        self.x.grad = None
        return (self.x * self.x).sin().sum().backward

    def hooked(self) -> Run:
        h = (self.x * self.x).sin()
        h.register_hook(lambda grad: grad * 2)
        return h.sum().backward

    def retained(self) -> Run:
        h = (self.x * self.x).sin()
        h.retain_grad()
        return h.sum().backward

    def nested(self) -> Run:
        h = (self.x * self.x).sin()
        inner = (self.x * 3).sum()
        h.register_hook(lambda grad: grad * torch.autograd.grad(inner, self.x, retain_graph=True)[0])
        return h.sum().backward

    def new(self) -> Run:
        retrograd.reset()
        return self.hooked()

    def compiled_step(self) -> Run:
        return lambda: self.step(torch.ones(3))


@pytest.fixture
def programs() -> Iterator[Programs]:
    """In a context whose engine works at the end: on this thread, and on another in eager and compiled."""
    programs, context = Programs(), retrograd.compiled_autograd(backend="aten", strict=True)
    with context:
        yield programs
        programs.plain()()
        assert torch.equal(programs.x.grad, 2 * programs.x * (programs.x * programs.x).cos())

    def elsewhere() -> None:
        retrograd.reset()
        with context:
            programs.hooked()()

    assert engine_is_free(elsewhere)


WARM = ["plain", "hooked", "retained", "nested", "compiled_step"]


@pytest.mark.parametrize("name", WARM)
def test_an_interrupted_backward_leaves_nothing_behind(programs: Programs, name: str) -> None:
    prepared = getattr(programs, name)
    for _ in range(4):
        prepared()()
    assert interrupted(prepared, 60) > 50


def test_dynamo_is_off_after_an_error_that_found_it_on() -> None:
    """In torch's wrapper, one instruction lies between Dynamo's start and the block that ends it."""

    def body() -> None:
        set_eval_frame(lambda *_: ConvertFrameReturn())
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            process.restored_on_error(body)
        assert get_eval_frame_callback() is None
    finally:
        set_eval_frame(None)


def test_an_interrupted_capture_and_lowering_leave_nothing_behind(programs: Programs) -> None:
    assert interrupted(programs.new, 20) > 10


#: of these tries there are 20,000 or more. Later instructions of long programs take long to reach.
THOROUGH = {"plain": None, "hooked": None, "retained": None, "compiled_step": None, "nested": 800, "new": 200}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", THOROUGH)
def test_wherever_it_is_interrupted_nothing_is_left_behind(programs: Programs, name: str) -> None:
    prepared = getattr(programs, name)
    for _ in range(4):
        prepared()()
    tries = interrupted(prepared, THOROUGH[name])
    logging.getLogger(__name__).warning("%d interrupts in %s", tries, name)
    assert tries >= (THOROUGH[name] or 3_000)


def test_signals_leave_nothing_behind(programs: Programs) -> None:
    is_armed = False

    def interrupt(*_: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    main, count = threading.get_ident(), 0
    try:
        for prepared in [programs.hooked, programs.plain, programs.nested] * 10:
            run, before = prepared(), state()
            delay = (1 + random.random()) / 1000  # seconds; the handler is armed by then
            sender = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGUSR1))
            sender.start()
            try:
                is_armed = True
                for _ in range(1000):
                    run = prepared()
                    run()
            except KeyboardInterrupt:
                count += 1
            is_armed = False
            sender.join()
            assert state() == before
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert count > 20
