"""A tensor that changes between two backwards of one call, each of which requests some of the gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd import aot

WAYS: dict[str, Callable[[Any], Any]] = {
    "staged": lambda fn: aot.module(fn, backend="eager", strict=True),
    "compile": lambda fn: retrograd.compile(fn, backend="eager"),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def seeded(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outcome(run: Callable[[], list[Any]]) -> Any:
    """What it returns, or the beginning of the error that it raises."""
    try:
        return [None if value is None else value.tolist() for value in run()]
    except RuntimeError as error:
        return str(error)[:60]


# a cotangent that is a subclass, changed behind its back


def inner_in_place(g: Any) -> None:
    g.a.mul_(3)


def inner_through_a_view(g: Any) -> None:
    g.b[1:].zero_()


def inner_replaced(g: Any) -> None:
    g.a = g.a * 3


def outer(g: Any) -> None:
    g.mul_(3)


def innermost(g: Any) -> None:
    (g.a.b if isinstance(g.a, TwoTensor) else g.b).add_(1)


def nothing(g: Any) -> None:
    pass


@pytest.mark.parametrize(
    "change", [inner_in_place, inner_through_a_view, inner_replaced, outer, innermost, nothing]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_subclass_cotangent_that_changes_inside(change: Any, depth: int, outputs: int) -> None:
    def two(seed: int, depth: int = depth) -> Any:
        one = seeded(3, 8, seed=seed)
        return TwoTensor(
            two(seed, depth - 1) if depth > 1 else one, two(seed + 9, depth - 1) if depth > 1 else one + 1
        )

    w, v = (seeded(8, 8, seed=seed).requires_grad_() for seed in (5, 6))

    def fn(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        hidden = torch.mm(x, w).relu()
        return [torch.mm(hidden, v), hidden.sin()][:outputs]

    def innermost_of(value: Any) -> list[Tensor]:
        inner = (value.a, value.b) if isinstance(value, TwoTensor) else ()
        return [part for one in inner for part in innermost_of(one)] or [value]

    found = []
    for called in (fn, aot.function(fn, backend="eager", strict=True)):
        x = two(1).requires_grad_()
        y, g = called(x, w, v), [two(2), two(3)][:outputs]
        grads = [*torch.autograd.grad(y, x, g, retain_graph=True)]
        change(g[-1])
        grads += torch.autograd.grad(y, (w, v), g)
        found.append([part.tolist() for grad in grads for part in innermost_of(grad)])
    assert found[0] == found[1]


# a split backward, as of a zero-bubble schedule


def stage(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), *last)


class Two(nn.Module):
    """Two outputs, one of which is the cotangent of a layer as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = stage(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.trunk(x)
        return self.head(y.relu()), y.sin()


STAGES: dict[str, Callable[[], nn.Module]] = {
    "ends in a layer": stage,
    "ends in an activation": lambda: stage(nn.Tanh()),
    "ends in a sum": lambda: stage(nn.LayerNorm(8)),
    "two outputs": Two,
}


@pytest.mark.parametrize("changes", [0, 1, 2])
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("way", WAYS)
def test_a_cotangent_that_changes_between_the_halves_of_a_stage(way: str, kind: str, changes: int) -> None:
    """Eager has stored the gradients from which the second half starts. Only a stored cotangent changes."""

    def run(model: Any, net: nn.Module) -> list[Any]:
        found = list[Any]()
        for seed in range(2):
            x = seeded(3, 8, seed=seed).requires_grad_()
            y = model(x)
            y = [*y] if isinstance(y, tuple) else [y]
            gs = [seeded(3, 8, seed=seed + 5 + i) for i in range(len(y))]
            _, groups = stage_backward_input(y, gs, [x], net.parameters())
            for _ in range(changes):
                gs[0].mul_(2)
            stage_backward_weight(net.parameters(), groups)
            found += [x.grad, *(p.grad.clone() for p in net.parameters())]
        return found

    net, eager = STAGES[kind](), STAGES[kind]()
    assert outcome(lambda: run(WAYS[way](net), net)) == outcome(lambda: run(eager, eager))


def test_a_hook_on_the_node_is_no_split_backward() -> None:
    net, found = stage(nn.Tanh()), list[Any]()
    for model in (net, WAYS["staged"](net)):
        x, g = seeded(3, 8).requires_grad_(), seeded(3, 8, seed=2)
        y, seen = model(x), list[Any]()
        y.grad_fn.register_prehook(seen.append)
        grads = [*torch.autograd.grad(y, x, g, retain_graph=True)]
        g.mul_(2)
        grads += torch.autograd.grad(y, [*net.parameters()], g)
        found.append([value.tolist() for value in (*grads, *seen[0], *seen[1])])
    assert found[0] == found[1]


# a primal that changes


class Net(nn.Module):
    """Three layers, in a checkpoint or not, with a buffer and a parameter that the backward does not read."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.shift, self.is_checkpointed = nn.Parameter(torch.ones(4)), is_checkpointed
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        y = checkpoint(self.layers, x, use_reentrant=False) if self.is_checkpointed else self.layers(x)
        return y * self.scale


REQUESTS: dict[str, Callable[[Tensor, Any], list[Tensor]]] = {
    "input": lambda x, net: [x],
    "first weight": lambda x, net: [net.layers[0].weight],
    "first bias": lambda x, net: [net.layers[0].bias],
    "middle weight": lambda x, net: [net.layers[2].weight],
    "last layer": lambda x, net: [*net.layers[4].parameters()],
    "last bias and shift": lambda x, net: [net.layers[4].bias, net.shift],
    "all": lambda x, net: [x, *net.parameters()],
}
CHANGED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "input": lambda x, net: x,
    "first weight": lambda x, net: net.layers[0].weight,
    "a view of the first weight": lambda x, net: net.layers[0].weight[1:],
    "last weight": lambda x, net: net.layers[4].weight,
    "first bias": lambda x, net: net.layers[0].bias,
    "shift": lambda x, net: net.shift,
    "buffer": lambda x, net: net.scale,
}


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_primal_that_changes_between_two_requests(way: str, is_checkpointed: bool) -> None:
    """A node that does not run does not check what it has saved. One that runs checks all of it."""
    net = Net(is_checkpointed)
    start = [*map(torch.clone, net.state_dict().values())]

    def run(model: Any, before: str | None, change: str, request: str) -> list[Any]:
        x = seeded(3, 4).requires_grad_()
        with torch.no_grad():
            for value, old in zip(net.state_dict().values(), start, strict=True):
                value.copy_(old)
        y, g = model(x), seeded(3, 4, seed=2)
        found = (
            []
            if before is None
            else [*torch.autograd.grad(y, REQUESTS[before](x, net), g, retain_graph=True)]
        )
        with torch.no_grad():
            CHANGED[change](x, net).mul_(3)
        return found + [*torch.autograd.grad(y, REQUESTS[request](x, net), g)]

    model, raised = WAYS[way](net), 0
    for case in itertools.product((None, "input", "all"), CHANGED, REQUESTS):
        ours, eager = (outcome(functools.partial(run, called, *case)) for called in (model, net))
        assert ours == eager, case
        raised += isinstance(eager, str)
    assert 20 < raised < 100


def test_a_step_between_requests_inside_a_live_backward() -> None:
    net, found = Net(False), list[Any]()
    for model in (net, WAYS["compile"](net)):
        x = seeded(3, 4).requires_grad_()
        y, g = model(x), seeded(3, 4, seed=2)
        with retrograd.compiled_autograd(backend="eager"):
            y.backward(g, inputs=[x], retain_graph=True)
            with torch.no_grad():
                net.layers[0].weight.mul_(2)
            y.backward(g, inputs=[net.layers[4].bias])
        with torch.no_grad():
            net.layers[0].weight.div_(2)
        found.append([x.grad.tolist(), net.layers[4].bias.grad.tolist()])
        net.layers[4].bias.grad = None
    assert found[0] == found[1]
