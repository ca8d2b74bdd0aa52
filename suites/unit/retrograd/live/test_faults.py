"""Faults planted in each stage of lowering, in backends and user code: gradients as eager's, nothing left."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._dynamo import compiled_autograd as engine_protocol

import retrograd
from retrograd.engine import graph_task, under_way
from retrograd.live.lower import lowerer
from retrograd.live.lower import lowerer as lower
from unit.retrograd.programs import Square, everything, leaf, observed


class Planted(Exception):
    pass


def failing(*args: object, **kwargs: object) -> Any:
    raise Planted("here")


def state_left() -> dict[str, object]:
    """All that a backward may leave behind; empty when it leaves nothing."""
    left = {
        "compiler": engine_protocol.set_autograd_compiler(None, False)[0],
        "queries": under_way.plans_under_way(),
        "watch": graph_task._watched,
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad mode": not torch.is_grad_enabled(),
        "graph task": torch._C._current_graph_task_id() != -1,
    }
    return {name: value for name, value in left.items() if value}


STAGES: dict[str, tuple[object, str]] = {
    "modes": (lower.ThreadModes, "now"),
    "sizes": (lower, "changed_sizes"),
    "trace": (lower, "trace"),
    "copy": (lower, "copied"),
    "guard": (lower, "InputGuard"),
    "guard check": (lower.InputGuard, "check"),
    "why not": (lower.InputGuard, "why_not"),
    "decompositions": (lowerer.Backend, "decompositions"),
    "compile": (lowerer.Backend, "compile"),
    "run": (lowerer.Lowered, "__call__"),
}


@contextlib.contextmanager
def planted(stage: str, monkeypatch: pytest.MonkeyPatch):
    """Every call of this stage raises."""
    owner, name = STAGES[stage]
    if owner is lowerer.Backend:
        owner = retrograd.backends.registry.AtenBackend
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        yield


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_lowering_costs_the_compilation_only(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = retrograd.compiled_autograd("aten")
    for rows in (5, 5, 6, 6):
        expected, events = observed(contextlib.nullcontext(), everything, rows)
        with planted(stage, monkeypatch):
            grad, faulty_events = observed(context, everything, rows)
        torch.testing.assert_close(grad, expected)
        assert faulty_events == events
    assert state_left() == {}
    assert {reason.code for reason in context.explain().fallbacks} <= {"segment-not-compiled"}
    retrograd.reset()
    torch.testing.assert_close(observed(context, everything, 6)[0], expected)
    assert retrograd.counters["lowerings"] > 0


@pytest.mark.parametrize("stage", ["modes", "trace", "copy", "guard", "decompositions", "compile", "run"])
def test_strict_raises_a_fault_in_lowering(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = leaf()
    with planted(stage, monkeypatch), pytest.raises(retrograd.LoweringError, match="Planted: here") as error:
        with retrograd.compiled_autograd("aten", strict=True):
            (w * w).sum().backward()
    assert isinstance(error.value.__cause__, Planted)
    assert w.grad is None
    assert state_left() == {}
    with retrograd.compiled_autograd("aten", strict=True):
        (w.sin() * w).sum().backward()


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_a_fault_keeps_no_tensor_alive(
    level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level, "retrograd")  # the records are kept
    x, w = torch.ones(2, 3), leaf()
    alive = weakref.ref(x)
    with planted("compile", monkeypatch), retrograd.compiled_autograd("aten"):
        (w.sum() * x).sum().backward()
    assert ("Planted: here" in caplog.text) == (level == "DEBUG")
    del x
    gc.collect()
    assert alive() is None


class FailingBackend:
    """A boxed backend whose code fails in its `nth` run, before or after it empties its list of inputs, or
    has freed them."""

    def __init__(self, nth: int, error: Exception, clears: bool = True, frees: bool = False) -> None:
        self.nth, self.error, self.clears, self.frees = nth, error, clears, frees
        self.runs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        def run(args: list[Any]) -> object:
            values = tuple(args)
            if self.clears:
                args.clear()
            self.runs += 1
            if self.runs == self.nth:
                if self.frees:
                    del values
                raise self.error
            return gm(*values)

        run._boxed_call = True
        return run


def train(w: torch.Tensor) -> torch.Tensor:
    w.grad = None
    (w * w).sin().sum().backward()
    return w.grad


def expected_grad(w: torch.Tensor) -> torch.Tensor:
    return (w.detach() ** 2).cos() * 2 * w.detach()


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
@pytest.mark.parametrize("nth", [2, 3, 5])
@pytest.mark.parametrize("clears", [False, True, None])
def test_code_that_fails_later_is_interpreted_if_its_inputs_are_there(nth: int, clears: bool | None) -> None:
    """None: the code is given its inputs one by one."""
    backend = FailingBackend(nth, Planted("no"), bool(clears))
    w = leaf()

    def one_by_one(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        run = backend(gm, inputs)
        return lambda *args: run(list(args))

    with retrograd.compiled_autograd(one_by_one if clears is None else backend):
        for _ in range(6):
            torch.testing.assert_close(train(w), expected_grad(w))
    assert (backend.runs, retrograd.counters["run_failures"]) == (6, 1)
    (reason,) = retrograd.explain().fallbacks
    assert (reason.code, "raised Planted: no" in reason.text) == ("code-failed", True)


@pytest.mark.parametrize("clears", [False, True])
def test_code_that_fails_in_its_first_run_is_replaced_by_interpretation_at_once(clears: bool) -> None:
    backend = FailingBackend(1, Planted("no"), clears)
    w = leaf()
    with retrograd.compiled_autograd(backend) as context:
        for _ in range(3):
            torch.testing.assert_close(train(w), expected_grad(w))
    assert (backend.runs, retrograd.counters["run_failures"]) == (1, 1)
    assert context.explain().backwards[0].lowerings[-1].because == "its code failed: Planted: no"


def test_code_that_has_freed_its_inputs_raises_once_with_a_note_and_is_interpreted_then() -> None:
    backend = FailingBackend(2, Planted("no"), frees=True)
    w = leaf()
    with retrograd.compiled_autograd(backend):
        torch.testing.assert_close(train(w), expected_grad(w))
        with pytest.raises(Planted) as error:
            train(w)
        assert "is interpreted from now on" in error.value.__notes__[0]
        assert w.grad is None
        torch.testing.assert_close(train(w), expected_grad(w))
    assert backend.runs == 2
    assert state_left() == {}


def test_memory_that_runs_out_in_the_first_run_does_not_cost_the_compilation() -> None:
    backend = FailingBackend(1, torch.OutOfMemoryError("full"))
    w = leaf()
    with retrograd.compiled_autograd(backend):
        for _ in range(3):
            torch.testing.assert_close(train(w), expected_grad(w))
    assert backend.runs == 3


def test_inputs_are_held_in_the_first_run_only() -> None:
    import weakref

    alive: list[bool] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        def run(args: list[Any]) -> object:
            saved = [weakref.ref(arg) for arg in args]
            values = tuple(args)
            args.clear()
            result = gm(*values)
            del values
            alive.append(all(ref() is not None for ref in saved))
            return result

        run._boxed_call = True
        return run

    w = leaf()
    with retrograd.compiled_autograd(backend):
        for _ in range(3):
            train(w)
    assert alive == [True, False, False]


# user code


def raising(error: BaseException) -> Callable[..., object]:
    def hook(*args: object) -> None:
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", True)
        raise error

    return hook


class Raises(torch.autograd.Function):
    """Identity whose backward raises what `ctx.error` is."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raising(ctx.error)()


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("place", ["tensor", "retained", "pre", "post", "accumulated", "unpack", "function"])
def test_an_exception_in_user_code_leaves_no_state(place: str, kind: type[BaseException]) -> None:
    error = kind("mine")
    w = leaf()
    y = w.sin()
    if place == "unpack":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, raising(error)):
            y = y.sin()
    if place == "function":
        y = Raises.apply(y, error)
    if place in ("tensor", "retained"):
        y.register_hook(raising(error))
    if place == "retained":
        y.retain_grad()
    if place == "pre":
        y.grad_fn.register_prehook(raising(error))
    if place == "post":
        y.grad_fn.register_hook(raising(error))
    if place == "accumulated":
        w.register_post_accumulate_grad_hook(raising(error))
    root = Square.apply(y).sum()
    with pytest.raises(kind), retrograd.compiled_autograd("eager"):
        root.backward()
    torch.set_autocast_enabled("cpu", False)
    torch.set_grad_enabled(True)
    assert state_left() == {}
    grad, events = observed(contextlib.nullcontext(), everything)
    again = observed(retrograd.compiled_autograd("eager", strict=True), everything)
    assert torch.equal(again[0], grad)
    assert again[1] == events


def test_an_interrupt_by_the_user_inside_a_plan_comes_out_and_leaves_no_state(
    request: pytest.FixtureRequest,
) -> None:
    # A process that a shell started in the background ignores the signal.
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    w = leaf()
    y = w.sin()
    y.register_hook(lambda grad: signal.raise_signal(signal.SIGINT))
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt), retrograd.compiled_autograd("eager"):
        y.exp().sum().backward()
    assert state_left() == {}
    with retrograd.compiled_autograd("eager", strict=True):
        torch.testing.assert_close(train(w), expected_grad(w))
