"""Hooks and Functions that differentiate through the graph of the running backward."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

import retrograd
from retrograd.engine import EngineRequest
from retrograd.live.capture import reentry
from retrograd.live.capture.reentry import _registered, asks_in, who_asks
from unit.retrograd.programs import Square

Hook = Callable[[Tensor], Any]


def leaf(size: int) -> Tensor:
    """A leaf of so many numbers."""
    return torch.linspace(-1, 2, size).requires_grad_()


def step(x: Tensor, make: Callable[[Tensor, Tensor], Hook], context: Any = None) -> Tensor:
    """The gradient of `x` after a backward with a hook between two halves of its graph."""
    x.grad = None
    h = x.sin() * x
    z = h.exp()
    z.register_hook(make(h, x))
    with context or retrograd.compiled_autograd("eager", strict=False):
        z.sum().backward()
    assert x.grad is not None
    return x.grad


def differentiating(h: Tensor, x: Tensor) -> Hook:
    return lambda grad: torch.autograd.grad(h, x, grad, retain_graph=True)[0] + grad


def counting(limit: int) -> Callable[[Tensor, Tensor], Hook]:
    """Hooks of which those after the first `limit` differentiate."""
    calls = [0]

    def make(h: Tensor, x: Tensor) -> Hook:
        def hook(grad: Tensor) -> Tensor | None:
            calls[0] += 1
            return torch.autograd.grad(h, x, grad, retain_graph=True)[0] if calls[0] > limit else None

        return hook

    return make


def eager(x: Tensor, make: Callable[[Tensor, Tensor], Hook]) -> Tensor:
    return step(x.detach().requires_grad_(), make, torch.enable_grad())


def test_a_leafs_hook_is_looked_at_whenever_it_was_set() -> None:
    def gradient(context: Any) -> Tensor:
        w, x = leaf(3), leaf(3)
        h = x.sin()
        w.register_hook(lambda grad: torch.autograd.grad(h, x, grad, retain_graph=True)[0])
        _registered.clear()  # nobody notes hooks before the first context of a process
        with context:
            (h.exp() * w).sum().backward()
        assert w.grad is not None
        return w.grad

    retrograd.reset()
    found = gradient(retrograd.compiled_autograd("eager", strict=False))
    assert torch.equal(found, gradient(nullcontext()))


def test_the_first_is_compiled_and_later_ones_are_left_to_the_engine() -> None:
    retrograd.reset()
    x = leaf(4)
    expected = eager(x, differentiating)
    with retrograd.compiled_autograd("eager") as context:
        assert torch.equal(step(x, differentiating, torch.enable_grad()), expected)
        assert not context.explain().fallbacks
    with (
        pytest.warns(retrograd.FallbackWarning, match="comes to later"),
        retrograd.compiled_autograd("eager") as context,
    ):
        assert torch.equal(step(x, differentiating, torch.enable_grad()), expected)
    assert [reason.code for reason in context.explain().fallbacks] == ["reentered-graph"]


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_hook_may_begin_to_differentiate_at_any_step() -> None:
    retrograd.reset()
    x, ours, theirs = leaf(4), counting(2), counting(2)
    for _ in range(5):
        assert torch.equal(step(x, ours), eager(x, theirs))


def test_a_hook_that_asks_for_other_gradients_stays_compiled() -> None:
    retrograd.reset()
    other = leaf(3)

    def make(h: Tensor, x: Tensor) -> Hook:
        loss = other.sin().sum()
        return lambda grad: loss.backward()

    x = leaf(4)
    with retrograd.compiled_autograd("eager") as context:
        for _ in range(3):
            step(x, make, torch.enable_grad())
    report = context.explain()
    assert not report.fallbacks
    assert sum(backward.runs for backward in report.backwards) >= 3


def harmless(h: Tensor, x: Tensor) -> Hook:
    return lambda grad: grad * 1


def registered_before_its_node_is_reached(h: Tensor, x: Tensor) -> Hook:
    asked = [0]

    def hook(grad: Tensor) -> Tensor:
        asked[0] += 1
        return asking_behind_the_closure(grad)

    asking_behind_the_closure = differentiating(h, x)
    return hook


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
@pytest.mark.parametrize("make", [differentiating, registered_before_its_node_is_reached])
def test_a_hook_that_differentiates_may_take_the_place_of_a_harmless_one(
    make: Callable[[Tensor, Tensor], Hook],
) -> None:
    retrograd.reset()
    x = leaf(4)
    for one in (harmless, make, harmless, make):
        assert torch.equal(step(x, one), eager(x, one))


def test_one_hook_that_differentiates_does_not_speak_for_another() -> None:
    retrograd.reset()
    x, other = leaf(4), leaf(3)
    step(x, differentiating)

    def make(h: Tensor, x: Tensor) -> Hook:
        loss = other.sin().sum()
        return lambda grad: loss.backward()

    with retrograd.compiled_autograd("eager") as context:
        step(x, make, torch.enable_grad())
    assert not context.explain().fallbacks


def of_leaf(x: Tensor, hook: Any) -> Any:
    return x.register_hook(hook)


def of_leaf_node(x: Tensor, hook: Any) -> Any:
    node = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    handle = node.register_prehook(lambda grads: hook(grads[0]))
    handle.node = node  # it goes if nobody holds it
    return handle


def after_accumulation(x: Tensor, hook: Any) -> Any:
    return x.register_post_accumulate_grad_hook(lambda leaf: hook(leaf.grad) and None)


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
@pytest.mark.parametrize("register", [of_leaf, after_accumulation, of_leaf_node])
def test_a_hook_of_a_leaf_differentiates_what_was_not_reached(register: Callable[..., Any]) -> None:
    def gradients(context: Any) -> list[Tensor]:
        w, x = leaf(4), leaf(4)
        found: list[Tensor] = []
        for number in range(4):
            w.grad = x.grad = None
            h = x.sin()
            handle = None
            if number != 1:

                def look(grad: Tensor, h: Tensor = h, found: list[Tensor] = found) -> None:
                    found.append(torch.autograd.grad(h, x, grad, retain_graph=True)[0])

                handle = register(w, look)
            with context():
                (h.exp() * w).sum().backward()
            found += [w.grad, x.grad]  # type: ignore[list-item]
            if handle is not None:
                handle.remove()
        return found

    retrograd.reset()
    expected, got = (
        gradients(context)
        for context in (torch.enable_grad, lambda: retrograd.compiled_autograd("eager", strict=False))
    )
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


def asks_below(root: Tensor) -> bool:
    return asks_in(EngineRequest((root.sum(),), (torch.ones(()),), False, False, accumulate_grad=True))


def test_hooks_that_ask_are_known_while_they_are_registered() -> None:
    with retrograd.compiled_autograd("eager"):
        pass
    gc.collect()
    root = leaf(4).exp()
    assert not asks_below(root)
    h = root.sin()
    h.register_hook(scale)
    assert not asks_below(h)
    handle = h.register_hook(solver)
    assert asks_below(h)
    handle.remove()
    assert not asks_below(h)
    h.grad_fn.register_prehook(lambda grads: solver(grads[0]))  # type: ignore[union-attr]
    assert asks_below(h)
    del h
    assert not asks_below(root)


def test_a_hook_that_asks_concerns_no_graph_that_was_made_since() -> None:
    with retrograd.compiled_autograd("eager"):
        pass
    other, mine = leaf(4), leaf(4)
    for register in ("tensor", "node", "leaf"):
        h = other.sin()
        if register == "tensor":
            h.register_hook(solver)
        elif register == "node":
            h.grad_fn.register_hook(lambda *_, h=h: solver(h))  # type: ignore[union-attr]
        else:
            other.register_hook(solver)
        assert asks_below(h)
        assert not asks_below(mine.sin())
        assert asks_below((h * mine).sin())
        assert asks_below(other.sin()) == (register == "leaf")


def test_a_tensor_hook_that_asks_concerns_its_graph_whichever_thread_made_it() -> None:
    with retrograd.compiled_autograd("eager"):
        pass
    older = leaf(4).cos()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            h = pool.submit(lambda: leaf(4).sin()).result()
        h.register_hook(solver)
        assert asks_below(h)
        assert not asks_below(older)
        assert not asks_below(leaf(4).sin())
        theirs = pool.submit(lambda: leaf(4).sin()).result()
        theirs.register_hook(solver)
        assert asks_below(theirs * leaf(4))


def test_a_hook_that_asks_on_the_node_of_a_leaf_concerns_later_graphs() -> None:
    with retrograd.compiled_autograd("eager"):
        pass
    x, other = leaf(4), leaf(4)
    node = x.sin().grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    handle = node.register_prehook(lambda grads: solver(grads[0]))
    assert asks_below(x.sin())
    assert not asks_below(other.sin())
    handle.remove()
    assert not asks_below(x.sin())
    node.register_hook(lambda _, grads: solver(grads[0]))
    assert asks_below(x.sin())


class Registering(Tensor):
    """Registers hooks by itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            return "registered"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_may_register_hooks_by_itself() -> None:
    with retrograd.compiled_autograd("eager"):
        assert leaf(3).as_subclass(Registering).register_hook(scale) == "registered"


