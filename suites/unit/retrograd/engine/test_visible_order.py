"""Leaves take turns if, and only if, something may see in which order they accumulate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import retrograd
from retrograd import aot
from retrograd.aot.run import attach
from retrograd.engine import visible_order

Leaves = Sequence[torch.Tensor]
Observe = Callable[[Leaves, list[Any]], Sequence[Any]]


def product(leaves: Leaves) -> torch.Tensor:
    total = leaves[0]
    for leaf in leaves[1:]:
        total = (total * leaf).sin()
    return total


def twice(leaves: Leaves) -> torch.Tensor:
    return product(leaves[::-1]) + product(leaves[3:])


def leaf_node(leaf: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def tensor_hooks(leaves: Leaves, seen: list[Any]) -> Sequence[Any]:
    return [leaf.register_hook(lambda _, i=i: seen.append(i)) for i, leaf in enumerate(leaves)]


def post_accumulate_hooks(leaves: Leaves, seen: list[Any]) -> Sequence[Any]:
    return [
        leaf.register_post_accumulate_grad_hook(
            lambda _, i=i: seen.append((i, [one.grad is None for one in leaves]))
        )
        for i, leaf in enumerate(leaves)
    ]


def one_hook(leaves: Leaves, seen: list[Any]) -> Sequence[Any]:
    def look(_: torch.Tensor) -> None:
        seen.append([one.grad is None for one in leaves])

    return [leaves[4].register_post_accumulate_grad_hook(look)]


def node_hooks(leaves: Leaves, seen: list[Any]) -> Sequence[Any]:
    nodes = [leaf_node(leaf) for leaf in leaves]
    return [nodes, *[node.register_hook(lambda *_, i=i: seen.append(i)) for i, node in enumerate(nodes)]]


def node_prehooks(leaves: Leaves, seen: list[Any]) -> Sequence[Any]:
    nodes = [leaf_node(leaf) for leaf in leaves]
    return [nodes, *[node.register_prehook(lambda _, i=i: seen.append(i)) for i, node in enumerate(nodes)]]


OBSERVERS = (tensor_hooks, post_accumulate_hooks, one_hook, node_hooks, node_prehooks)
WAYS: dict[str, Callable[..., Any]] = {
    "staged": lambda fn: aot.function(fn, backend="eager", strict=True),
    "live": lambda fn: retrograd.compile(fn, backend="eager", options={"strict": True}),
    "dynamo": lambda fn: torch.compile(fn, backend="retrograd", options={"backend": "eager", "strict": True}),
}


def seen_by(fn: Callable[[Leaves], torch.Tensor], observe: Observe, when: str) -> list[Any]:
    """What hooks see, that are set before a forward or between it and its backward, after others."""
    leaves = [torch.full((3,), 0.5, requires_grad=True) for _ in range(10)]
    for _ in range(3):
        fn(leaves).sum().backward()
    for leaf in leaves:
        leaf.grad = None
    seen: list[Any] = []
    kept = observe(leaves, seen) if when == "before" else ()
    out = fn(leaves).sum()
    kept = kept or observe(leaves, seen)
    out.backward()
    assert kept
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fn", [product, twice])
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("observe", OBSERVERS)
def test_what_hooks_see_is_eagers(
    observe: Observe, when: str, fn: Callable[[Leaves], torch.Tensor], way: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(visible_order, "_hooks", visible_order._HooksSeen())
    assert seen_by(WAYS[way](fn), observe, when) == seen_by(fn, observe, when)


def test_a_dispatch_mode_sees_eagers_order(monkeypatch: Any) -> None:
    class Accumulations(TorchDispatchMode):
        def __init__(self, leaves: Leaves) -> None:
            super().__init__()
            self.places = {leaf.grad.data_ptr(): place for place, leaf in enumerate(leaves)}  # type: ignore[union-attr]
            self.seen: list[int] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add_.Tensor and args[0].data_ptr() in self.places:
                self.seen.append(self.places[args[0].data_ptr()])
            return func(*args, **(kwargs or {}))

    def order(fn: Callable[[Leaves], torch.Tensor]) -> list[int]:
        leaves = [torch.full((3,), 0.5, requires_grad=True) for _ in range(10)]
        for leaf in leaves:
            leaf.grad = torch.zeros(3)
        out = fn(leaves).sum()
        with Accumulations(leaves) as mode:
            out.backward()
        return mode.seen

    monkeypatch.setattr(visible_order, "_hooks", visible_order._HooksSeen())
    eager = order(product)
    assert sorted(eager) == [*range(10)]
    assert order(aot.function(product, backend="eager", strict=True)) == eager


def adding(leaves: Leaves) -> torch.Tensor:
    total = leaves[0] + 1
    for leaf in leaves[1:]:
        total = total + leaf
    return total


@pytest.mark.parametrize("cotangent", [lambda c: c, lambda c: c[:], lambda c: c.view(1, 3)[0]])
def test_a_cotangent_that_shares_memory_with_a_gradient(cotangent: Any, monkeypatch: Any) -> None:
    def gradients(fn: Callable[[Leaves], torch.Tensor]) -> list[Any]:
        leaves = [torch.full((3,), 0.5, requires_grad=True) for _ in range(12)]
        fn(leaves).sum().backward()
        for leaf in leaves:
            leaf.grad = None
        leaves[5].grad = torch.ones(3)
        fn(leaves).backward(cotangent(leaves[5].grad))
        return [leaf.grad.tolist() for leaf in leaves]  # type: ignore[union-attr]

    monkeypatch.setattr(visible_order, "_hooks", visible_order._HooksSeen())
    assert gradients(aot.function(adding, backend="eager", strict=True)) == gradients(adding)


def test_an_error_leaves_the_gradients_that_eager_leaves(monkeypatch: Any) -> None:
    def there(fn: Callable[[Leaves], torch.Tensor]) -> list[bool]:
        leaves = [torch.full((3,), 0.5, requires_grad=True) for _ in range(12)]
        leaves[5].grad = torch.zeros(1).expand(3)
        with pytest.raises(RuntimeError, match="unsupported operation"):
            fn(leaves).sum().backward()
        return [leaf.grad is None for leaf in leaves]

    monkeypatch.setattr(visible_order, "_hooks", visible_order._HooksSeen())
    assert there(aot.function(product, backend="eager", strict=True)) == there(product)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_nothing_is_ordered_that_nobody_sees(monkeypatch: Any) -> None:
    monkeypatch.setattr(visible_order, "_hooks", visible_order._HooksSeen())
    taken: list[str] = []
    monkeypatch.setattr(attach, "take_turns", lambda ctx: taken.append("turns"))
    monkeypatch.setattr(attach, "last_turn", lambda leaf: taken.append("barrier") or leaf)
    compiled = aot.function(product, backend="eager", strict=True)
    leaves = [torch.ones(3, requires_grad=True) for _ in range(10)]
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        compiled(leaves).sum().backward()
    assert taken == []
    compiled(leaves).sum().backward()
    assert taken == ["turns"], "it adds to gradients that are there"
    (leaves[1] * 2).register_hook(lambda grad: None)
    for leaf in leaves:
        leaf.grad = None
    compiled(leaves).sum().backward()
    assert taken == ["turns"], "a hook of a result sees no leaf"
    for leaf in leaves:
        leaf.grad = None
    out = compiled(leaves).sum()
    with Passing():
        out.backward()
    assert taken == ["turns", "turns"], "a dispatch mode sees what is accumulated"
    leaves[2].register_hook(lambda grad: None)
    for leaf in leaves:
        leaf.grad = None
    compiled(leaves).sum().backward()
    assert taken == ["turns", "turns", "barrier", "turns"]


def test_leaves_take_turns_while_there_is_a_process_group(monkeypatch: Any) -> None:
    taken: list[str] = []
    monkeypatch.setattr(attach, "take_turns", lambda ctx: taken.append("turns"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    leaves = [torch.ones(3, requires_grad=True) for _ in range(10)]
    aot.function(product, backend="eager", strict=True)(leaves).sum().backward()
    assert taken == ["turns"]


BEFORE = """
import torch
leaves = [torch.full((3,), 0.5, requires_grad=True) for _ in range(10)]
nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
seen = []
for i, node in enumerate(nodes):
    {register}
from retrograd import aot
def product(leaves):
    total = leaves[0]
    for leaf in leaves[1:]:
        total = (total * leaf).sin()
    return total
compiled = aot.function(product, backend="eager", strict=True)
compiled([torch.ones(3, requires_grad=True) for _ in range(10)]).sum().backward()
compiled(leaves).sum().backward()
product(leaves).sum().backward()
assert seen[:10] == seen[10:], seen
assert sorted(seen[:10]) == [*range(10)], seen
"""


@pytest.mark.parametrize(
    "register",
    [
        "node.register_hook(lambda *_, i=i: seen.append(i))",
        "node.register_prehook(lambda _, i=i: seen.append(i))",
        "leaves[i].register_hook(lambda _, i=i: seen.append(i))",
        "leaves[i].register_post_accumulate_grad_hook(lambda _, i=i: seen.append(i))",
    ],
)
def test_hooks_that_are_older_than_the_first_compiled_call(register: str) -> None:
    program = BEFORE.format(register=register)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
