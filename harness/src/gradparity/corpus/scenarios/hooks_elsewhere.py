"""Hooks that change in unusual ways: from another thread, on frozen leaves, in a run that repeats itself; and
hooks that return gradients of another layout.

In: a probe. Out: which hooks ran, with what, and the gradients.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _on_a_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@scenario(tags=("hooks", "threads"))
def hook_is_removed_by_another_thread(p: Probe) -> None:
    """A hook that another thread removes while the backward runs does not run."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    handle = x.register_hook(p.hook("removed", lambda grad: grad * 2))
    h = x * 2
    h.register_hook(p.hook("removes", lambda grad: _on_a_thread(handle.remove)))
    with p.backward():
        h.sum().backward()


@scenario(tags=("hooks", "threads"))
def hook_is_added_by_another_thread(p: Probe) -> None:
    """A hook that another thread registers while the backward runs does run."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    h = x * 2
    late = p.hook("late", lambda grad: grad * 2)
    h.register_hook(p.hook("adds", lambda grad: _on_a_thread(lambda: x.register_hook(late))))
    with p.backward():
        h.sum().backward()


@scenario(tags=("hooks", "threads", "accumulate"))
def post_accumulate_hook_is_removed_by_another_thread(p: Probe) -> None:
    """The same for a hook after the accumulation."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    handle = x.register_post_accumulate_grad_hook(p.hook("removed", kind="post_accumulate"))
    h = x * 2
    h.register_hook(p.hook("removes", lambda grad: _on_a_thread(handle.remove)))
    for _ in range(2):
        with p.backward():
            h.sum().backward(retain_graph=True)


@scenario(tags=("hooks", "steps"))
def hook_is_added_in_each_of_many_runs(p: Probe) -> None:
    """A hook that registers another in every step, also in the one in which a compiler settles."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for step in range(6):
        h = x.sin()
        late = p.hook(f"late {step}", lambda grad: grad * 2)
        h.exp().register_hook(p.hook("unused"))
        y = h * 3
        y.register_hook(p.hook("adds", lambda grad, h=h, late=late: h.register_hook(late) and None))
        with p.backward():
            y.sum().backward()


def _frozen(p: Probe, register: Callable[[Tensor], object], steps: int = 3) -> None:
    """A leaf with a hook is frozen between forward and backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    w = p.leaf("w", p.randn(3, requires_grad=True))
    register(x)
    for _ in range(steps):
        y = (x.sin() * w).sum()
        x.requires_grad_(False)
        with p.backward():
            y.backward()
        x.requires_grad_(True)


@scenario(tags=("hooks", "accumulate"))
def frozen_leaf_has_a_post_accumulate_hook(p: Probe) -> None:
    """Nothing is accumulated into a leaf that was frozen after the forward, but its hook is called."""
    hook = p.hook("post", lambda x: None, kind="post_accumulate")
    _frozen(p, lambda x: x.register_post_accumulate_grad_hook(hook))


@scenario(tags=("hooks", "accumulate"))
def frozen_leaf_has_a_tensor_hook(p: Probe) -> None:
    """The same for a hook on the gradient."""
    _frozen(p, lambda x: x.register_hook(p.hook("tensor")))


@scenario(tags=("hooks", "accumulate"))
def frozen_leaf_has_no_hook(p: Probe) -> None:
    """A leaf that was frozen after the forward keeps its `.grad`."""
    _frozen(p, lambda x: None)


def _relaid(p: Probe, relay: Callable[[Tensor], Tensor], steps: int = 4) -> None:
    """A hook returns the gradient in another layout, in every second step."""
    x = p.leaf("x", p.randn(2, 4, 4, 4, requires_grad=True))
    w = p.leaf("w", p.randn(4, requires_grad=True))
    for step in range(steps):
        h = nn.functional.group_norm(x.sin(), 2) * w.view(1, 4, 1, 1)
        if step % 2:
            h.register_hook(p.hook("relays", relay))
        else:
            h.register_hook(p.hook("looks"))
        x.grad = w.grad = None
        with p.backward():
            h.exp().sum().backward()
        grad: Any = x.grad
        p.event("strides", grad.stride())


@scenario(tags=("hooks", "layout"))
def hook_returns_a_channels_last_gradient(p: Probe) -> None:
    """What a hook returns in another memory format is read as it lies."""
    _relaid(p, lambda grad: grad.contiguous(memory_format=torch.channels_last))


@scenario(tags=("hooks", "layout"))
def hook_returns_a_transposed_gradient(p: Probe) -> None:
    """The same for a transposed copy."""
    _relaid(p, lambda grad: grad.transpose(2, 3).contiguous().transpose(2, 3))


@scenario(tags=("hooks", "layout"))
def hook_returns_an_expanded_gradient(p: Probe) -> None:
    """The same for a gradient that overlaps itself."""
    _relaid(p, lambda grad: grad[:1].expand_as(grad))


@scenario(tags=("hooks", "layout"))
def hook_returns_a_strided_gradient(p: Probe) -> None:
    """The same for every second element of something larger."""
    _relaid(p, lambda grad: torch.stack([grad, grad * 2], -1)[..., 0])


@scenario(tags=("hooks", "layout"))
def hook_returns_a_flipped_gradient(p: Probe) -> None:
    """The same for a gradient that was copied after a flip, with an offset into its memory."""
    _relaid(p, lambda grad: torch.cat([grad, grad])[grad.shape[0] :])


@scenario(tags=("function",))
def function_clears_its_saved_tensors(p: Probe) -> None:
    """What a Function has cleared it cannot read any more."""

    class Clears(Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a)
            return a * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ctx.maybe_clear_saved_tensors()
            try:
                p.event("read", ctx.saved_tensors[0])
            except Exception as error:
                p.event("error", type(error).__name__)
            return grad * 2

    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        Clears.apply(x).sum().backward()


@scenario(tags=("function", "warnings"))
def function_reads_saved_variables(p: Probe) -> None:
    """The deprecated name of the saved tensors warns."""

    class Old(Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_backward(a)
            return a.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                (a,) = ctx.saved_variables
            p.event("warned", [warning.category.__name__ for warning in seen])
            return grad * a.exp()

    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        Old.apply(x).sum().backward()


@scenario(tags=("accumulate", "training"))
def graphs_that_never_repeat(p: Probe) -> None:
    """Each step has a graph of its own, as with a mixture of experts."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for number in range(24):
        h = x
        for bit in format(number + 32, "b"):
            h = h.sin() if bit == "1" else h.tanh()
        h.register_hook(p.hook("h"))
        with p.backward():
            (h * x).sum().backward()
