"""Forwards that stock torch.compile compiled: gradients, hooks and their order come out as eager's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, fx, nn

import retrograd
from retrograd.live.inlined.undefined_grads import UndefinedGrads

Events = list[Any]
Program = Callable[[Callable[[Tensor], Any], nn.Module, Events], None]


class Branches(nn.Module):
    """Three outputs: one that the second is made of, and an independent one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.a(x).relu()
        return h, self.b(h).tanh(), self.c(x)


def seen(grad: Tensor | None) -> float | None:
    return None if grad is None else round(grad.sum().item(), 4)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
PROGRAMS: dict[str, Program] = {}


def program(fn: Program) -> Program:
    PROGRAMS[fn.__name__] = fn
    return fn


@program
def output_that_is_not_used(f, module, events):
    _, y, _ = f(X)
    y.sum().backward()


@program
def hook_on_an_output_that_is_not_used(f, module, events):
    _, y, z = f(X)
    z.register_hook(lambda grad: events.append("z"))
    y.sum().backward()


@program
def hook_on_a_returned_intermediate_changes_its_gradient(f, module, events):
    h, y, z = f(X)
    h.register_hook(lambda grad: (events.append(("h", seen(grad))), grad * 2)[1])
    y.register_hook(lambda grad: events.append("y"))
    (y.sum() + z.sum() + h.pow(2).sum()).backward()


@program
def retain_grad_of_a_returned_intermediate(f, module, events):
    h, y, _ = f(X)
    h.retain_grad()
    (h.sum() * 3 + y.sum()).backward()
    events.append(seen(h.grad))


@program
def gradients_of_an_intermediate_and_a_parameter(f, module, events):
    h, y, _ = f(X)
    events.extend(map(seen, torch.autograd.grad(h.sum() * 3 + y.sum(), (h, module.a.weight))))


@program
def gradient_of_a_parameter_that_is_not_reached(f, module, events):
    _, y, _ = f(X)
    leaves = [module.a.weight, module.c.weight]
    events.extend(map(seen, torch.autograd.grad(y.sum(), leaves, allow_unused=True)))


@program
def unreached_parameter_raises(f, module, events):
    _, y, _ = f(X)
    torch.autograd.grad(y.sum(), [module.a.weight, module.c.weight])


@program
def the_same_nodes_twice_raise(f, module, events):
    h, y, _ = f(X)
    y.sum().backward()
    h.sum().backward()


@program
def independent_outputs_one_after_the_other(f, module, events):
    _, y, z = f(X)
    y.sum().backward()
    z.sum().backward()
    y.sum().backward()


@program
def gradient_of_an_intermediate_alone(f, module, events):
    h, y, _ = f(X)
    handle = module.a.weight.register_hook(lambda grad: events.append("not to be called"))
    (grad,) = torch.autograd.grad(h.sum() * 3 + y.sum(), h)
    handle.remove()
    events.append(seen(grad))
    h.backward(grad)


@program
def hooks_that_come_and_go_while_it_runs(f, module, events):
    _, y, z = f(X)
    gone = y.register_hook(lambda grad: events.append("gone"))

    def change(grad):
        events.append("z")
        gone.remove()
        y.register_hook(lambda grad: (events.append("came"), grad * 2)[1])

    z.register_hook(change)
    (y.sum() + z.sum()).backward()


@program
def kept_graph(f, module, events):
    _, y, _ = f(X)
    y.sum().backward(retain_graph=True)
    y.sum().backward()


@program
def one_function_twice_in_one_backward(f, module, events):
    (f(X)[1].sum() + f(X + 1)[1].sum()).backward()


@program
def gradient_of_a_gradient(f, module, events):
    x = X.clone().requires_grad_()
    _, y, _ = f(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    grad.pow(2).sum().backward()
    events.append(seen(x.grad))


@program
def multi_grad_hook(f, module, events):
    outputs = f(X)
    torch.autograd.graph.register_multi_grad_hook(
        outputs, lambda grads: events.append([seen(grad) for grad in grads])
    )
    outputs[1].sum().backward()


@program
def autocast_around_the_backward(f, module, events):
    _, y, z = f(X)
    loss = y.sum() + z.sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


@program
def saved_tensor_hooks(f, module, events):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy):
        _, y, _ = f(X)
    y.sum().backward()


