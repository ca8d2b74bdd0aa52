"""Backwards for which a call is run again, and when there are so many that the function is left to eager.

What eager computes is asked of eager in the same test, to the bit; counters say which way was taken.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import retrograd
from retrograd import aot
from retrograd.aot.run import region
from retrograd.aot.run.call import FEWEST_RERUNS
from retrograd.aot.run.region import MOST_LAYOUTS
from retrograd.config import PARTITIONERS
from retrograd.runtime import pytree
from retrograd.runtime.modes import ThreadModes
from unit.retrograd.aot.against_eager import Fn, leaf, tensor

quiet = pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def compiled(fn: Fn, **options: object) -> Fn:
    return aot.function(fn, **{"backend": "eager", **options})


def reruns() -> int:
    return retrograd.counters["aot_eager_regions"]


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def products(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() @ w).float()


def gradients(call: Fn, around: torch.dtype | None, behind: torch.dtype | None) -> list[Tensor]:
    x, w = leaf(4, 4), leaf(4, 4, seed=5)
    with autocast(around):
        out = call(x, w)
    with autocast(behind):
        return list(torch.autograd.grad(out, [x, w], tensor(4, 4, seed=7)))


# autocast


@pytest.mark.parametrize("around", [None, BFLOAT16])
def test_a_backward_under_autocast_has_code_of_its_own(around: torch.dtype | None) -> None:
    call = compiled(products, strict=True)
    found = {}
    for behind in (None, BFLOAT16, FLOAT16, BFLOAT16, None):
        found[behind] = gradients(call, around, behind)
        assert all(map(torch.equal, found[behind], gradients(products, around, behind)))
    assert reruns() == 0
    assert retrograd.counters["aot_captures"] == 1
    if around is None:
        assert not torch.equal(found[None][0], found[BFLOAT16][0])


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_step_inside_autocast(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
    run, x = aot.module(model, backend=backend, strict=True), tensor(3, 4)
    results = []
    for call in (model, run):
        model.zero_grad()
        with torch.autocast("cpu", BFLOAT16):
            call(x).float().square().mean().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-3)
    assert reruns() == 0


def test_code_runs_without_the_autocast_whose_casts_it_holds() -> None:
    """Eager's float32 product inside stays one, though it runs under autocast in the backward of the step."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)  # type: ignore[attr-defined]
            return x @ x

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            with torch.autocast("cpu", enabled=False):
                return grad @ x.t() + x.t() @ grad

    results = []
    for call in (Doubled.apply, compiled(lambda x: Doubled.apply(x))):
        x = leaf(4, 4)
        out = call(x)
        with torch.autocast("cpu", BFLOAT16):
            results.append(torch.autograd.grad(out, x, tensor(4, 4, seed=7))[0])
    assert torch.equal(*results)


@quiet
def test_more_kinds_of_backward_than_code_is_made_for_are_run_again() -> None:
    call = compiled(products)
    base = tensor(4, 4, seed=7)
    layouts = [base, base.t(), base[:, :1].expand(4, 4)]
    for cotangent in layouts:
        for behind in (None, BFLOAT16):
            results = []
            for fn in (products, call):
                x, w = leaf(4, 4), leaf(4, 4, seed=5)
                out = fn(x, w)
                with autocast(behind):
                    results.append(torch.autograd.grad(out, [x, w], cotangent))
            assert all(map(torch.equal, *results))
    assert reruns() == 2 * len(layouts) - MOST_LAYOUTS


