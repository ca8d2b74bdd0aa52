"""An exception that arrives between any two instructions leaves the thread, and the process, as they were."""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._dynamo import compiled_autograd as stock

import retrograd
from retrograd import process
from retrograd._torch import patches
from retrograd._torch.autograd import graph_task, under_way
from retrograd._torch.autograd.collection import _collection, _replaced
from retrograd._torch.autograd.entering import window
from retrograd.live import contexts

Run = Callable[[], object]


class Interrupt(BaseException):
    """What the tests deliver."""


def interrupt_at(run: Run, number: int) -> tuple[int, str]:
    """Run until instruction `number` of any Python code, which raises; says how far it came, and where it was
    then. Number 0 is never reached. Instructions of ``logging`` do not count: between two of them, a handler
    of this process would keep its lock, as it does without us, and every other thread would wait for it."""
    count, place = 0, ""

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count, place
        if frame.f_globals.get("__name__") == "logging":
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
            if count == number:
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}, instruction {frame.f_lasti}"
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except (Interrupt, Exception) as error:
        error.__traceback__ = None
    finally:
        sys.settrace(before)
    return count, place


def state() -> tuple[Any, ...]:
    """What a backward of ours switches, takes or notes."""
    compiler = engine_protocol.set_autograd_compiler(None, False)
    engine_protocol.set_autograd_compiler(*compiler)
    return (
        ("engine's compiler", compiler, stock.compiled_autograd_enabled, list(_replaced.compilers)),
        ("window", window._owner, window._in_frame, dict(window._entering), window._condition._is_owned()),
        ("locks", [lock for lock in process._locks if lock._lock._is_owned()], list(process._held.locks)),
        ("collection", _collection.receive),
        ("plans", list(under_way._stack.running), list(graph_task._body.stack), list(graph_task._watched)),
        ("patches", [name for name, stack in patches._here.stacks.items() if stack]),
        ("contexts", contexts._entered.get(), set(contexts._open)),
        ("modes", torch.is_grad_enabled(), torch._C._is_multithreading_enabled()),
        ("functions", torch._C._get_torch_function_state(), torch._C._len_torch_function_stack()),
        ("dispatch", torch._C._len_torch_dispatch_stack(), torch._C._functorch.maybe_current_level()),
        ("autocast", torch._C._is_any_autocast_enabled(), torch.get_default_dtype()),
        ("keys", str(torch._C._dispatch_tls_local_include_set())),
        ("keys", str(torch._C._dispatch_tls_local_exclude_set())),
        ("frames", torch._C._dynamo.eval_frame.get_eval_frame_callback()),
        ("tracing", torch._guards.TracingContext.try_get(), torch._guards.CompileContext.try_get()),
    )


def deliver(prepared: Callable[[], Run], tries: int | None = None) -> int:
    """Interrupt at so many instructions, or at each; returns how many interrupts there were."""
    total, _ = interrupt_at(prepared(), 0)
    step = 1 if tries is None else max(total // tries, 1)
    numbers = range(random.randint(1, step), total + 1, step)
    for number in numbers:
        run, before = prepared(), state()
        _, place = interrupt_at(run, number)
        assert state() == before, f"instruction {number}, in {place}"
    return len(numbers)


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
    """In a context whose engine works at the end: on this thread and, in eager, on another."""
    programs = Programs()
    with retrograd.compiled_autograd(backend="aten", strict=True):
        yield programs
        programs.plain()()
        assert torch.equal(programs.x.grad, 2 * programs.x * (programs.x * programs.x).cos())
    thread = threading.Thread(target=lambda: (torch.ones(1, requires_grad=True) * 2).backward(), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the engine is held"


WARM = ["plain", "hooked", "retained", "nested", "compiled_step"]


@pytest.mark.parametrize("name", WARM)
def test_an_interrupted_backward_leaves_nothing_behind(programs: Programs, name: str) -> None:
    prepared = getattr(programs, name)
    for _ in range(4):
        prepared()()
    assert deliver(prepared, 60) > 50


def test_an_interrupted_capture_and_lowering_leave_nothing_behind(programs: Programs) -> None:
    assert deliver(programs.new, 20) > 10


#: of these tries there are 20,000 or more. Later instructions of long programs take long to reach.
THOROUGH = {"plain": None, "hooked": None, "retained": None, "compiled_step": None, "nested": 800, "new": 200}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", THOROUGH)
def test_wherever_it_is_interrupted_nothing_is_left_behind(programs: Programs, name: str) -> None:
    prepared = getattr(programs, name)
    for _ in range(4):
        prepared()()
    tries = deliver(prepared, THOROUGH[name])
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
            sender = threading.Timer(random.random() / 1000, signal.pthread_kill, (main, signal.SIGUSR1))
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
