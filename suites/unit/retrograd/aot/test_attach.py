"""Leaves get their gradients in eager's order, with as few barriers as that takes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import retrograd
from retrograd import aot
from retrograd.aot.run.attach import FEWEST_TURNS, Order
from retrograd.graph.eager_order import ACCUMULATES

Leaves = Sequence[torch.Tensor]


def products(leaves: Leaves) -> torch.Tensor:
    out = leaves[0].sin()
    for leaf in leaves[1:]:
        out = out * leaf
    return out


def uses_the_first_again(leaves: Leaves) -> torch.Tensor:
    return products(leaves) + leaves[0] * leaves[-1]


def uses_them_backwards(leaves: Leaves) -> torch.Tensor:
    return products(leaves[::-1]).exp() * leaves[0]


FUNCTIONS = (products, uses_the_first_again, uses_them_backwards)


def order_of(fn: Callable[[Leaves], torch.Tensor], given: Sequence[int], busy: bool) -> list[int]:
    """In which order tensor hooks on leaves run; `busy`: while others wait in the engine's queue."""
    leaves = [torch.ones(2, requires_grad=True) for _ in given]
    seen: list[int] = []
    for number, leaf in enumerate(leaves):
        leaf.register_hook(lambda grad, number=number: seen.append(number))
    elsewhere = [torch.ones(2, requires_grad=True).exp().sin() for _ in range(5 if busy else 0)]
    out = fn([leaves[i] for i in given])
    sum([out.sum(), *[other.sum() for other in elsewhere]]).backward()  # type: ignore[union-attr]
    return seen


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("busy", [False, True])
def test_hooks_on_leaves_run_in_eagers_order(fn: Callable[[Leaves], torch.Tensor], busy: bool) -> None:
    for count in (1, 2, 3):
        for given in itertools.permutations(range(count)):
            compiled = aot.function(fn, backend="eager", strict=True)
            assert order_of(compiled, given, busy) == order_of(fn, given, busy)
    compiled = aot.function(fn, backend="eager", strict=True)
    for given in (range(7), range(12), [*range(5, 14), *range(5)]):
        assert order_of(compiled, given, busy) == order_of(fn, given, busy)


@pytest.mark.parametrize(
    ("count", "barriers"), [(1, 0), (2, 0), (3, 1), (5, 3), (FEWEST_TURNS + 2, 1), (FEWEST_TURNS + 9, 1)]
)
def test_two_leaves_need_no_gate(count: int, barriers: int) -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(count)]
    joint = aot.capture(aot.create_state(lambda *given: products(given), leaves))
    assert sum(step.is_leaf for step in Order(joint).steps) == barriers


def ordered(leaves: Leaves) -> torch.Tensor:
    total = leaves[0]
    for leaf in leaves[1:]:
        total = (total * leaf).sin()
    return total


def late(fn: Callable[[Leaves], torch.Tensor], leaves: Leaves, how: str) -> tuple[list[object], list[object]]:
    """What hooks see that are registered between a forward and its backward, and the gradients."""
    for leaf in leaves:
        leaf.grad = None
    out, seen = fn(leaves).sum(), list[object]()
    handles = []
    for number, leaf in enumerate(leaves):
        handles.append(leaf.register_hook(lambda grad, number=number: seen.append(("tensor", number))))
        note = functools.partial(lambda number, leaf: seen.append(("leaf", number)), number)
        handles.append(leaf.register_post_accumulate_grad_hook(note))
    if how == "grad":
        grads: list[object] = [*torch.autograd.grad(out, leaves)]
    else:
        out.backward(inputs=leaves[::2] if how == "inputs" else None)
        grads = [leaf.grad for leaf in leaves]
    for handle in handles:
        handle.remove()
    return seen if how != "grad" else sorted(map(str, seen)), grads


@pytest.mark.parametrize("how", ["backward", "inputs", "grad"])
def test_hooks_registered_after_the_forward_run_in_eagers_order(how: str) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(3, requires_grad=True) for _ in range(8)]
    compiled = aot.function(ordered, backend="eager", strict=True)
    for _ in range(4):
        compiled(leaves).sum().backward()
    found, wanted = late(compiled, leaves, how), late(ordered, leaves, how)
    assert found[0] == wanted[0]
    assert len(found[0]) > 4
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)  # type: ignore[arg-type]


def numbers(leaves: Leaves) -> list[int]:
    nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
    return [node._sequence_nr() - ACCUMULATES for node in nodes]  # type: ignore[attr-defined]