def outcome(
    run: Program, f: Callable[[Tensor], Any], module: nn.Module
) -> tuple[Events, list[Tensor | None]]:
    events: Events = []
    module.zero_grad()
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        for name, p in module.named_parameters()
    ]
    try:
        run(f, module, events)
    except RuntimeError as error:
        events.append(str(error))
    for handle in handles:
        handle.remove()
    return events, [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_like_eager(run: Program, forward: str, backend: str) -> retrograd.CompiledAutograd:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Branches()
    events, grads = outcome(run, module, module)
    context = retrograd.compiled_autograd(backend)
    compiled = torch.compile(module, backend=forward)
    with context:
        found_events, found_grads = outcome(run, compiled, module)
    assert found_events == events
    for grad, found in zip(grads, found_grads, strict=True):
        assert (grad is None) == (found is None)
        if grad is not None:
            torch.testing.assert_close(found, grad, rtol=1e-4, atol=1e-5)
    return context


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_compiled_forward_has_eagers_gradients_and_order(name: str, backend: str) -> None:
    assert_like_eager(PROGRAMS[name], "aot_eager", backend)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["hook_on_a_returned_intermediate_changes_its_gradient", "kept_graph"])
def test_inductors_backward_graphs_too_also_from_its_cache(
    name: str, cached: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(1 + cached):
        context = assert_like_eager(PROGRAMS[name], "inductor", "eager")
    assert not [
        step.reason
        for backward in context.explain().backwards
        for step in backward.schedule.opaque_calls
        if "AOT" in step.reason
    ]


def test_the_nodes_of_a_graph_met_twice_are_numbered() -> None:
    context = assert_like_eager(one_function_twice_in_one_backward, "aot_eager", "eager")
    text = context.explain().print_readable(print_output=False)
    first, second = sorted(set(re.findall(r"(aot\w+)_tangents_2_read =", text)))
    assert second == f"{first}_1"


@pytest.mark.parametrize("cached", [False, True])
def test_a_backward_that_draws_random_numbers_stays_one_call(
    cached: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(1 + cached):
        backward = backward_that_draws_random_numbers()
    (reason,) = {step.reason for step in backward.schedule.opaque_calls}
    assert reason.startswith("AOT backward as one call: ")
    assert reason.endswith("draws random numbers")


def backward_that_draws_random_numbers() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        loss = torch.compile(net, backend="inductor")(X).pow(2).sum()
        context = retrograd.compiled_autograd("eager")
        with context:
            loss.backward()
    (backward,) = context.explain().backwards
    return backward


def test_outside_of_a_context_stock_refuses_as_before() -> None:
    torch._dynamo.reset()
    retrograd.compiled_autograd("eager")
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda a: a.sin() * a, backend="aot_eager")(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


class Tripled(torch.autograd.Function):
    """Its derivative has a derivative, through what it has saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 3


@pytest.mark.parametrize(
    "changed", ["input changed in place", "random numbers", "buffer changed", "a Function"]
)
@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_second_derivatives_that_the_graph_alone_does_not_determine_are_refused(changed: str) -> None:
    torch._dynamo.reset()
    buffer = torch.zeros(3)

    def forward(a: Tensor) -> Tensor:
        if changed == "random numbers":
            return nn.functional.dropout(a.sin(), 0.5) * a
        if changed == "buffer changed":
            buffer.add_(1)
            return a.sin() * buffer
        return Tripled.apply(a) if changed == "a Function" else a.sin() * a

    context = retrograd.compiled_autograd("eager")
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 1
    y = torch.compile(forward, backend="aot_eager")(x)
    if changed == "input changed in place":
        with torch.no_grad():
            x.add_(1)

    def second_derivative() -> None:
        (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        grad.sum().backward()

    with context, pytest.raises(RuntimeError, match=r"double backward|modified by an inplace"):
        second_derivative()


# the analysis


def graph_of_two_tangents() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """With ``sum = t1 + 2 * t2``, of one shape: ``a = 3 * sum``, ``b = 4 * t2`` and ``cat = cat(t1, t2)``."""
    graph = fx.Graph()
    aten = torch.ops.aten
    nodes = {name: graph.placeholder(name) for name in ("t1", "t2")}
    nodes["double"] = graph.call_function(aten.mul.Tensor, (nodes["t2"], 2))
    nodes["sum"] = graph.call_function(aten.add.Tensor, (nodes["t1"], nodes["double"]))
    nodes["a"] = graph.call_function(aten.mul.Tensor, (nodes["sum"], 3))
    nodes["b"] = graph.call_function(aten.mul.Tensor, (nodes["t2"], 4))
    nodes["cat"] = graph.call_function(aten.cat.default, ([nodes["t1"], nodes["t2"]],))
    for name, node in nodes.items():
        node.meta["val"] = torch.empty(2)
        node.meta["seq_nr"] = {"double": 9, "a": 3, "b": 8}.get(name, 20)
    return graph, nodes


def flow(undefined: set[int], *outputs: str) -> tuple[UndefinedGrads, dict[str, fx.Node]]:
    graph, nodes = graph_of_two_tangents()
    tangents = [[nodes["t1"]], [nodes["t2"]]]
    return UndefinedGrads(graph, tangents, undefined, [[nodes[name]] for name in outputs]), nodes


def test_a_sum_loses_an_undefined_operand_and_what_hangs_from_it_alone_is_undefined() -> None:
    found, nodes = flow({1}, "a", "b")
    assert found.stands_for == {nodes["sum"]: nodes["t1"]}
    assert [name for name, node in nodes.items() if found.is_undefined(node)] == ["t2", "double", "b"]
    assert not found.zeros


def test_an_operation_that_mixes_has_zeros_in_place_of_what_is_undefined() -> None:
    found, nodes = flow({1}, "cat", "b")
    assert found.filled == {nodes["t2"]}
    assert [name for name, node in nodes.items() if found.is_undefined(node)] == ["t2", "b"]
    assert not found.zeros


def test_where_sizes_are_not_known_the_tangent_itself_is_zeros() -> None:
    graph, nodes = graph_of_two_tangents()
    for node in nodes.values():
        del node.meta["val"]
    found = UndefinedGrads(graph, [[nodes["t1"]], [nodes["t2"]]], {1}, [[nodes["cat"]], [nodes["b"]]])
    assert found.zeros == {1}
    assert not any(map(found.is_undefined, nodes.values()))


def test_the_gradient_of_an_output_is_whole_where_the_graph_has_added_its_own_part() -> None:
    found, nodes = flow(set(), "a", "b")
    assert found.totals == [nodes["sum"], nodes["t2"]]


def test_nodes_run_by_descending_sequence_number_as_soon_as_they_can() -> None:
    found, nodes = flow(set(), "a", "b")
    assert [node.name for node in found.order] == [nodes[n].name for n in ("double", "sum", "b", "a")]


class Counting:
    """A backend that runs the ATen graph, and counts its compilations."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: object) -> object:
        self.compiled += 1
        return gm.forward


def layers(count: int, kinds: tuple[str, ...]) -> torch.nn.Module:
    torch.manual_seed(0)
    made = []
    for i in range(count):
        norm = torch.nn.LayerNorm(8)
        made.append(torch.nn.Sequential(torch.nn.Linear(8, 8), norm, torch.nn.GELU(kinds[i % len(kinds)])))
    return torch.nn.Sequential(*made)


@pytest.mark.parametrize("kinds", [("none",), ("none", "tanh")])
def test_layers_behind_a_compiled_forward_are_compiled_once(kinds: tuple[str, ...]) -> None:
    """Layers that differ in an argument given by name, as GELU's approximation is, are different ones."""
    model, backend = layers(12, kinds), Counting()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss = compiled(x).square().sum()
    shared = retrograd.counters["shared_lowerings"]
    with retrograd.compiled_autograd(backend, regions=4, strict=True):
        loss.backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert retrograd.counters["shared_lowerings"] - shared >= 2
    assert backend.compiled < 6
