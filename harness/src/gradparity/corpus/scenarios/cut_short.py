"""Backwards that an error ends, and what is left of their graphs.

In: a probe. Out: the error, which saved tensors are left, and a second backward of the same graph, which
nobody retained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("hooks",)


def _raising_once(p: Probe, error: BaseException) -> Callable[..., None]:
    """A hook that raises in its first call."""
    errors = [error]

    def check(*_: Any) -> None:
        p.event("check", kind="hook")
        if errors:
            raise errors.pop()

    return check


def _two_backwards(p: Probe, loss: Tensor, **between: Tensor) -> None:
    for number in (1, 2):
        try:
            with p.backward():
                loss.backward()
        except BaseException as error:
            p.event(f"raised {number}", type(error).__name__)
        for name, tensor in between.items():
            try:
                p.event(f"{name} saved {number}", tensor.grad_fn._saved_result is not None)
            except RuntimeError:
                p.event(f"{name} released {number}")


def _exponentials(p: Probe, name: str = "x") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = p.leaf(name, p.randn(4, requires_grad=True))
    first = x.sigmoid()
    second = first.exp()
    return x, first, second, second.tanh()


def _checked_root(p: Probe, error: BaseException) -> None:
    _, first, second, third = _exponentials(p)
    loss = third.sum()
    loss.register_hook(_raising_once(p, error))
    _two_backwards(p, loss, first=first, second=second, third=third)


@scenario(tags=TAGS)
def check_of_a_root_raises(p: Probe) -> None:
    """Nothing has run when a hook of the root raises: the second backward of the graph works."""
    _checked_root(p, FloatingPointError("too large"))


@scenario(tags=TAGS)
def check_interrupted_by_the_user(p: Probe) -> None:
    """The same for an interrupt."""
    _checked_root(p, KeyboardInterrupt())


@scenario(tags=TAGS)
def check_that_exits(p: Probe) -> None:
    """The same for a hook that ends the program, where somebody prevents that."""
    _checked_root(p, SystemExit(3))


@scenario(tags=TAGS)
def check_in_the_middle_raises(p: Probe) -> None:
    """The nodes that have run are used up, so the second backward is refused at the first of them."""
    _, first, second, third = _exponentials(p)
    second.register_hook(_raising_once(p, ValueError("mine")))
    _two_backwards(p, third.sum(), first=first, second=second, third=third)


@scenario(tags=TAGS)
def check_before_a_node_raises(p: Probe) -> None:
    """A prehook of a node raises: the node has not run."""
    _, first, second, third = _exponentials(p)
    third.grad_fn.register_prehook(_raising_once(p, ValueError("mine")))
    _two_backwards(p, third.sum(), first=first, second=second, third=third)


@scenario(tags=TAGS)
def check_after_a_node_raises(p: Probe) -> None:
    """A hook on a node that has run raises: its saved tensors are still there."""
    _, first, second, third = _exponentials(p)
    third.grad_fn.register_hook(_raising_once(p, ValueError("mine")))
    _two_backwards(p, third.sum(), first=first, second=second, third=third)


@scenario(tags=TAGS)
def check_of_an_accumulated_gradient_raises(p: Probe) -> None:
    """The gradient stays where it was written, and the whole graph but its end is used up."""
    x, first, second, third = _exponentials(p)
    x.register_post_accumulate_grad_hook(_raising_once(p, ValueError("mine")))
    _two_backwards(p, third.sum(), first=first, second=second, third=third)


def _unpack_raising(p: Probe, number: int, path: str = "") -> Callable[[Tensor], Tensor]:
    """An unpack hook that raises in this call: if a `path` is given, by opening it."""
    calls = [0]

    def unpack(packed: Tensor) -> Tensor:
        calls[0] += 1
        p.event("unpack", kind="hook")
        if calls[0] == number and path:
            open(path).close()
        elif calls[0] == number:
            raise OSError("the disk is full")
        return packed

    return unpack


def _unpacked(p: Probe, number: int, path: str = "") -> None:
    for name in ("x", "y"):  # the second graph's structure is known
        unpack = _unpack_raising(p, number, path)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            _, first, second, third = _exponentials(p, name)
            loss = third.sum()
        _two_backwards(p, loss, first=first, second=second, third=third)


@scenario(tags=TAGS)
def first_unpack_hook_raises(p: Probe) -> None:
    """The node whose saved tensor cannot be unpacked has not run: the second backward works."""
    _unpacked(p, 1)


@scenario(tags=TAGS)
def unpack_hook_in_the_middle_raises(p: Probe) -> None:
    """The node before it has run and is used up, the others are not."""
    _unpacked(p, 2)


@scenario(tags=TAGS)
def unpack_hook_finds_no_file(p: Probe) -> None:
    """An error that Python's own functions raise leaves as much."""
    _unpacked(p, 1, os.path.join("no", "such", "file"))


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grads[0]


@scenario(tags=TAGS)
def unpack_hook_of_a_function_raises(p: Probe) -> None:
    """A Function whose saved tensor cannot be unpacked has not run: the second backward works."""
    for name in ("x", "y"):
        x = p.leaf(name, p.randn(4, requires_grad=True))
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, _unpack_raising(p, 1)):
            first = x.exp()
            loss = _Cubed.apply(first).sum()
        _two_backwards(p, loss, first=first)


@scenario(tags=TAGS)
def data_of_another_length_between_forward_and_backward(p: Probe) -> None:
    """The engine does not look at what a leaf holds by now: its gradient has the length of the forward."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    loss = (x * 3).sum()
    x.data = torch.empty(0)
    with p.backward():
        loss.backward()
