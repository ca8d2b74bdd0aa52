"""Leaves get their gradients in eager's order, with as few barriers as that takes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from retrograd import aot
from retrograd.aot.run.call import steps_of

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
    assert order_of(compiled, range(7), busy) == order_of(fn, range(7), busy)


@pytest.mark.parametrize(("count", "barriers"), [(1, 0), (2, 0), (3, 1), (5, 3)])
def test_two_leaves_need_no_gate(count: int, barriers: int) -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(count)]
    joint = aot.capture(aot.create_state(lambda *given: products(given), leaves))
    assert sum(step.is_leaf for step in steps_of(joint)) == barriers


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