@pytest.mark.parametrize("wanted", [slice(None), slice(0, 4), slice(-3, None), slice(0, None, 2)])
def test_leaves_have_their_own_numbers_after_a_backward(wanted: slice) -> None:
    leaves = [torch.randn(3, requires_grad=True) for _ in range(10)]
    out = aot.function(ordered, backend="eager", strict=True)(leaves).sum()
    seen: list[int] = []
    for leaf in leaves:
        leaf.register_hook(lambda grad: seen.append(min(numbers(leaves))))
    out.backward(inputs=leaves[wanted], retain_graph=True)
    assert min(seen) < 0, "no leaf had a turn of its own"
    assert numbers(leaves) == [0] * 10
    torch.autograd.grad(out, leaves[wanted], retain_graph=True)
    assert numbers(leaves) == [0] * 10
    out.backward()
    assert numbers(leaves) == [0] * 10


def test_leaves_have_their_own_numbers_after_an_error() -> None:
    leaves = [torch.randn(3, requires_grad=True) for _ in range(10)]
    out = aot.function(ordered, backend="eager", strict=True)(leaves).sum()

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("stop here")

    leaves[4].register_hook(fail)
    kept = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
    for _ in range(2):
        with pytest.raises(ValueError, match="stop here"):
            out.backward(retain_graph=True)
        assert numbers(leaves) == [0] * len(kept)


def nested_in_a_hook(
    compile_it: Callable[..., Callable[[Leaves], torch.Tensor]],
    inner: Callable[[Leaves], Leaves],
    where: int,
    made_before: bool,
    how: str,
) -> list[object]:
    """The order of leaf hooks if the hook of one leaf differentiates through some of the leaves too."""
    leaves = [torch.full((2,), 0.5 + number / 16, requires_grad=True) for number in range(12)]
    outer, within = compile_it(products), compile_it(ordered)
    seen: list[object] = []
    losses = [within(inner(leaves)).sum()] if made_before else []

    @torch.enable_grad()
    def hook(number: int, grad: torch.Tensor) -> None:
        seen.append(number)
        if number == where and not seen.count("nested"):
            seen.append("nested")
            loss = losses.pop() if losses else within(inner(leaves)).sum()
            if how == "backward":
                loss.backward()
            else:
                torch.autograd.grad(loss, leaves[2:10])
            seen.append("over")

    for number, leaf in enumerate(leaves):
        leaf.register_hook(functools.partial(hook, number))
    outer(leaves).sum().backward()
    return [*seen, *numbers(leaves)]


@pytest.mark.parametrize(("made_before", "how"), [(False, "backward"), (True, "grad")])
@pytest.mark.parametrize(
    "inner",
    [lambda a: a, lambda a: a[2:], lambda a: a[:10], lambda a: [(a[0] * 2).detach().requires_grad_(), *a]],
    ids=["the same", "later", "earlier", "more"],
)
def test_a_backward_in_a_hook_of_a_leaf_leaves_the_others_their_turns(
    inner: Callable[[Leaves], Leaves], made_before: bool, how: str
) -> None:
    compiled = functools.partial(aot.function, backend="eager", strict=True)
    for where in (1, 5, 9, 11):
        args = inner, where, made_before, how
        assert nested_in_a_hook(compiled, *args) == nested_in_a_hook(lambda fn: fn, *args)


def test_a_node_that_is_called_by_hand_gives_its_gradients() -> None:
    leaves = [torch.randn(3, requires_grad=True) for _ in range(10)]
    out = aot.function(ordered, backend="eager", strict=True)(leaves)
    wanted = torch.autograd.grad(ordered(leaves).sum(), leaves)
    found = [grad for grad in out.grad_fn.apply(torch.ones(3)) if grad is not None]  # type: ignore[union-attr]
    assert len(found) == len(wanted)
    assert all(any(torch.equal(one, other) for other in wanted) for one in found)
    assert numbers(leaves) == [0] * 10


def test_threads_with_leaves_of_their_own_keep_eagers_order() -> None:
    compiled = aot.function(ordered, backend="eager", strict=True)
    compiled([torch.ones(3, requires_grad=True) for _ in range(12)])

    def order(fn: Callable[[Leaves], torch.Tensor]) -> list[list[int]]:
        return [order_of(fn, range(12), busy=bool(run % 2)) for run in range(20)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(order, [compiled] * 4))
    assert found == [order(ordered)] * 4


@pytest.mark.parametrize("wanted", [slice(None), slice(0, None, 3)])
def test_a_plan_runs_leaves_in_eagers_order(wanted: slice) -> None:
    def order(fn: Callable[[Leaves], torch.Tensor]) -> list[list[int]]:
        leaves = [torch.full((3,), 0.5, requires_grad=True) for _ in range(12)]
        runs: list[list[int]] = []
        for leaf, number in zip(leaves, range(12), strict=True):
            leaf.register_hook(lambda grad, number=number: runs[-1].append(number))
        for _ in range(4):
            out = fn(leaves).sum() + (leaves[3] * leaves[2]).sum()
            runs.append([])
            out.backward(inputs=leaves[wanted])
        return runs

    eager = order(ordered)
    with retrograd.compiled_autograd(backend="aten", strict=True):
        assert order(aot.function(ordered, backend="eager", strict=True)) == eager
