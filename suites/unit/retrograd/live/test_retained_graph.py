"""Backwards that need the autograd graph while they run: what is released, when, and what is left intact."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import retrograd
from unit.retrograd.programs import Square, leaf

Context = AbstractContextManager[object]
Events = list[object]


class Product(torch.autograd.Function):
    """x * y, which reads its saved tensors `reads` times and records what they are."""

    @staticmethod
    def forward(ctx, x, y, events, reads=1):
        ctx.events, ctx.reads = events, reads
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append("backward")
        for _ in range(ctx.reads):
            x, y = ctx.saved_tensors
            ctx.events.append((x.requires_grad, x.is_leaf, y.requires_grad, y.is_leaf))
        return grad * y, grad * x, None, None


def watched(events: Events) -> saved_tensors_hooks:
    """Saved-tensor hooks that record their calls and copy, as offloading does."""

    def pack(t: Tensor) -> Tensor:
        events.append("pack")
        return t.clone()

    def unpack(t: Tensor) -> Tensor:
        events.append("unpack")
        return t.clone()

    return saved_tensors_hooks(pack, unpack)


def same_in_both(program: Callable[[Context, Events], Tensor]) -> None:
    """Runs `program` in eager and, strictly, compiled: equal bits, equal events."""
    events: Events = []
    expected = program(contextlib.nullcontext(), events)
    for _ in range(2):  # a first time, and from the cache
        compiled_events: Events = []
        compiled = program(retrograd.compiled_autograd("eager", strict=True), compiled_events)
        assert torch.equal(compiled, expected)
        assert compiled_events == events
    assert retrograd.counters["fallbacks"] == 0
    assert retrograd.counters["runs"] > 0


def refusal(root: Tensor, *inputs: Tensor) -> str:
    """ "freed" if the graph of `root` was, "intact" if it can still be differentiated."""
    try:
        torch.autograd.grad(root, inputs, torch.ones_like(root), retain_graph=True)
    except RuntimeError as error:
        return "freed" if "second time" in str(error) else str(error)
    return "intact"


@pytest.mark.parametrize("reads", [0, 1, 2])
@pytest.mark.parametrize("retain_grad", [False, True], ids=["", "in the engine's frame"])
def test_a_function_unpacks_when_it_reads_and_as_often(reads: int, retain_grad: bool) -> None:
    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        h = w.exp()
        with watched(events):
            y = Product.apply(h, w, events, max(reads, 1)) if reads else Unread.apply(h, events)
            z = y.sin()
        if retain_grad:
            y.retain_grad()
        y.register_hook(lambda grad: events.append("hook"))
        with context:
            z.sum().backward()
        return w.grad

    same_in_both(program)


class Unread(torch.autograd.Function):
    """2 x, which saves x and never reads it."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("retain_grad", [False, True], ids=["", "in the engine's frame"])
def test_everything_that_eager_frees_is_freed(retain_graph: bool, retain_grad: bool) -> None:
    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        a = w.sin()
        with watched(events):
            b = Product.apply(a, w, events)
        c = b.exp()
        with watched(events):
            d = Square.apply(c)
        if retain_grad:
            b.retain_grad()
        e = d.sin()
        with context:
            e.sum().backward(retain_graph=retain_graph)
        events.extend(refusal(root, w) for root in (a, e))
        events.extend(refusal(root, source) for root, source in ((b, a), (c, b), (d, c), (e, d)))
        return w.grad

    same_in_both(program)


def test_a_structure_that_was_captured_with_its_graph_retained() -> None:
    """The engine's cache would hand it over, and release it, before anybody can say that it must be kept."""

    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        for retain in (True, False):
            with watched(events):
                y = Product.apply(w.sin(), w, events)
            with context:
                y.sum().backward(retain_graph=retain)
            events.append(refusal(y, w))
        return w.grad

    same_in_both(program)


def test_the_same_function_without_hooks_is_released_at_once() -> None:
    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        with watched(events):
            y = Product.apply(w, w.sin(), events)
        z = Product.apply(w, w.cos(), events)
        with context:
            y.sum().backward()
            z.sum().backward()
        events.extend([refusal(y, w), refusal(z, w)])
        return w.grad

    same_in_both(program)


def test_saved_tensors_die_as_early_as_in_eager() -> None:
    """What a kept graph saved is freed on the way, not at the end."""

    def program(context: Context, events: Events) -> Tensor:
        alive: list[weakref.ref[Tensor]] = []

        def pack(t: Tensor) -> list[Tensor]:
            copy = t.clone()
            alive.append(weakref.ref(copy))
            return [copy]

        w = leaf()
        h, marks = w, []
        for i in range(4):
            with saved_tensors_hooks(pack, lambda box: box[0]):
                h = Square.apply(h * 0.5)
            marks.append(h)
            h.register_hook(
                lambda grad, i=i: events.append((i, sum(ref() is not None for ref in alive[i + 1 :])))
            )
        root = h.sum()
        del h, marks
        with context:
            root.backward()
        gc.collect()
        events.append(sum(ref() is not None for ref in alive))
        return w.grad

    same_in_both(program)


