"""Backwards inside backwards: compiled, as deep as is safe, and what the outer one knows stays as it was."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd.engine import graph_task, under_way
from retrograd.live.session import MOST_NESTED
from unit.retrograd.programs import Square, leaf

Context = AbstractContextManager[object]


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small nested backwards are captured too."""
    monkeypatch.setattr(under_way, "SMALL", 0)


def test_a_small_nested_backward_is_left_to_the_engine() -> None:
    def hook(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = torch.ones(3, requires_grad=True)
            return grad * torch.autograd.grad((inner * inner).sum(), inner)[0]

    x = torch.ones(3, requires_grad=True)
    for hooks in (1, 2):
        y = x * 2
        for _ in range(hooks):
            y.register_hook(hook)
        x.grad = None
        with retrograd.compiled_autograd("eager") as context:
            y.sum().backward()
        assert x.grad.tolist() == [2.0 * 2**hooks] * 3
        assert [reason.code for reason in context.explain().notes] == ["nested-small"]
        assert not context.explain().fallbacks


class Nested(torch.autograd.Function):
    """sin(x), whose backward runs the same one level further in, by way of autograd."""

    @staticmethod
    def forward(ctx, x, levels, events):
        ctx.levels, ctx.events = levels, events
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.events.append(ctx.levels)
        if not ctx.levels:
            return grad * x.cos(), None, None
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            root = Nested.apply(inner, ctx.levels - 1, ctx.events)
        torch.autograd.backward(root, grad)
        ctx.events.append(-ctx.levels)
        return inner.grad, None, None


def in_eager_and_compiled(program: Callable[[Context, list[object]], Tensor]) -> retrograd.Report:
    """Runs `program` in both, which must give equal bits and events. Returns the compiled one's report."""
    events: list[object] = []
    compiled_events: list[object] = []
    expected = program(contextlib.nullcontext(), events)
    context = retrograd.compiled_autograd("eager")
    assert torch.equal(program(context, compiled_events), expected)
    assert compiled_events == events
    return context.explain()


def fallbacks(report: retrograd.Report) -> dict[str, int]:
    return {reason.code: count for reason, count in report.fallbacks.items()}


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
@pytest.mark.parametrize("levels", [1, MOST_NESTED, 30, 150])
def test_nested_functions_are_compiled_as_deep_as_is_safe(levels: int) -> None:
    def program(context: Context, events: list[object]) -> Tensor:
        w = leaf()
        with context:
            Nested.apply(w, levels, events).sum().backward()
        return w.grad

    report = in_eager_and_compiled(program)
    assert set(fallbacks(report)) == ({"nested-too-deep"} if levels > MOST_NESTED else set())
    assert retrograd.counters["runs"] == min(levels, MOST_NESTED) + 1


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_nested_plans_take_little_more_of_the_stack_than_eager() -> None:
    """Eager nests 60 deep on one stack; programs that have room for that must have it under us."""

    def deepest(context: Context) -> int:
        depths: list[int] = []

        class Events(list[object]):
            def append(self, item: object) -> None:
                frame, depth = sys._getframe(), 0
                while frame := frame.f_back:  # type: ignore[assignment]
                    depth += 1
                depths.append(depth)

        with context:
            Nested.apply(leaf(), 58, Events()).sum().backward()
        return max(depths) - min(depths)

    assert deepest(retrograd.compiled_autograd("eager")) - deepest(contextlib.nullcontext()) <= 250


def test_a_strict_session_says_that_it_is_too_deep() -> None:
    with pytest.raises(retrograd.CaptureError, match="nested in more than") as error:
        with retrograd.compiled_autograd("eager", strict=True):
            Nested.apply(leaf(), MOST_NESTED + 1, []).sum().backward()
    assert error.value.reason.code == "nested-too-deep"
    assert under_way.plans_under_way() == 0


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_chain_of_nested_reentrant_checkpoints() -> None:
    def nest(h: Tensor, levels: int) -> Tensor:
        if not levels:
            return h.sin()
        return checkpoint(nest, h * 1.01, levels - 1, use_reentrant=True)

    def program(context: Context, events: list[object]) -> Tensor:
        w = leaf()
        with context:
            nest(w, 8).sum().backward()
        return w.grad

    in_eager_and_compiled(program)
    assert retrograd.counters["runs"] > MOST_NESTED


@pytest.mark.usefixtures("nothing_is_small")
def test_a_long_chain_of_reentrant_checkpoints_is_compiled() -> None:
    def program(context: Context, events: list[object]) -> Tensor:
        w = leaf()
        h = w
        for _ in range(120):
            h = checkpoint(torch.sin, h, use_reentrant=True)
        with context:
            h.sum().backward()
        return w.grad

    assert fallbacks(in_eager_and_compiled(program)) == {}
    assert retrograd.counters["runs"] == 121


def test_callbacks_run_at_the_end_of_the_backward_that_queued_them() -> None:
    def program(context: Context, events: list[object]) -> Tensor:
        def queue(name: str) -> None:
            Variable._execution_engine.queue_callback(lambda: events.append(f"end of {name}"))

        def nested(grad: Tensor) -> None:
            queue("outer")
            with torch.enable_grad():
                z = torch.ones(2, requires_grad=True)
                y = z * 2
                y.register_hook(lambda grad: queue("inner"))
                y.sum().backward()
            events.append("inner backward returned")
            queue("outer, again")

        w = leaf()
        h = w.sin()
        h.register_hook(nested)
        w.register_hook(lambda grad: events.append("leaf"))
        with context:
            h.sum().backward()
        return w.grad

    assert fallbacks(in_eager_and_compiled(program)) == {}


def test_what_a_hook_asks_after_a_nested_backward_concerns_its_own() -> None:
    def program(context: Context, events: list[object]) -> Tensor:
        def state(name: str) -> Callable[[Tensor], None]:
            def ask(grad: Tensor) -> None:
                events.append((name, torch._C._current_autograd_node().name(), torch.is_grad_enabled()))

            return ask

        def nested(grad: Tensor) -> None:
            state("before")(grad)
            task = torch._C._current_graph_task_id()
            with torch.enable_grad():
                z = torch.ones(2, requires_grad=True).exp()
                z.register_hook(state("inside"))
                z.sum().backward()
            state("after")(grad)
            events.append(task == torch._C._current_graph_task_id() != -1)

        w = leaf()
        h = w.sin()
        h.register_hook(nested)
        with context:
            (h * 2).sum().backward()
        return w.grad

    assert fallbacks(in_eager_and_compiled(program)) == {}


def test_a_hook_that_a_nested_backward_registers_on_the_outer_graph_runs() -> None:
    def program(context: Context, events: list[object]) -> Tensor:
        w = leaf()
        h = w.sin()
        y = h.exp()

        def nested(grad: Tensor) -> None:
            with torch.enable_grad():
                z = torch.ones(2, requires_grad=True) * 2
                z.register_hook(lambda grad: (h.register_hook(lambda g: events.append("late")), None)[1])
                z.sum().backward()

        y.register_hook(nested)
        with context:
            y.sum().backward()
        return w.grad

    assert fallbacks(in_eager_and_compiled(program)) == {}


@pytest.mark.parametrize("caught", [True, False], ids=["caught", "not caught"])
def test_an_error_in_a_nested_backward_leaves_no_state_behind(caught: bool) -> None:
    class Mine(Exception):
        pass

    def fail(grad: Tensor) -> None:
        raise Mine

    def nested(grad: Tensor) -> None:
        with torch.enable_grad():
            z = torch.ones(2, requires_grad=True) * 2
            z.register_hook(fail)
            with contextlib.suppress(Mine) if caught else contextlib.nullcontext():
                z.sum().backward()

    w = leaf()
    h = w.sin()
    h.register_hook(nested)
    with retrograd.compiled_autograd("eager", strict=True):
        with contextlib.nullcontext() if caught else pytest.raises(Mine):
            h.sum().backward()
        assert under_way.plans_under_way() == 0
        assert graph_task._watched == []
        assert (w.grad is not None) is caught
        w.grad = None
        Square.apply(w).sum().backward()
    assert torch.equal(w.grad, 2 * w.detach())


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_backward_nested_in_the_engines_frame_falls_back_by_name() -> None:
    def program(context: Context, events: list[object]) -> Tensor:
        w = leaf()
        h = w.sin()
        h.retain_grad()

        def nested(grad: Tensor) -> None:
            with torch.enable_grad():
                inner = torch.ones(2, requires_grad=True)
                (inner * inner).sum().backward()
                events.append(inner.grad.tolist())

        h.register_hook(nested)
        with context:
            h.sum().backward()
            (w * w).sum().backward()
        return w.grad + h.grad

    assert fallbacks(in_eager_and_compiled(program)) == {"nested-in-engine-frame": 1}
    assert retrograd.counters["runs"] == 2


@pytest.mark.usefixtures("nothing_is_small")
def test_a_second_derivative_inside_a_hook() -> None:
    def program(context: Context, events: list[object]) -> Tensor:
        w = leaf()
        h = w.sin()

        def nested(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                x = grad.detach().requires_grad_()
                (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
                (second,) = torch.autograd.grad(first.sum(), x)
            return second

        h.register_hook(nested)
        with context:
            (h * h).sum().backward()
        return w.grad

    assert fallbacks(in_eager_and_compiled(program)) == {}
    assert retrograd.counters["runs"] == 2


@pytest.mark.parametrize("site", ["tensor", "post_accumulate", "node_pre", "node_post"])
@pytest.mark.parametrize("twice", [False, True], ids=["", "registered before too"])
def test_a_hook_that_came_and_went_in_one_hook_does_not_run(site: str, twice: bool) -> None:
    def events(context: Any) -> list[str]:
        seen: list[str] = []
        w = torch.ones(3, requires_grad=True)
        h = w * 2

        def hook(*_: Any) -> None:
            seen.append(site)

        node = h.grad_fn
        assert node is not None
        register = {
            "tensor": w.register_hook,
            "post_accumulate": w.register_post_accumulate_grad_hook,
            "node_pre": node.register_prehook,
            "node_post": node.register_hook,
        }[site]
        if twice:
            register(hook)
        y = h.sin()
        y.register_hook(lambda grad: register(hook).remove())
        with context:
            y.sum().backward()
        return seen

    eagers = events(contextlib.nullcontext())
    assert events(retrograd.compiled_autograd(backend="eager")) == eagers == [site] * twice