def test_a_view_loses_its_hooks_when_its_base_is_written() -> None:
    """Torch makes the history of such a view anew when it is asked for, and lets go of the hooks."""
    with retrograd.compiled_autograd("eager"):
        leaf(3).sin().sum().backward()  # from now on we see what is registered
        base = leaf(3).sin()
        view = base[:2]
        view.register_hook(scale)
        base.mul_(2)
        handle = view.register_hook(scale)
        (grad,) = torch.autograd.grad(view.sum(), view)
    handle.remove()
    assert torch.equal(grad, torch.ones(2))


def test_strict_says_so() -> None:
    retrograd.reset()
    x = leaf(4)
    step(x, differentiating)
    with pytest.raises(retrograd.CaptureError, match="comes to later"):
        step(x, differentiating, retrograd.compiled_autograd("eager", strict=True))


def test_what_it_saved_is_free_when_it_has_run() -> None:
    retrograd.reset()
    x = leaf(4)
    saved: list[weakref.ref[Tensor]] = []

    def make(h: Tensor, x: Tensor) -> Hook:
        saved.append(weakref.ref(h))
        apart = x.cos().sum()
        return lambda grad: torch.autograd.grad(apart, x)[0]

    h = x.sin() * x
    z = h.exp()
    z.register_hook(make(h, x))
    del h
    with retrograd.compiled_autograd("eager"):
        z.sum().backward()
    del z
    gc.collect()
    assert saved[0]() is None