@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "backward"])
def test_the_graph_below_an_intermediate_input_is_left_intact(accumulate: bool) -> None:
    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        a = w.sin()
        b = a.exp()
        c = Square.apply(b)
        d = c.sin()
        with context:
            if accumulate:  # then eager executes the node of `b` too
                d.sum().backward(inputs=[b])
            else:
                (b.grad,) = torch.autograd.grad(d.sum(), b)
        events.extend([refusal(d, c), refusal(c, b), refusal(b, a), refusal(a, w)])
        lower = a if accumulate else b
        with context:
            lower.backward(b.grad)
        events.extend([refusal(b, a), refusal(a, w)])
        return w.grad

    same_in_both(program)


def test_an_input_on_the_way_to_another_is_executed_and_freed() -> None:
    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        a = w.sin()
        b = a.exp()
        c = (b * b).sum() + (a * a).sum()
        with context:
            grads = torch.autograd.grad(c, [b, a])
        events.extend([refusal(b, a), refusal(a, w)])
        return torch.cat(grads)

    same_in_both(program)


def test_functions_behind_hooks_and_intermediate_inputs_at_once() -> None:
    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        with watched(events):
            a = Product.apply(w, w.sin(), events)
            b = Product.apply(a, w, events)
            c = b.exp()
        with context:
            (grad,) = torch.autograd.grad(c.sum(), a)
        events.extend([refusal(c, b), refusal(b, a), refusal(a, w)])
        with context:
            a.backward(grad)
        events.append(refusal(a, w))
        return w.grad

    same_in_both(program)


def test_an_error_in_a_kept_function_is_the_users_and_leaves_it_readable() -> None:
    class Mine(Exception):
        pass

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise Mine

    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        with watched(events):
            y = Failing.apply(w)
        with context, pytest.raises(Mine):
            y.sum().backward()
        return y.grad_fn.saved_tensors[0]

    same_in_both(program)


@pytest.mark.parametrize("retain_grad", [False, True], ids=["", "in the engine's frame"])
def test_a_second_derivative_through_all_that_is_saved_behind_hooks(retain_grad: bool) -> None:
    def program(context: Context, events: Events) -> Tensor:
        w = leaf()
        v = w.detach().cos().requires_grad_()
        with watched(events):
            y = Product.apply(w, v, events) * w.sin() @ v.t()
            z = torch.nn.functional.gelu(y).exp()
        if retain_grad:
            y.retain_grad()
        with context:
            (grad,) = torch.autograd.grad(z.sum(), w, create_graph=True)
            events.append("first")
            seconds = torch.autograd.grad((grad * grad).sum(), [w, v])
        return torch.cat(seconds)

    same_in_both(program)


def test_tensors_of_different_history_packed_into_one_object_keep_it() -> None:
    def grads(context: Context) -> list[Tensor | None]:
        w = leaf()
        packed: dict[int, Tensor] = {}
        with saved_tensors_hooks(lambda t: packed.setdefault(t.data_ptr(), t.detach().clone()), lambda t: t):
            y = w * w.detach().requires_grad_()
        with context:
            (first,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        return [first, *torch.autograd.grad((first * w).sum(), w)]

    context = retrograd.compiled_autograd("eager")
    for compiled, expected in zip(grads(context), grads(contextlib.nullcontext()), strict=True):
        assert torch.equal(compiled, expected)
    assert not context.explain().fallbacks


def test_a_captured_structure_is_captured_once() -> None:
    events: Events = []
    for _ in range(5):
        w = leaf()
        with watched(events):
            y = Product.apply(w.sin(), w, events).exp()
        with retrograd.compiled_autograd("eager", strict=True) as context:
            y.sum().backward()
    assert [backward.runs for backward in context.explain().backwards] == [1]
    assert (retrograd.counters["plans"], retrograd.counters["runs"]) == (1, 5)


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_what_cannot_be_released_falls_back_before_anything_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("retrograd.live.capture.retained_graph.request_to_release", refuse)
    events: Events = []
    w = leaf()
    with watched(events):
        y = Product.apply(w.sin(), w, events).exp()
    with retrograd.compiled_autograd("eager") as context:
        y.sum().backward()
    assert events.count("backward") == 1
    assert refusal(y, w) == "freed"
    assert [reason.text for reason in context.explain().fallbacks] == ["RuntimeError: planted"]


def test_stock_compiled_autograd_can_run_what_was_captured_with_its_graph_kept() -> None:
    from torch._dynamo import compiled_autograd as stock

    def grad(context: Context) -> Tensor:
        w = leaf()
        with saved_tensors_hooks(lambda t: [t.clone()], lambda box: box[0]):
            y = Square.apply(w)
        with context:
            y.sum().backward()
        return w.grad

    expected = grad(contextlib.nullcontext())
    for _ in range(2):
        assert torch.equal(grad(retrograd.compiled_autograd("eager", strict=True)), expected)
        assert torch.equal(grad(stock._enable(lambda gm: gm)), expected)


class WritesIntoSaved(torch.autograd.Function):
    """Asks for gradients, so that the graph is kept, and writes into what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.sin()
        ctx.save_for_backward(x * 1)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        (own,) = torch.autograd.grad(ctx.y, ctx.x, grad, retain_graph=True)
        return saved.mul_(0).add_(own)


def test_what_a_backward_has_changed_in_place_is_released(caplog: pytest.LogCaptureFixture) -> None:
    for context in (contextlib.nullcontext(), *[retrograd.compiled_autograd("eager", strict=True)] * 3):
        x = leaf()
        h = x.exp()
        y = (WritesIntoSaved.apply(h) * h).sum()
        with context:
            y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            _ = h.grad_fn._saved_result
        with context, pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
