"""Where a backward starts and where it ends: roots, their gradients, and `inputs=`.

In: a probe. Out: the results of `backward` and `autograd.grad` in all their forms, with hooks on the way.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


@scenario(tags=("roots", "order"))
def several_roots(p: Probe) -> None:
    """Several roots start together; their nodes run by sequence number, not in the order of the list."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    first, second = x.sin().sum(), x.cos().sum()
    for name, root in (("first", first), ("second", second)):
        root.register_hook(p.hook(name))
    with p.backward():
        torch.autograd.backward([first, second])


@scenario(tags=("roots",))
def roots_that_feed_each_other(p: Probe) -> None:
    """A root that also lies below another root gets both gradients before it runs."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    lower = x.sin()
    upper = lower.exp()
    lower.register_hook(p.hook("lower"))
    with p.backward():
        torch.autograd.backward([lower, upper], [p.randn(3), p.randn(3)])


@scenario(tags=("roots",))
def same_root_twice(p: Probe) -> None:
    """A root that is named twice contributes twice."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    y.register_hook(p.hook("y"))
    with p.backward():
        torch.autograd.backward([y, y], [p.randn(3), p.randn(3)])


@scenario(tags=("roots",))
def given_root_gradients(p: Probe) -> None:
    """Roots of any shape start with the gradients that are given for them; None stands for one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    wide, loss = x.outer(x), x.sum()
    with p.backward():
        torch.autograd.backward([wide, loss], [p.randn(3, 3), None])


@scenario(tags=("roots",))
def leaf_as_root(p: Probe) -> None:
    """A leaf can be a root: its gradient goes straight into `.grad`, through its hooks."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_hook(p.hook("x", lambda g: g * 2))
    with p.backward():
        torch.autograd.backward([x, x.sin()], [p.randn(3), p.randn(3)])


@scenario(tags=("roots", "errors"))
def root_without_scalar(p: Probe) -> None:
    """A root with several elements and no gradient given is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        x.sin().backward()


@scenario(tags=("roots", "errors"))
def root_without_history(p: Probe) -> None:
    """A root that requires no gradient is a RuntimeError."""
    with p.backward():
        p.randn(3).sum().backward()


@scenario(tags=("roots", "errors"))
def root_gradient_of_another_shape(p: Probe) -> None:
    """A root gradient of the wrong shape is a RuntimeError, before any hook runs."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("y"))
    with p.backward():
        y.backward(p.randn(4))


@scenario(tags=("inputs",))
def backward_into_some_leaves(p: Probe) -> None:
    """With `inputs=` only the named leaves are accumulated, and hooks of the others are not called."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    for name, leaf in (("x", x), ("y", y)):
        leaf.register_hook(p.hook(name))
    inner = y.sin()
    inner.register_hook(p.hook("inner"))
    with p.backward():
        (x.exp() * inner).sum().backward(inputs=[x])


@scenario(tags=("inputs",))
def backward_into_an_intermediate(p: Probe) -> None:
    """`inputs=` may name an inner tensor, whose `.grad` is then set; the backward goes no further."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("y", lambda g: g * 2))
    with p.backward():
        y.exp().sum().backward(inputs=[y], retain_graph=True)
        y.exp().sum().backward(inputs=[y, x])
    p.value("y.grad", y.grad)


@scenario(tags=("inputs", "hooks"))
def captured_gradient_and_hooks(p: Probe) -> None:
    """The gradient of an inner tensor is captured after tensor hooks and before node hooks."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("tensor", lambda g: g * 2))
    node_of(y).register_prehook(p.hook("pre", lambda grads: (grads[0] * 100,), kind="node_pre"))
    with p.backward():
        p.value("grads", torch.autograd.grad(y.exp().sum(), [y, x]))


@scenario(tags=("inputs", "hooks"))
def captured_gradient_of_a_hooked_leaf(p: Probe) -> None:
    """`autograd.grad` with respect to a leaf runs the leaf's tensor hooks, and does not touch `.grad`."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_hook(p.hook("x", lambda g: g * 2))
    with p.backward():
        p.value("grad", torch.autograd.grad(x.exp().sum(), x))


