"""Backwards that request some of the gradients: they compute these alone, and no product twice."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd import aot
from retrograd.aot.run import pruned
from retrograd.policy import MOST_PRUNED, MOST_UNREAD

WAYS: dict[str, Callable[[Any], Any]] = {
    "staged": lambda fn: aot.module(fn, backend="eager", strict=True),
    "compile": lambda fn: retrograd.compile(fn, backend="eager"),
    "backend": lambda fn: torch.compile(fn, backend="retrograd", options={"backend": "eager"}),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def products(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many products of matrices `run` computes, and what it returns."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        found = run()
    names = [event.name for event in profile.function_events]
    return names.count("aten::mm") + names.count("aten::addmm"), found


class Masks(TorchDispatchMode):
    """Records which results calls with a mask compute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[Any]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(argument.name == "output_mask" for argument in func._schema.arguments):
            self.seen.append(list(args[-1]))
        return func(*args, **(kwargs or {}))


class Stage(nn.Module):
    """Four layers, unless another number is given."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = linears(count)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def linears(count: int = 4, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]
    return nn.Sequential(*(module for pair in layers for module in pair))


def batch(rows: int = 3, width: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    """An input and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(rows, width, generator=generator) for _ in range(2))
    return x.requires_grad_(), g


def same(ours: Sequence[Tensor | None], eager: Sequence[Tensor | None]) -> None:
    assert len(ours) == len(eager)
    for one, other in zip(ours, eager, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (torch.equal(one, other) and one.stride() == other.stride())


def zero_bubble(model: Any, net: nn.Module, rows: int = 3, seed: int = 1) -> tuple[list[int], list[Any]]:
    """Products of the forward and of both halves, and the gradients, as a zero-bubble schedule makes them."""
    x, g = batch(rows, seed=seed)
    with torch.random.fork_rng():
        model(x)  # a trace computes products too
    forward, y = products(lambda: model(x))
    inputs, (_, groups) = products(lambda: stage_backward_input([y], [g], [x], net.parameters()))
    weights, _ = products(lambda: stage_backward_weight(net.parameters(), groups))
    return [forward, inputs, weights], [y.detach(), x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("way", WAYS)
def test_a_zero_bubble_stage_computes_each_product_once(way: str) -> None:
    net, eager = linears(), linears()
    model = WAYS[way](net)
    for seed in range(3):  # gradients accumulate, as over microbatches
        counts, found = zero_bubble(model, net, seed=seed)
        assert counts == [4, 4, 4]
        same(found, zero_bubble(eager, eager, seed=seed)[1])


def test_microbatches_in_flight_have_their_own_values() -> None:
    def run(model: Any, net: nn.Module) -> list[Any]:
        batches = [batch(seed=seed) for seed in range(3)]
        outs, groups = [model(x) for x, _ in batches], []
        for y, (x, g) in zip(outs, batches, strict=True):
            count, found = products(
                lambda y=y, x=x, g=g: stage_backward_input([y], [g], [x], net.parameters())
            )
            groups.append(found[1])
            assert count == 4
        for group in groups:
            count, _ = products(lambda group=group: stage_backward_weight(net.parameters(), group))
            assert count == 4
        return [x.grad for x, _ in batches] + [p.grad for p in net.parameters()]

    net, eager = linears(), linears()
    same(run(WAYS["compile"](net), net), run(eager, eager))


def test_the_cotangents_between_blocks_serve_both_halves() -> None:
    net, eager = nn.Sequential(Stage(2), Stage(2)), nn.Sequential(Stage(2), Stage(2))
    for block in net:
        block.compile(backend="retrograd", options={"backend": "eager"})
    assert "RegionNode" in net(batch()[0]).grad_fn.name()
    for seed in range(2):
        counts, found = zero_bubble(net, net, seed=seed)
        assert counts == [4, 4, 4]
        same(found, zero_bubble(eager, eager, seed=seed)[1])


def test_live_backwards_carry_values_too() -> None:
    net, eager = linears(), linears()
    model = WAYS["compile"](net)
    for seed in range(3):
        x, g = batch(seed=seed)
        y = model(x)
        with retrograd.compiled_autograd(backend="eager", strict=True):
            _, groups = stage_backward_input([y], [g], [x], net.parameters())
            stage_backward_weight(net.parameters(), groups)
        found = [y.detach(), x.grad, *(p.grad for p in net.parameters())]
        same(found, zero_bubble(eager, eager, seed=seed)[1])


REQUESTS: dict[str, Callable[[Tensor, Sequence[Tensor]], list[Tensor]]] = {
    "input": lambda x, p: [x],
    "weights": lambda x, p: [*p],
    "one weight": lambda x, p: [p[4]],
    "first and input": lambda x, p: [p[0], x],
    "biases": lambda x, p: [*p[1::2]],
    "all": lambda x, p: [x, *p],
}


@pytest.mark.parametrize("how", ["grad", "backward"])
@pytest.mark.parametrize("second", REQUESTS)
@pytest.mark.parametrize("first", REQUESTS)
def test_any_two_requests_are_eagers(first: str, second: str, how: str) -> None:
    def run(model: Any, net: nn.Module) -> list[Any]:
        x, g = batch()
        seen: list[Any] = []
        for parameter in net.parameters():
            parameter.grad = None
        y = model(x)
        for place, request in enumerate((first, second)):
            wanted = REQUESTS[request](x, list(net.parameters()))
            if how == "grad":
                seen += torch.autograd.grad(y, wanted, g, retain_graph=place == 0)
            else:
                y.backward(g, inputs=wanted, retain_graph=place == 0)
                seen += [None if v.grad is None else v.grad.clone() for v in (x, *net.parameters())]
        return seen

    net = linears()
    model = WAYS["staged"](net)
    for _ in range(2):
        same(run(model, net), run(net, net))


@pytest.mark.parametrize(
    ("request_", "count"), [("input", 4), ("weights", 7), ("one weight", 2), ("biases", 3), ("all", 8)]
)
def test_a_request_computes_what_eager_computes_for_it(request_: str, count: int) -> None:
    net = linears()
    for model in (net, WAYS["staged"](net)):
        x, g = batch()
        y = model(x)
        wanted = REQUESTS[request_](x, list(net.parameters()))
        assert products(lambda y=y, g=g, w=wanted: torch.autograd.grad(y, w, g))[0] == count


def halves(
    net: nn.Module, between: Callable[[Tensor, Tensor], Tensor], model: Any = None
) -> tuple[int, list[Tensor]]:
    """Products of the second half, and its gradients. `between` runs before it, and gives its cotangent."""
    x, g = batch()
    y = (net if model is None else model)(x)
    torch.autograd.grad(y, x, g, retain_graph=True)
    g = between(g, x)
    return products(lambda: torch.autograd.grad(y, [*net.parameters()], g))


def changed(g: Tensor, x: Tensor) -> Tensor:
    return g.mul_(2)


@pytest.mark.parametrize(
    "between", [lambda g, x: g.clone(), lambda g, x: g * 3, changed, lambda g, x: g.t().clone().t()]
)
def test_nothing_is_carried_to_other_cotangents(between: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = linears()
    model = WAYS["staged"](net)
    for _ in range(2):
        count, found = halves(net, between, model)
        assert count == 7
        same(found, halves(net, between)[1])


def test_a_changed_input_is_refused_as_in_eager() -> None:
    net = linears()

    def change(g: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return g

    for model in (net, WAYS["staged"](net)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            halves(net, change, model)


def test_a_released_graph_is_refused_as_in_eager() -> None:
    net = linears()
    for model in (net, WAYS["staged"](net)):
        x, g = batch()
        y = model(x)
        torch.autograd.grad(y, x, g)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, [*net.parameters()], g)


def test_gradients_may_be_changed_between_the_halves() -> None:
    """The input's gradient is what the bias behind it needs, summed."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(8, 8), nn.Parameter(torch.zeros(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.shift)

    torch.manual_seed(0)
    net = Shifted()
    found: list[list[Any]] = []
    for model in (net, WAYS["staged"](net)):
        x, g = batch()
        y = model(x)
        (dx,) = torch.autograd.grad(y, x, g, retain_graph=True)
        dx.zero_()
        count, grads = products(lambda y=y, g=g: torch.autograd.grad(y, [*net.parameters()], g))
        assert count == (2 if model is net else 1)
        found.append(list(grads))
    same(*found)


def test_hooks_of_accumulation_run_as_in_eager() -> None:
    def run(model: Any, net: nn.Module) -> tuple[list[str], list[Any]]:
        seen: list[str] = []
        handles = []
        for name, parameter in net.named_parameters():
            parameter.grad = None
            handles.append(parameter.register_hook(lambda grad, name=name: seen.append(f"hook {name}")))
            note = functools.partial(lambda name, p: seen.append(f"post {name} {p.grad.sum().item()}"), name)
            handles.append(parameter.register_post_accumulate_grad_hook(note))
        x, g = batch()
        y = model(x)
        y.backward(g, inputs=[x], retain_graph=True)
        seen.append("between")
        y.backward(g, inputs=[*net.parameters()])
        for handle in handles:
            handle.remove()
        return seen, [x.grad, *(p.grad.clone() for p in net.parameters())]

    net = linears()
    model = WAYS["staged"](net)
    for _ in range(2):
        ours, eager = run(model, net), run(net, net)
        assert ours[0] == eager[0]
        assert len(ours[0]) == 17
        same(ours[1], eager[1])


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = linears(2), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.trunk(x)
        return self.left(y), self.right(y).sin()


def test_several_outputs() -> None:
    net = TwoOutputs()
    seen: dict[Any, list[Any]] = {}
    for model in (net, WAYS["compile"](net)):
        for parameter in net.parameters():
            parameter.grad = None
        found: list[Any] = []
        for seed in range(2):
            x, g = batch(seed=seed)
            outs = [*model(x)]
            first, (_, groups) = products(
                lambda outs=outs, g=g, x=x: stage_backward_input(outs, [g, g.cos()], [x], net.parameters())
            )
            second, _ = products(lambda groups=groups: stage_backward_weight(net.parameters(), groups))
            assert (first, second) == (4, 4)
            found += [x.grad, *(p.grad.clone() for p in net.parameters())]
        seen[model] = found
    same(*seen.values())


class Convolutions(nn.Module):
    """Calls that compute several gradients at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def test_calls_with_a_mask_compute_in_each_half_what_eagers_do() -> None:
    net = Convolutions()
    seen: list[Any] = []
    for model in (net, WAYS["staged"](net)):
        x = torch.randn(2, 2, 7, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
        y = model(x)
        g = torch.ones_like(y)
        with Masks() as first:
            grads = [*torch.autograd.grad(y, x, g, retain_graph=True)]
        with Masks() as second:
            grads += torch.autograd.grad(y, [*net.parameters()], g)
        assert first.seen == [[True, False, False]] * 3
        if model is not net:  # eager computes the gradients of layers in between once more
            assert second.seen == [[False, True, True]] * 3
        seen.append(grads)
    same(*seen)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.net, x, use_reentrant=False)
        return out


def test_a_checkpoint_is_recomputed_once() -> None:
    net, found = Checkpointed(), list[Any]()
    for model in (net, WAYS["compile"](net)):
        for parameter in net.parameters():
            parameter.grad = None
        counts, grads = zero_bubble(model, net)
        found.append([*grads[:2], *(grad.clone() for grad in grads[2:])])
    assert counts == [2, 4, 2]
    same(*found)


def test_what_a_checkpoint_reads_may_change_between_the_halves() -> None:
    net = Checkpointed()
    start, found = net.net[0].weight.detach().clone(), list[Any]()

    def change(g: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.net[0].weight.mul_(2)
        return g

    for model in (net, WAYS["compile"](net)):
        with torch.no_grad():
            net.net[0].weight.copy_(start)
        found.append(halves(net, change, model)[1])
    same(*found)


def test_gradients_that_are_subclasses() -> None:
    w, v = (torch.randn(8, 8, requires_grad=True) for _ in range(2))

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, w).relu(), v)

    found: list[list[Tensor]] = []
    for called in (fn, aot.function(fn, backend="eager", strict=True)):
        x = TwoTensor(batch()[0].detach(), batch(seed=2)[0].detach()).requires_grad_()
        y = called(x, w, v)
        g = TwoTensor(batch()[1], batch(seed=2)[1])
        first, grads = products(lambda y=y, x=x, g=g: torch.autograd.grad(y, x, g, retain_graph=True))
        second, others = products(lambda y=y, g=g: torch.autograd.grad(y, (w, v), g))
        found.append([part for grad in (*grads, *others) for part in (grad.a, grad.b)])
    assert (first, second) == (4, 4)
    same(*found)


def test_dropout_has_one_mask_in_both_halves() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    found: list[Any] = []
    for model in (net, WAYS["compile"](net)):
        for parameter in net.parameters():
            parameter.grad = None
        torch.manual_seed(3)
        counts, grads = zero_bubble(model, net)
        assert counts == [2, 2, 2]
        found.append(grads)
    same(*found)


def test_sizes_that_change() -> None:
    net, eager = linears(), linears()
    model = torch.compile(net, backend="retrograd", options={"backend": "eager"}, dynamic=True)
    for rows in (3, 5, 9):
        counts, found = zero_bubble(model, net, rows)
        assert counts == [4, 4, 4]
        same(found, zero_bubble(eager, eager, rows)[1])


def test_a_backward_with_an_effect_is_not_pruned() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return torch.rand_like(x) * (grad @ w.t()), x.t() @ grad

    w = torch.randn(8, 8, requires_grad=True)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = Noisy.apply(x, w)
        return out

    found: list[list[Tensor]] = []
    for called in (fn, aot.function(fn, backend="eager", strict=True)):
        x, g = batch()
        y = called(x, w)
        torch.manual_seed(5)
        grads = [*torch.autograd.grad(y, w, g, retain_graph=True), *torch.autograd.grad(y, x, g)]
        found.append([*grads, torch.rand(1)])
    same(*found)


class IgnoresWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def test_a_request_for_an_undefined_gradient() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = IgnoresWeight.apply(x, w)
        return out

    compiled, w = aot.function(fn, backend="eager", strict=True), torch.ones(8, requires_grad=True)
    for called in (fn, compiled):
        x, g = batch()
        y = called(x, w)
        assert torch.autograd.grad(y, w, g, retain_graph=True, allow_unused=True) == (None,)
        assert torch.equal(torch.autograd.grad(y, x, g)[0], g * 2)


@pytest.mark.parametrize("release", ["cotangent", "graph"])
def test_carried_values_go_with_the_cotangent_or_the_graph(release: str) -> None:
    x, g = batch()
    y = WAYS["staged"](linears())(x)
    torch.autograd.grad(y, x, g, retain_graph=True)
    values = [weakref.ref(value) for value in y.grad_fn.carried.values[0]]
    assert len(values) == 4
    if release == "cotangent":
        del g
    else:
        torch.autograd.grad(y, x, g)
    assert [value() for value in values] == [None] * 4


def test_only_one_of_two_backwards_at_once_reads_the_carried_values(monkeypatch: pytest.MonkeyPatch) -> None:
    net = linears()
    model = WAYS["staged"](net)
    (x, g), out = batch(), list[Any]()
    y = model(x)
    torch.autograd.grad(y, x, g, retain_graph=True)
    read = pruned._versions

    def read_after_another_backward(values: Any) -> Any:
        monkeypatch.setattr(pruned, "_versions", read)
        thread = threading.Thread(target=request)  # it takes the values while this backward looks at them
        thread.start()
        thread.join()
        return read(values)

    def request() -> None:
        out.append(torch.autograd.grad(y, [*net.parameters()], g, retain_graph=True))

    monkeypatch.setattr(pruned, "_versions", read_after_another_backward)
    request()
    assert len(out) == 2
    for found in out:
        same(found, torch.autograd.grad(net(x), [*net.parameters()], g))


def test_values_that_nothing_reads_are_soon_not_carried() -> None:
    net = linears()
    y = WAYS["staged"](net)(x := batch()[0])
    counts = []
    for row in range(MOST_UNREAD + 2):
        g = torch.zeros(3, 8)
        g[0, row] = 1
        torch.autograd.grad(y, x, g, retain_graph=True)
        carried = y.grad_fn.carried
        counts.append(sum(map(len, carried.values)))
    assert counts[0] == 4
    del carried
    assert products(lambda: torch.autograd.grad(y, [*net.parameters()], g))[0] == 7


def test_more_kinds_of_requests_than_we_compile_run_the_complete_code() -> None:
    net = linears(6)
    model = WAYS["staged"](net)
    x, g = batch()
    y, out = model(x), net(x)
    for parameter in net.parameters():
        ours = torch.autograd.grad(y, parameter, g, retain_graph=True)
        same(ours, torch.autograd.grad(out, parameter, g, retain_graph=True))
    (code,) = y.grad_fn.run._codes.values()
    assert len(code.codes) == MOST_PRUNED


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_generated_code(backend: str) -> None:
    net, eager = linears(2), linears(2)
    model = torch.compile(net, backend="retrograd", options={"backend": backend})
    for seed in range(2):
        found, wanted = zero_bubble(model, net, seed=seed)[1], zero_bubble(eager, eager, seed=seed)[1]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_one_network_between_two_requests_is_seen_by_the_other(way: str) -> None:
    """As of a generator and a discriminator, by an optimizer that goes through `.data`."""
    found = []
    for wrap in (WAYS[way], lambda net: net):
        net = linears(3)
        first, last = [*net[:3].parameters()], [*net[3:].parameters()]
        x, g = batch()
        y = wrap(net)(x)
        steps = torch.autograd.grad(y, last, g, retain_graph=True)
        for parameter, step in zip(last, steps, strict=True):
            parameter.data.sub_(step)
        found.append(torch.autograd.grad(y, first, g))
    same(*found)
