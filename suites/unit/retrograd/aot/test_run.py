"""Compiled functions under autograd: hooks, unused outputs, later and second backwards, version counters.

What eager does stands here as literal lists, or is asked of eager in the same test.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck

import retrograd
from retrograd import aot
from unit.retrograd.aot.against_eager import Fn, agree, leaf, plain, tensor

BOTH = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def call_of(fn: Fn, compiled: bool, **options: Any) -> Fn:
    """The function itself, or compiled: what holds for one must hold for the other."""
    return aot.function(fn, **{"backend": "eager", "strict": True, **options}) if compiled else fn


def chain(depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(4, 4), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# Order in which gradients become visible


@BOTH
def test_post_accumulate_hooks_of_a_chain(compiled: bool) -> None:
    model, events = chain(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    run = aot.module(model, backend="eager", strict=True) if compiled else model
    run(tensor(2, 4)).sum().backward()
    assert events == ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]


@BOTH
def test_gradients_become_visible_one_by_one(compiled: bool) -> None:
    model, seen = chain(), []
    parameters = dict(model.named_parameters())

    def hook(_: Tensor) -> None:
        seen.append([name for name, p in parameters.items() if p.grad is not None])

    for parameter in parameters.values():
        parameter.register_post_accumulate_grad_hook(hook)
    run = aot.module(model, backend="eager", strict=True) if compiled else model
    run(tensor(2, 4)).sum().backward()
    assert [len(names) for names in seen] == [1, 2, 3, 4, 5, 6]


def two_branches(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    left = a * 2
    right = (b * 3).sin()
    return (left.exp() * c + right).sum()


@BOTH
def test_hooks_of_leaves_in_two_branches(compiled: bool) -> None:
    events: list[str] = []
    inputs = [leaf(3, seed=seed) for seed in range(3)]
    for name, value in zip("abc", inputs, strict=True):
        value.register_hook(lambda _, name=name: events.append(f"tensor {name}"))
        value.register_post_accumulate_grad_hook(lambda _, name=name: events.append(f"acc {name}"))
    call_of(two_branches, compiled)(*inputs).backward()
    assert events == ["tensor c", "acc c", "tensor b", "acc b", "tensor a", "acc a"]


@BOTH
def test_a_leaf_that_is_used_early_and_late_is_complete_last(compiled: bool) -> None:
    events: list[str] = []
    x, w = leaf(3), leaf(3, seed=5)
    for name, value in (("x", x), ("w", w)):
        value.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    call_of(lambda x, w: ((x * w).sin() * w).sum(), compiled)(x, w).backward()
    assert events == ["w", "x"] or events == ["x", "w"]
    eager: list[str] = []
    u, v = leaf(3), leaf(3, seed=5)
    for name, value in (("x", u), ("w", v)):
        value.register_post_accumulate_grad_hook(lambda _, name=name: eager.append(name))
    ((u * v).sin() * v).sum().backward()
    assert events == eager


@BOTH
def test_hooks_before_and_after_the_compiled_part(compiled: bool) -> None:
    events: list[str] = []
    x = leaf(3)
    h = x * 2
    h.register_hook(lambda _: events.append("in"))
    y = call_of(lambda h: h.sin() + h, compiled)(h)
    y.register_hook(lambda _: events.append("out"))
    (y * 2).sum().backward()
    assert events == ["out", "in"]


@BOTH
def test_a_hook_may_change_the_gradient(compiled: bool) -> None:
    x = leaf(3)
    x.register_hook(lambda gradient: gradient * 10)
    call_of(lambda x: x * 2, compiled)(x).sum().backward()
    assert x.grad.tolist() == [20.0, 20.0, 20.0]


@BOTH
def test_hooks_of_a_tensor_that_is_input_of_two_calls(compiled: bool) -> None:
    run = call_of(lambda x, w: (x * w).tanh(), compiled)
    x, w, events = tensor(3), leaf(3, seed=4), []
    w.register_hook(lambda gradient: events.append(gradient.tolist()))
    run(run(x, w), w).sum().backward()
    assert events == [w.grad.tolist()]


def test_parts_of_a_gradient_are_added_in_eagers_order_over_two_outputs() -> None:
    """Eager adds to one sum whatever comes from either output."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * x + x.exp(), x.cos() * x + x.tanh()

    agree(fn, plain(leaf(100)))


# Intermediates that are returned


