"""What node hooks hand back: wrong shapes and dtypes, None in the place of a gradient.

In: a probe. Out: eager's own exceptions, or how None runs on.
"""

from __future__ import annotations

import torch

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


@scenario(tags=("hooks", "node", "errors"))
def post_hook_returns_another_shape(p: Probe) -> None:
    """A post hook that changes the shape of a gradient is refused with a RuntimeError."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    y = x.sin()
    node_of(y).register_hook(p.hook("post", lambda gi, go: (gi[0].sum(),), kind="node_post"))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("hooks", "node", "errors"))
def post_hook_returns_another_dtype(p: Probe) -> None:
    """A post hook that changes the dtype of a gradient is refused with a RuntimeError."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    y = x.sin().exp()
    node_of(y).register_hook(p.hook("post", lambda gi, go: (gi[0].to(torch.bfloat16),), kind="node_post"))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("hooks", "node", "errors"))
def pre_hook_returns_another_shape(p: Probe) -> None:
    """A pre hook that changes the shape of a gradient is refused with a RuntimeError."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    y = x.sin().exp()
    node_of(y).register_prehook(p.hook("pre", lambda grads: (grads[0][:1],), kind="node_pre"))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("hooks", "node", "errors"))
def post_hook_returns_no_tuple(p: Probe) -> None:
    """A post hook must return a tuple or None; a bare tensor is refused."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    y = x.sin()
    node_of(y).register_hook(p.hook("post", lambda gi, go: gi[0], kind="node_post"))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("hooks", "node", "undefined"))
def pre_hook_stops_one_of_two_outputs(p: Probe) -> None:
    """A pre hook on a split turns one of two gradients into None; the node treats it as zeros."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    first, second = x.sin().split(2)
    node_of(first).register_prehook(p.hook("pre", lambda grads: (None, grads[1]), kind="node_pre"))
    with p.backward():
        (first * second).sum().backward()


@scenario(tags=("hooks", "node", "accumulate", "undefined"))
def accumulate_pre_hook_returns_none(p: Probe) -> None:
    """A pre hook on AccumulateGrad that returns None leaves `.grad` unset; later hooks still run."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    node = node_of(x)
    node.register_prehook(p.hook("pre", lambda grads: (None,), kind="node_pre"))
    node.register_hook(p.hook("post", kind="node_post"))
    x.register_post_accumulate_grad_hook(p.hook("acc", kind="post_acc"))
    with p.backward():
        (x * x).sum().backward()


@scenario(tags=("hooks", "node", "accumulate", "errors"))
def accumulate_pre_hook_returns_another_shape(p: Probe) -> None:
    """A pre hook on AccumulateGrad that changes the shape is refused with a RuntimeError."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    node = node_of(x)
    node.register_prehook(p.hook("pre", lambda grads: (grads[0].sum(),), kind="node_pre"))
    with p.backward():
        (x * x).sum().backward()


@scenario(tags=("hooks", "node", "accumulate", "errors"))
def accumulate_post_hook_returns_a_gradient(p: Probe) -> None:
    """AccumulateGrad has no outputs, so a post hook that returns a gradient is a RuntimeError."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    node = node_of(x)
    node.register_hook(p.hook("post", lambda gi, go: (go[0],), kind="node_post"))
    with p.backward():
        (x * x).sum().backward()


@scenario(tags=("hooks", "accumulate", "errors"))
def leaf_hook_returns_another_shape(p: Probe) -> None:
    """A hook on a leaf that changes the shape is refused, and `.grad` stays unset."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    x.register_hook(p.hook("x", lambda g: g[0]))
    with p.backward():
        (x * x).sum().backward()
