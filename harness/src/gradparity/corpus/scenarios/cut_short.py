"""Backwards that an error ends, and what is left of their graphs.

In: a probe. Out: the error, which saved tensors are left, and a second backward of the same graph, which
nobody retained.
"""

from __future__ import annotations

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


def _exponentials(p: Probe) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = p.leaf("x", p.randn(4, requires_grad=True))
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


@scenario(tags=TAGS)
def data_of_another_length_between_forward_and_backward(p: Probe) -> None:
    """The engine does not look at what a leaf holds by now: its gradient has the length of the forward."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    loss = (x * 3).sum()
    x.data = torch.empty(0)
    with p.backward():
        loss.backward()