def backward_of(*values: Tensor) -> None:
    """A function of the user's that a hook calls by its name."""
    torch.autograd.backward(values)


def solver(grad: Tensor) -> Any:
    """A hook that calls another function."""
    return backward_of(grad)


def scale(grad: Tensor) -> Tensor:
    """A hook that only computes."""
    return grad * 2


class Clipping:
    """A hook that is an object."""

    def __call__(self, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)

    def hook(self, grad: Tensor) -> Tensor:
        return scale(grad)


class Solving(Clipping):
    """One that differentiates."""

    def __call__(self, grad: Tensor) -> Tensor:
        return torch.autograd.grad(grad, [grad])[0]


def read_of_grad(grad: Tensor) -> Any:
    """Reads ``.grad``, as optimizers in the backward do."""
    return leaf(2).grad


def checking(grad: Tensor) -> None:
    """Raises."""
    if grad.isnan().any():
        raise FloatingPointError


def reading_file(packed: str) -> Any:
    """Reads what was put to disk."""
    with open(packed) as file:
        return file.read()


def loading(packed: str) -> Any:
    """Has torch read it."""
    return torch.load(packed)


def scaling_by(values: list[Any]) -> Hook:
    """A hook that knows many values."""
    return lambda grad: grad * len(values)


HARMLESS = [
    *(scale, Clipping(), Clipping().hook, functools.partial(scale), read_of_grad, {1: scale}),
    *(scaling_by([solver] * 101), scaling_by([torch.ones(1)] * 99)),
]
ASKING = [
    *(solver, Solving(), functools.partial(solver), {1: scale, 2: solver}, scaling_by([scale, solver])),
    *(checking, reading_file, loading, lambda packed: loading(packed)),
    lambda grad: backward_of(grad),
]


@pytest.mark.parametrize("hook", HARMLESS)
def test_code_that_names_nothing_of_autograds_asks_for_no_gradients(hook: Any) -> None:
    assert not who_asks([hook])


@pytest.mark.parametrize("hook", ASKING)
def test_code_that_differentiates_or_may_raise_is_found_behind_what_calls_it(hook: Any) -> None:
    assert who_asks([scale, hook])


def test_code_behind_many_hooks_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward of a model with hooks on its modules registers new ones, which lead to the same code."""
    read = []
    names_autograd = reentry._names_autograd
    monkeypatch.setattr(reentry, "_names_autograd", lambda code: read.append(code) or names_autograd(code))
    hook, x = scaling_by([2.0]), leaf(2)
    wrapped = [functools.partial(hook) for _ in range(9)]
    root = x
    for one in wrapped:
        root = root.sin()
        root.register_hook(one)
    assert not asks_below(root)
    assert read.count(hook.__code__) == 1


class Solved(torch.autograd.Function):
    """Differentiates in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.autograd.grad(grads[0], grads[0])


def test_the_code_of_module_hooks_and_functions_is_read() -> None:
    def asking(module: nn.Module, *grads: Any) -> None:
        backward_of(*grads)

    def quiet(module: nn.Module, *grads: Any) -> None:
        pass

    layer, x = nn.Tanh(), leaf(2)
    hooks = [BackwardHook(layer, *given) for given in (([asking], []), ([], [asking]), ([quiet], [quiet]))]
    contexts = [Solved.apply(x).grad_fn, Square.apply(x).grad_fn]
    assert [bool(who_asks([one])) for one in (*hooks, *contexts)] == [True, True, False, True, False]


def gradient_of(y: Tensor, x: Tensor, cotangent: Tensor) -> Tensor:
    """A function that hooks and Functions of the user's share."""
    return torch.autograd.grad(y, x, cotangent, retain_graph=True)[0]


class Through(torch.autograd.Function):
    """Differentiates a function of the running graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
        ctx.fn, ctx.w = fn, w
        ctx.save_for_backward(x)
        return fn(x).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.fn(x.detach())
        return None, None, gradient_of(y, ctx.w, grads[0])


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_function_shares_code_with_a_hook_that_differentiated() -> None:
    def gradient(context: Any) -> Tensor:
        w = leaf(4)
        scale = w.exp()
        y = Through.apply(w.detach(), lambda t: (t * scale).tanh(), w) + scale
        with context:
            y.sum().backward()
        assert w.grad is not None
        return w.grad

    retrograd.reset()
    step(leaf(4), lambda h, x: lambda grad: gradient_of(h, x, grad))
    for _ in range(3):
        ours = gradient(retrograd.compiled_autograd("eager", strict=False))
        assert torch.equal(ours, gradient(torch.enable_grad()))