@scenario(tags=("inputs",))
def gradients_of_leaf_and_intermediates(p: Probe) -> None:
    """Gradients with respect to a leaf and all tensors above it come out of one pass."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y * x
    with p.backward():
        p.value("grads", torch.autograd.grad((z * y).sum(), [z, x, y]))


@scenario(tags=("inputs", "undefined"))
def unused_input_allowed(p: Probe) -> None:
    """An input that the loss does not depend on gives None with `allow_unused`, zeros when materialised."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    loss = x.sin().sum()
    with p.backward():
        p.value("none", torch.autograd.grad(loss, [x, y], allow_unused=True, retain_graph=True))
        p.value("zeros", torch.autograd.grad(loss, [x, y], materialize_grads=True))


@scenario(tags=("inputs", "errors"))
def unused_input_refused(p: Probe) -> None:
    """Without `allow_unused` an input outside the graph is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    with p.backward():
        torch.autograd.grad(x.sin().sum(), [x, y])


@scenario(tags=("retain-graph",))
def retained_graph_three_times(p: Probe) -> None:
    """A retained graph can be differentiated again and again, with other root gradients each time."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp() * x
    y.register_hook(p.hook("y"))
    with p.backward():
        for i in range(3):
            y.backward(p.randn(3), retain_graph=i < 2)
            p.value(f"after{i}", x.grad)


@scenario(tags=("retain-graph", "errors"))
def graph_used_up(p: Probe) -> None:
    """A second backward over a graph that was not retained is a RuntimeError, after hooks above it ran."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    z = y * 2
    z.register_hook(p.hook("z"))
    with p.backward():
        z.sum().backward()
        z.sum().backward()


@scenario(tags=("inputs", "vmap"))
def batched_root_gradients(p: Probe) -> None:
    """`is_grads_batched` runs one backward for a batch of root gradients: here a whole Jacobian."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin() * x.sum()
    basis = torch.eye(3, dtype=p.dtype, device=p.device)
    with p.backward():
        p.value("jacobian", torch.autograd.grad(y, x, basis, is_grads_batched=True))


@scenario(tags=("inputs", "roots"))
def gradient_edges(p: Probe) -> None:
    """Gradient edges stand for tensors as inputs and as roots, also after the tensors are gone."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    edge = get_gradient_edge(y)
    root = get_gradient_edge(y.exp().sum())
    del y
    with p.backward():
        p.value("by_input", torch.autograd.grad(root, [edge], p.tensor(1.0), retain_graph=True))
        torch.autograd.backward(root, p.tensor(2.0))


@scenario(tags=("inputs", "roots", "modes"))
def views_that_only_say_that_they_require_grad(p: Probe) -> None:
    """A view made under `no_grad` has no node: as an input it gets no gradient, as a root it is refused."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    for is_leaf in (False, True):
        h = x.sin()
        with torch.no_grad():
            view = h.t()
        if is_leaf:
            view.requires_grad_()
        calls = {
            "input": ([h.sum()], [view]),
            "inputs": ([h.sum(), h.exp().sum()], [view, x]),
            "root": ([view.sum()], [x]),
            "roots": ([h.sum(), view.sum()], [x]),
            "no node": ([view], [x]),
            "no node in several": ([h, view], [x]),
        }
        for name, (roots, inputs) in calls.items():
            cotangents = [torch.ones_like(root) for root in roots]
            try:
                with p.backward():
                    grads = torch.autograd.grad(
                        roots, inputs, cotangents, retain_graph=True, allow_unused=True
                    )
                p.event(f"{name} {is_leaf}", [None if grad is None else tuple(grad.shape) for grad in grads])
                p.value(f"{name} {is_leaf} grads", [grad for grad in grads if grad is not None])
            except RuntimeError as error:
                p.event(f"{name} {is_leaf}", str(error)[:60])