def with_intermediate(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h, h.sin() * h


@BOTH
def test_hook_on_a_returned_intermediate_sees_its_whole_gradient(compiled: bool) -> None:
    x, seen = leaf(2), []
    h, y = call_of(with_intermediate, compiled)(x)
    h.register_hook(lambda gradient: seen.append(gradient.clone()))
    (y.sum() + h.sum()).backward()
    expected = h.detach().cos() * h.detach() + h.detach().sin() + 1
    torch.testing.assert_close(seen, [expected])
    torch.testing.assert_close(x.grad, expected * 2)


@BOTH
def test_retain_grad_of_a_returned_intermediate(compiled: bool) -> None:
    x = leaf(2)
    h, y = call_of(with_intermediate, compiled)(x)
    h.retain_grad()
    y.sum().backward()
    torch.testing.assert_close(h.grad, h.detach().cos() * h.detach() + h.detach().sin())


@BOTH
def test_gradient_with_respect_to_a_returned_intermediate(compiled: bool) -> None:
    x = leaf(2)
    h, y = call_of(with_intermediate, compiled)(x)
    (gradient,) = grad(y.sum(), h)
    torch.testing.assert_close(gradient, h.detach().cos() * h.detach() + h.detach().sin())
    assert x.grad is None


@BOTH
def test_a_hook_may_replace_the_gradient_of_an_intermediate(compiled: bool) -> None:
    x = leaf(2)
    h, y = call_of(with_intermediate, compiled)(x)
    h.register_hook(torch.ones_like)
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


# Outputs that a loss does not use


def apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), y.exp()


@BOTH
def test_unused_outputs_leave_none(compiled: bool) -> None:
    x, y = leaf(2), leaf(2)
    events: list[str] = []
    y.register_hook(lambda _: events.append("y"))
    first, _ = call_of(apart, compiled)(x, y)
    first.sum().backward()
    assert x.grad is not None
    assert (y.grad, events) == (None, [])


@BOTH
def test_unused_parameters_of_a_module_stay_without_gradient(compiled: bool) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    model = Experts()
    run = aot.module(model, backend="eager", strict=True) if compiled else model
    run(tensor(1, 2))[1].sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "second.weight",
        "second.bias",
    ]


@BOTH
def test_unused_inputs_are_refused_and_allowed(compiled: bool) -> None:
    x, y = leaf(2), leaf(2)
    first, _ = call_of(apart, compiled)(x, y)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        grad(first.sum(), (x, y), retain_graph=True)
    gradients = grad(first.sum(), (x, y), allow_unused=True)
    assert gradients[1] is None
    torch.testing.assert_close(gradients[0], x.detach().cos())


@BOTH
def test_outputs_that_share_hidden_nodes_are_differentiated_one_by_one(compiled: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = -x  # saves nothing, nor do those after it
        return h + 1, h - 1

    x = leaf(2)
    first, second = call_of(fn, compiled)(x)
    first.sum().backward()
    second.sum().backward()
    assert x.grad.tolist() == [-2.0, -2.0]


@BOTH
def test_independent_outputs_are_differentiated_one_after_the_other(compiled: bool) -> None:
    x, y = leaf(2), leaf(2)
    first, second = call_of(apart, compiled)(x, y)
    first.sum().backward()
    second.sum().backward()
    torch.testing.assert_close([x.grad, y.grad], [x.detach().cos(), y.detach().exp()])


# Backwards that come again


@BOTH
def test_a_second_backward_is_refused_in_eagers_words(compiled: bool) -> None:
    loss = call_of(lambda x: x.sin().sum(), compiled)(leaf(2))
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


@BOTH
def test_retain_graph(compiled: bool) -> None:
    x = leaf(2)
    loss = call_of(lambda x: x.sin().sum(), compiled)(x)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


@BOTH
def test_retain_graph_after_ordinary_steps(compiled: bool) -> None:
    run = call_of(lambda x: (x * x).sin().sum(), compiled)
    for _ in range(2):
        run(leaf(2)).backward()
    x = leaf(2)
    loss = run(x)
    first = grad(loss, x, retain_graph=True)
    second = grad(loss, x)
    assert torch.equal(first[0], second[0])


def cubes(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).pow(3).sum()


@pytest.mark.parametrize("policy", ["min_cut", "save_all", "recompute_all"])
def test_three_orders(policy: str) -> None:
    def derivatives(call: Fn) -> list[Tensor]:
        x, w = leaf(3, 3, dtype=torch.float64), leaf(3, 3, seed=4, dtype=torch.float64)
        value, found = call(x, w), []
        for order in range(3):
            grads = grad(value, (x, w), create_graph=order < 2)
            value = sum((g * g).sum() for g in grads)
            found += grads
        return [value.detach() for value in found]

    expected = derivatives(cubes)
    found = derivatives(call_of(cubes, True, partitioner=policy))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences() -> None:
    run = call_of(lambda x, w: (x @ w).tanh().sum(0), True)
    inputs = leaf(2, 3, dtype=torch.float64), leaf(3, 2, dtype=torch.float64)
    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs)