class WeighsBySums(torch.autograd.Function):
    """Its backward clones what it saved, and so do formulas for a cotangent that is laid out otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * 2 + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        if grad.stride() == (1, grad.shape[0]):
            weight = weight + 1
        return weight.sum(0).clone() * grad * x, None


@quiet
@pytest.mark.parametrize("looks_at_strides", [False, True])
@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_what_the_backward_makes_of_the_forward_alone_has_another_name_for_another_cotangent(
    looks_at_strides: bool, partitioner: str
) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        out = WeighsBySums.apply(x @ w, (x @ w.t()).detach())
        return out if looks_at_strides else out.view(-1).view(4, 4)  # type: ignore[no-any-return]

    call, base = compiled(fn, partitioner=partitioner), tensor(4, 4, seed=7)
    for cotangent in (base, base.t(), base):
        x, w = leaf(4, 4), leaf(4, 4, seed=5)
        found, expected = (torch.autograd.grad(f(x, w), [x, w], cotangent) for f in (call, fn))
        assert all(map(torch.equal, found, expected))
    assert reruns() == int(looks_at_strides and partitioner == "min_cut")


# one kind after the other

ODD: dict[str, Callable[[Tensor], Tensor | None]] = {
    "undefined": lambda grad: None,
    "transposed": lambda grad: grad.t().contiguous().t(),
    "expanded": lambda grad: grad[:, :1].expand(4, 4),
    "differentiable": lambda grad: grad.clone().requires_grad_(),
    "a parameter": lambda grad: nn.Parameter(grad),
    "negated lazily": lambda grad: torch._neg_view(grad),
    "without elements of its own": lambda grad: torch._efficientzerotensor((4, 4)),
}


def pair(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (x @ w).tanh()
    return hidden, (hidden * w).sin()


@quiet
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", [0, 1])
def test_code_that_has_run_takes_no_other_kind_of_cotangent(kind: str, place: int) -> None:
    call, usual = compiled(pair), [tensor(4, 4, seed=7), tensor(4, 4, seed=8)]
    odd: list[Tensor | None] = [*usual]
    odd[place] = ODD[kind](usual[place])
    for given in (usual, usual, odd, usual, odd):
        results = []
        for fn in (pair, call):
            x, w = leaf(4, 4), leaf(4, 4, seed=5)
            defined = [(out, grad) for out, grad in zip(fn(x, w), given, strict=True) if grad is not None]
            torch.autograd.backward(*map(list, zip(*defined, strict=True)))
            results.append([x.grad, w.grad])
        assert all(map(torch.equal, *results))


@quiet
def test_layouts_in_turn_have_a_guard_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], region.InputGuard
    monkeypatch.setattr(region, "InputGuard", lambda *given: made.append(make(*given)) or made[-1])
    call, base = compiled(products), tensor(4, 4, seed=7)
    for number in range(12):
        cotangent = base.t() if number % 2 else base
        results = []
        for fn in (products, call):
            x, w = leaf(4, 4), leaf(4, 4, seed=5)
            results.append(torch.autograd.grad(fn(x, w), [x, w], cotangent))
        assert all(map(torch.equal, *results))
    assert len(made) == 2


@quiet
def test_code_that_has_run_leaves_differentiated_and_watched_backwards_to_eager() -> None:
    call, grad = compiled(curved), torch.ones(3)
    for around in (nullcontext, nullcontext, torch.autograd.detect_anomaly, nullcontext):
        for create_graph in (False, True):
            x, y = leaf(3), leaf(3)
            with around():
                first = torch.autograd.grad(curved(x), x, grad, create_graph=create_graph)[0]
                second = torch.autograd.grad(call(y), y, grad, create_graph=create_graph)[0]
            assert torch.equal(first, second)
            assert first.requires_grad == second.requires_grad == create_graph


# left to eager


def twice(call: Callable[[Tensor], Tensor]) -> Tensor:
    x = leaf(3)
    (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def once(call: Callable[[Tensor], Tensor]) -> Tensor:
    x = leaf(3)
    return torch.autograd.grad(call(x).sum(), x)[0]


def curved(x: Tensor) -> Tensor:
    return x.sin() * x


def codes() -> set[str]:
    return {reason.code for reason in retrograd.explain().fallbacks}


@quiet
def test_a_function_that_is_differentiated_twice_is_left_to_eager() -> None:
    call = compiled(curved)
    for number in range(FEWEST_RERUNS + 4):
        assert torch.equal(twice(call), twice(curved))
        assert reruns() == min(number + 1, FEWEST_RERUNS)
    assert codes() == {"backwards-rerun"}
    assert torch.equal(once(call), once(curved))
    assert reruns() == FEWEST_RERUNS


@quiet
def test_under_dynamo_too() -> None:
    call = torch.compile(curved, backend="retrograd", options={"backend": "eager"})
    for _ in range(FEWEST_RERUNS + 4):
        assert torch.equal(twice(call), twice(curved))
    assert (reruns(), codes()) == (FEWEST_RERUNS, {"backwards-rerun"})


def test_one_that_is_differentiated_twice_now_and_then_is_not() -> None:
    call = compiled(curved)
    for _ in range(FEWEST_RERUNS + 4):
        assert torch.equal(twice(call), twice(curved))
        for _ in range(2):
            assert torch.equal(once(call), once(curved))
    assert (reruns(), codes()) == (FEWEST_RERUNS + 4, set())


def test_a_strict_one_never_is() -> None:
    call = compiled(curved, strict=True)
    for _ in range(FEWEST_RERUNS + 4):
        assert torch.equal(twice(call), twice(curved))
    assert (reruns(), codes()) == (FEWEST_RERUNS + 4, set())


@quiet
def test_other_kinds_of_call_keep_their_code() -> None:
    call = compiled(curved)
    for _ in range(FEWEST_RERUNS + 1):
        twice(call)
    captured = retrograd.counters["aot_captures"]
    x = leaf(5)
    for _ in range(2):
        assert torch.equal(
            torch.autograd.grad(call(x).sum(), x)[0], torch.autograd.grad(curved(x).sum(), x)[0]
        )
    assert retrograd.counters["aot_captures"] == captured + 1


# a default dtype and a default device of the call


def in_double(call: Fn, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return call(x)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["eager", "aten", "inductor"])
def test_a_call_is_made_again_under_its_own_default_dtype(backend: str) -> None:
    def made(x: Tensor) -> Tensor:
        return (x * torch.full((4,), 0.5)).exp() * torch.arange(4).div(3)

    call, x = compiled(made, backend=backend), leaf(4)
    for create_graph in (False, True):  # an expanded cotangent, and a backward that eager runs
        got, want = (
            torch.autograd.grad(in_double(fn, x).sum(), x, create_graph=create_graph)[0]
            for fn in (call, made)
        )
        torch.testing.assert_close(got, want)
    assert torch.get_default_dtype() is torch.float32


def test_a_call_is_made_again_on_its_own_default_device() -> None:
    x = torch.ones(4, device="meta", requires_grad=True)
    with torch.device("meta"):
        out = compiled(lambda x: x.exp() * torch.ones(4))(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert grad.device.type == "meta"


def test_default_dtypes_of_two_threads_are_put_back() -> None:
    modes = ThreadModes.now()._replace(dtype=torch.float64)
    seen, together = [], threading.Barrier(4)

    def restore() -> None:
        together.wait()
        for _ in range(50):
            with modes.restored():
                seen.append(torch.get_default_dtype())

    threads = [threading.Thread(target=restore) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 200
    assert torch.get_default_dtype() is torch.float32


def test_layers_that_a_trace_takes_apart_are_run_again_so() -> None:
    """With symbolic sizes torch traces an LSTM step by step; run on real tensors, it is one node."""
    layer = nn.LSTM(3, 4)
    call = aot.module(copy.deepcopy(layer), backend="aten", dynamic=True, strict=True)
    for length in (5, 6):
        x = leaf(length, 2, 3)
        for create_graph in (False, True):
            got, want = (
                torch.autograd.grad(
                    [out.sum() for out in pytree.tree_leaves(fn(x))], x, create_graph=create_graph
                )[0]
                for fn in (call, layer)
            )
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("budget", [1.0, 0.1])
def test_what_eager_saves_unread_is_watched_though_a_copy_of_it_is_saved(budget: float) -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scaled = torch.linalg.vector_norm(x, 0) * x  # eager saves x for a norm that has no gradient
        part = 0.5 / (scaled.abs() + 1)
        return torch.addcdiv(part, scaled, y.abs() + 0.5).lgamma(), part

    x, y = leaf(4, 2), leaf(4, 2)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        outputs = compiled(run)(x, y)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (outputs[0].sum() + outputs[1].sum()).backward()


def test_what_saves_nothing_is_run_again_after_a_backward_as_in_eager() -> None:
    def linear(x: Tensor) -> Tensor:
        return (x + 1).neg()

    for fn in (linear, compiled(linear, strict=True)):
        x = leaf(3)
        out = fn(x)
        first = torch.autograd.grad(out.sum(), x)[0]
        again = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        assert torch.equal(first, again)


# second derivatives, added to the first at each node


def penalty(call: Fn, sizes: tuple[int, int], wrt: int, retain: int = 1) -> list[Tensor]:
    x, w = leaf(4, sizes[1]), leaf(*sizes, seed=5)
    value = call(x, w)
    grads = torch.autograd.grad(value.sum(), [x, w][:wrt], create_graph=True)
    loss = value.square().sum() + torch.stack([grad.square().sum() for grad in grads]).sum()
    for i in range(retain):
        loss.backward(retain_graph=i + 1 < retain)
    assert x.grad is not None
    assert w.grad is not None
    return [x.grad, w.grad]


@pytest.mark.parametrize("wrt", [1, 2])
@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (1, 1), (3, 4)])
def test_both_derivatives_are_added_inside_the_function(sizes: tuple[int, int], wrt: int) -> None:
    def chain(x: Tensor, w: Tensor) -> Tensor:
        hidden = nn.functional.linear(x.sin(), w).tanh()
        return hidden @ (w.exp() * w.expand(2, *sizes).sum(0)) + 1

    for fn in (nn.functional.linear, chain):
        found, due = (penalty(call, sizes, wrt, retain=2) for call in (compiled(fn), fn))
        for one, other in zip(found, due, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def test_a_second_derivative_that_does_not_come_to_the_call_goes_down_by_itself() -> None:
    def alone(call: Fn) -> list[Tensor]:
        x, w = leaf(4, 4), leaf(4, 4, seed=5)
        grads = torch.autograd.grad(call(x, w).sum(), [x, w], create_graph=True)
        return list(torch.autograd.grad(grads[0].exp().sum(), [x, w])) + [grads[1]]

    def linear_twice(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.sin()).tanh() @ w.t()

    for one, other in zip(alone(compiled(linear_twice)), alone(linear_twice), strict=True):
        assert torch.equal(one, other)


def test_a_third_derivative_passes_through_the_second_one() -> None:
    def third(call: Fn) -> list[Tensor]:
        x, w = leaf(4, 4), leaf(4, 4, seed=5)
        value = call(x, w)
        for _ in range(2):
            grads = torch.autograd.grad(value.sum(), [x, w], create_graph=True)
            value = value.sum() + grads[0].square() + grads[1].square()
        return list(torch.autograd.grad(value.sum(), [x, w]))

    def cubic(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) * w.expand(2, 4, 4)).pow(3).sum(0) + x

    for one, other in zip(third(compiled(cubic)), third(cubic), strict=True):
        assert_close(one, other, rtol=1e-5, atol=0)  # three runs are added in another order


def _rows(function: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.autograd.grad(function(x), x, torch.eye(3), is_grads_batched=True)[0]


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_batched_cotangents_of_what_draws(backend: str) -> None:
    """vmap refuses to draw, so the function must not run again."""
    x = torch.rand(3, requires_grad=True)
    compiled = aot.function(torch.nn.functional.dropout, backend=backend)
    assert torch.equal(_rows(compiled, x), _rows(torch.nn.functional.dropout, x))


def test_batched_cotangents_of_a_loaded_graph(tmp_path: Path) -> None:
    """It has no function that could run again."""

    def function(x: Tensor) -> Tensor:
        return x.sin() * x

    x = torch.rand(3, requires_grad=True)
    aot.export(aot.capture(aot.create_state(function, [x])), tmp_path / "graph")
    loaded = aot.compile(aot.partition(aot.load(tmp_path / "graph")), forward="aten")
    assert torch.equal(_rows(loaded, x), _rows(function, x))


def test_unused_outputs_among_very_many_leave_gradients_undefined() -> None:
    """Eager leaves `None`; so many outputs are differentiated together, which would give zeros."""

    def leaves() -> list[torch.Tensor]:
        return [torch.full((2,), 1.0 + i, requires_grad=True) for i in range(70)]

    def sines(*weights: torch.Tensor) -> list[torch.Tensor]:
        return [weight.sin() for weight in weights]

    want, got = leaves(), leaves()
    for run, weights in ((sines, want), (aot.function(sines, backend="aten"), got)):
        outputs = run(*weights)
        (outputs[0] + outputs[69]).sum().backward()
    assert [w.grad is None for w in got] == [w.grad is None for w in want]
    for one, other in ((got[0], want[0]), (got[69], want[69])):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("create_graph", [False, True])
def test_running_again_inside_a_backward_warns_of_nothing(
    create_graph: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """Torch warns of `backward(create_graph=True)`, which nobody has called."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        x = torch.rand(3, requires_grad=True)
        (slope,) = torch.autograd.grad(
            aot.function(torch.sin, backend="eager")(x).sum(), x, create_graph=create_graph
        )
        assert slope.requires_grad is create_graph
    finally:
        torch.set_warn_always(before)
    assert not [str(one.message) for one in recwarn]