def test_gradient_penalty() -> None:
    def step(model: nn.Module, call: Fn) -> list[Tensor]:
        x = leaf(5, 4)
        (gradient,) = grad(call(x).sum(), x, create_graph=True)
        loss = call(x).mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found  # type: ignore[return-value]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    expected = step(model, model)
    torch.testing.assert_close(step(model, aot.module(model, backend="eager", strict=True)), expected)


def test_hessian_vector_product() -> None:
    def product(call: Fn) -> Tensor:
        x = leaf(4, dtype=torch.float64)
        (gradient,) = grad(call(x), x, create_graph=True)
        return grad(gradient @ torch.arange(4.0, dtype=torch.float64), x)[0]

    fn: Fn = lambda x: (x.sin() * x.exp()).sum()  # noqa: E731
    torch.testing.assert_close(product(call_of(fn, True)), product(fn))


def test_second_derivative_through_dropout_has_the_same_mask() -> None:
    def penalty(call: Fn) -> list[Tensor]:
        torch.manual_seed(3)
        x = leaf(20)
        (gradient,) = grad(call(x), x, create_graph=True)
        (gradient * gradient).sum().backward()
        return [gradient.detach(), x.grad]  # type: ignore[list-item]

    fn: Fn = lambda x: nn.functional.dropout(x * x, 0.5).pow(2).sum()  # noqa: E731
    assert all(map(torch.equal, penalty(call_of(fn, True)), penalty(fn)))


# Version counters


def change(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


#: function, and for its input and output whether a change before the backward must raise
SAVES: dict[str, tuple[Fn, bool, bool]] = {
    "sin saves its input": (lambda x: x.sin(), True, False),
    "exp saves its output": (lambda x: x.exp(), False, True),
    "add saves nothing": (lambda x: x + 1, False, False),
    "mul by a number saves nothing": (lambda x: x * 2, False, False),
    "sin of exp saves neither": (lambda x: x.exp().sin(), False, False),
    "relu saves its output": (lambda x: x.relu(), False, True),
    "tanh of sin saves both": (lambda x: x.sin().tanh(), True, True),
    "a copy may be changed": (lambda x: x.clone().t() * 2, False, False),
    "square saves its input": (lambda x: x * x, True, False),
    "sigmoid of a square": (lambda x: (x * x).sigmoid(), True, True),
}


#: they read nothing that belongs to the user, however the gradient is computed
SAVES_NOTHING = ("add saves nothing", "mul by a number saves nothing", "a copy may be changed")


@BOTH
@pytest.mark.parametrize("policy", ["min_cut", "save_all", "recompute_all"])
@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize("name", SAVES)
def test_changes_before_the_backward(name: str, which: str, policy: str, compiled: bool) -> None:
    fn, raises_for_input, raises_for_output = SAVES[name]
    x = leaf(2, 2)
    y = call_of(fn, compiled, partitioner=policy)(x)
    expected = grad(y.sum(), x, retain_graph=True)[0]
    change(x if which == "input" else y)
    must_raise = raises_for_input if which == "input" else raises_for_output
    if compiled and policy == "recompute_all" and which == "input":  # reads inputs where eager reads outputs
        must_raise = must_raise or name not in SAVES_NOTHING
    if must_raise:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert torch.equal(x.grad, expected)


@BOTH
def test_a_buffer_that_is_changed_after_the_call(compiled: bool) -> None:
    scale, x = tensor(2), leaf(2)
    y = call_of(lambda x, scale: x * scale, compiled)(x, scale)
    change(scale)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@BOTH
def test_a_buffer_that_the_function_itself_changes_last(compiled: bool) -> None:
    def fn(x: Tensor, count: Tensor) -> Tensor:
        y = x + count
        count.add_(1)
        return y

    x, count = leaf(2), torch.zeros(2)
    fn_ = call_of(fn, compiled)
    (fn_(x, count) + fn_(x, count)).sum().backward()
    assert (x.grad.tolist(), count.tolist()) == ([2.0, 2.0], [2.0, 2.0])


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
@BOTH
def test_a_buffer_changed_after_it_was_saved_raises(compiled: bool) -> None:
    def fn(x: Tensor, count: Tensor) -> Tensor:
        y = x * count
        count.add_(1)
        return y

    x = leaf(2)
    y = call_of(fn, compiled, strict=False)(x, torch.ones(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@BOTH
def test_running_statistics_of_two_calls_before_one_backward(compiled: bool) -> None:
    model = nn.BatchNorm1d(3)
    run = aot.module(model, backend="eager", strict=True) if compiled else model
    x = leaf(4, 3)
    (run(x).sum() + run(x * 2).pow(2).sum()).backward()
    assert x.grad is not None
    assert int(model.num_batches_tracked) == 2


# Memory, modes, cotangents


@BOTH
def test_saved_tensors_are_given_up_with_the_backward(compiled: bool) -> None:
    x = leaf(1000)
    y = x * 1
    saved = weakref.ref(y)
    out = call_of(lambda y: y.sin(), compiled)(y)
    del y
    out.sum().backward()
    gc.collect()
    assert saved() is None


@BOTH
def test_without_grad_nothing_is_recorded(compiled: bool) -> None:
    run = call_of(lambda x: (x.sin(), x.cos()), compiled)
    x = leaf(2)
    with torch.no_grad():
        assert [y.requires_grad for y in run(x)] == [False, False]
    assert [y.requires_grad for y in run(x)] == [True, True]
    with torch.inference_mode():
        assert [y.is_inference() for y in run(x)] == [True, True]


@BOTH
@pytest.mark.parametrize(
    "cotangent",
    [
        pytest.param(lambda y: torch.ones(y.shape[::-1]).t(), id="transposed"),
        pytest.param(lambda y: torch.ones(1).expand(y.shape), id="expanded"),
        pytest.param(lambda y: torch.ones(2 * y.shape[0], y.shape[1])[::2], id="strided"),
    ],
)
def test_cotangents_of_any_layout(cotangent: Callable[[Tensor], Tensor], compiled: bool) -> None:
    x = leaf(2, 3)
    y = call_of(lambda x: x.sin(), compiled)(x)
    y.backward(cotangent(y))
    torch.testing.assert_close(x.grad, x.detach().cos())


@BOTH
def test_the_layout_of_a_gradient(compiled: bool) -> None:
    x = torch.ones(3, 2).t().requires_grad_()
    call_of(lambda x: x * 2, compiled)(x).backward(torch.ones(2, 3))
    assert x.grad.stride() == x.stride()


def test_autocast_in_and_around() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x @ w
        return (y @ w).float().tanh()

    def around(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(x, w)

    def eager(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(x, w)

    compiled = call_of(fn, True)
    results = []
    for call in (eager, around):
        x, w = leaf(3, 3), leaf(3, 3, seed=4)
        call(x, w).sum().backward()
        results.append([x.grad, w.grad])
    assert all(map(torch.equal, *results))


def test_training_steps_agree() -> None:
    def train(wrap: Callable[[nn.Module], nn.Module]) -> list[list[float]]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1))
        call = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            call(torch.randn(6, 4)).pow(2).mean().backward()
            optimizer.step()
        return [value.flatten().tolist() for value in model.state_dict().values()]

    assert train(lambda m: aot.module(m, backend="eager", strict=True)) == train(lambda m: m)


# Functions written by hand


class Scaled(torch.autograd.Function):
    """2 * x, whose backward says what it was given."""

    seen: Sequence[str] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None:
            return None if second is None else second * 300
        return first * 200


@pytest.fixture
def both_outputs() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x = leaf(2)
    return x, call_of(lambda x: Scaled.apply(x), True)(x)


def test_undefined_gradients_reach_a_function_that_wants_them(
    both_outputs: tuple[Tensor, tuple[Tensor, Tensor]],
) -> None:
    x, (_, second) = both_outputs
    second.sum().backward()
    assert x.grad.tolist() == [300.0, 300.0]


class Counting(torch.autograd.Function):
    """Non-differentiable second output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * 2, signs

    @staticmethod
    def backward(ctx: Any, first: Tensor, _: Tensor) -> Tensor:
        return first * 2


def test_non_differentiable_outputs() -> None:
    agree(lambda x: Counting.apply(x), plain(leaf(3)))


def step_with_many_uses(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    first = torch.tanh(x @ w)
    second = torch.tanh((x + 0.3 * first) @ w)
    third = torch.tanh((x + 0.7 * second) @ w + w.sum(0))
    return x + (first + 3 * (second + third)) * 0.1, first


@pytest.mark.parametrize("uses_inner", [False, True], ids=["", "inner output used"])
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "inner weight"])
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("between", [False, True], ids=["", "used outside"])
def test_sums_over_several_calls_are_made_in_eagers_order(uses_inner, is_leaf, hooked, between) -> None:
    def train(step: Any) -> list[Tensor]:
        torch.manual_seed(3)
        leaf, x, seen = torch.randn(8, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True), []
        w = leaf if is_leaf else leaf * 0.9
        if hooked:
            w.register_hook(lambda grad: seen.append(grad.clone()))
        y = x * 1.0
        for number in range(3):
            y, inner = step(w, y)
            if uses_inner and number == 1:
                y = y + inner
            if between:
                y = y + torch.sin(y @ w)
        (y**2).mean().backward()
        return [leaf.grad, x.grad, *seen]

    compiled = aot.function(step_with_many_uses, backend="eager")
    for ours, eagers in zip(train(compiled), train(step_with_many_uses), strict=True):
        assert torch.equal(ours, eagers)


def scaled_in_place(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(b)
    return a.sin()


def scaled_overlapping(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return a.sin() * b


def second_derivative(out: Tensor, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


def under_autocast(out: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.autograd.grad(out.sum(), x)[0]


def rows(out: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(out, x, tensor(2, *out.shape), is_grads_batched=True)[0]


GIVEN = {
    "with a history": (scaled_in_place, lambda x: (x * 1, tensor(3, 3, seed=5))),
    "a buffer": (lambda a, b: scaled_in_place(b, a), lambda x: (x * 1, tensor(3, 3, seed=5))),
    "parts that overlap": (scaled_overlapping, lambda x: ((whole := x * 1)[:2], whole[1:])),
}


@pytest.mark.parametrize("use", [second_derivative, under_autocast, rows])
@pytest.mark.parametrize("name", GIVEN)
def test_a_call_that_changed_inputs_is_run_again_where_eager_must(name: str, use: Any) -> None:
    fn, make = GIVEN[name]
    results = []
    for call in (fn, aot.function(fn, backend="eager")):
        x = leaf(3, 3)
        results.append(use(call(*make(x)), x))
    assert torch.equal(*results)


@pytest.mark.parametrize("use", [second_derivative, under_autocast])
def test_a_normalisation_is_run_again_and_counts_once(use: Any) -> None:
    """Its statistics have changed since; no gradient is made of them, so no copy of them was kept."""
    results = []
    for compiled in (False, True):
        norm = nn.BatchNorm1d(3)
        call = aot.module(norm, backend="aten") if compiled else norm
        x = leaf(4, 3)
        out = call(x).sin()
        with torch.no_grad():
            call(x * 2)
        results.append([use(out, x), norm.running_mean, norm.running_var, norm.num_batches_tracked])
    torch.testing.assert_close(results[1], results[0])


class ExpKeepingItsInput(torch.autograd.Function):
    """Its context has an attribute, of which the backward computes what the forward has computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * ctx.kept.exp()


def test_a_result_whose_region_holds_it_is_freed() -> None:
    """What eager keeps as an attribute is kept after a backward; a result that held itself would stay."""
    x = torch.randn(3, requires_grad=True)
    out = aot.function(ExpKeepingItsInput.apply, backend="eager", strict=True)(x)
    gradients = [torch.autograd.grad(out.sum(), x)[0] for _ in range(2)]
    torch.testing.assert_close(gradients, [x.exp().detach()] * 2)
    result = weakref.ref(out)
    del out
    assert result() is None


def test_a_view_of_a_result_that_lies_otherwise_than_predicted_shows_its_elements() -> None:
    """torch's fake kernel says that the logarithm of a sigmoid lies as its input does; it is contiguous."""
    x = torch.randn(2, 3).t()

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = nn.functional.logsigmoid(x)
        return result, result.detach()

    call = aot.function(run, backend="eager")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        found = [call(x) for _ in range(2)]
    for one in found:
        torch.testing.assert_close(one, run(x), rtol=0, atol=0, check_stride=True)


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
def test_changed_views_of_memory_with_gaps_are_left_to_eager() -> None:
    def changes(x: Tensor, part: Tensor) -> Tensor:
        part.mul_(2)
        return (x * x).sum() + (x * part.sum()).exp().sum()

    results = []
    for fn in (changes, aot.function(changes, backend="eager")):
        x = tensor(4).requires_grad_()
        memory = torch.empty_strided((4,), (2,)).copy_(x / 9)
        out = fn(memory, memory[:2])
        results.append([out, *torch.autograd.grad(out, x)])
    assert all(map(torch.equal, *results))
    assert any(reason.code == "not-representable" for reason in retrograd.explain().fallbacks)
