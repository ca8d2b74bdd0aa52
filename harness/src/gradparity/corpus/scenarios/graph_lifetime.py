"""How long a graph lives: what a backward frees, what it leaves, and what can still be differentiated.

In: a probe. Out: gradients of graphs that are used in stages, again, or from inside their own backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


@scenario(tags=("retain-graph", "inputs"))
def backward_in_two_stages(p: Probe) -> None:
    """The gradient of an activation is taken first, and passed on later: the lower part is still whole."""
    lower, upper = p.module(nn.Linear(3, 3), "lower"), p.module(nn.Linear(3, 1), "upper")
    hidden = lower(p.randn(2, 3)).tanh()
    loss = upper(hidden).pow(2).sum()
    with p.backward():
        (grad,) = torch.autograd.grad(loss, hidden)
        p.value("grad", grad)
        hidden.backward(grad * 2)


@scenario(tags=("retain-graph", "inputs", "hooks"))
def pipeline_of_three_stages(p: Probe) -> None:
    """Pipeline stages: each gives its parameters' gradients and that of its input to the stage before."""
    stages = [p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), f"stage{i}") for i in range(3)]
    ends = [p.randn(2, 3, requires_grad=True)]
    for i, stage in enumerate(stages):
        ends.append(stage(ends[-1]))
        ends[-1].register_hook(p.hook(f"stage{i}"))
    grad = torch.ones_like(ends[-1])
    with p.backward():
        for i in (2, 1, 0):
            wanted = [ends[i], *stages[i].parameters()]
            grad, *rest = torch.autograd.grad(ends[i + 1], wanted, grad)
            p.value(f"stage{i}", (grad, *rest))


@scenario(tags=("retain-graph", "inputs"))
def whole_backward_after_a_partial_one(p: Probe) -> None:
    """A backward that stopped at the first node freed nothing below it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    z = y * 2
    with p.backward():
        torch.autograd.grad(z.sum(), z)
        z.sum().backward()


@scenario(tags=("retain-graph", "errors"))
def upper_part_freed_lower_part_whole(p: Probe) -> None:
    """After a partial backward the lower part can be differentiated; the part that ran is used up."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    z = y.sin()
    with p.backward():
        p.value("upper", torch.autograd.grad(z.sum(), y))
        y.sum().backward()
        z.sum().backward()


@scenario(tags=("retain-graph",))
def second_backward_refused_and_caught(p: Probe) -> None:
    """A second backward that is refused half way leaves what it had accumulated by then."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    w = p.leaf("w", p.randn(3, requires_grad=True))
    y = x.exp()
    with p.backward():
        y.sum().backward()
        try:
            (y * w).sum().backward()
        except RuntimeError:
            p.event("caught", x.grad, w.grad)


@scenario(tags=("retain-graph", "shared"))
def two_heads_on_one_trunk(p: Probe) -> None:
    """The first loss keeps the trunk's graph for the second one; each accumulates into the trunk."""
    trunk, first, second = (p.module(nn.Linear(3, 3), name) for name in ("trunk", "first", "second"))
    hidden = trunk(p.randn(2, 3)).sin()
    hidden.register_hook(p.hook("hidden"))
    losses = [first(hidden).pow(2).sum(), second(hidden).abs().sum()]
    with p.backward():
        losses[0].backward(retain_graph=True)
        p.value("between", trunk.weight.grad)
        losses[1].backward()


@scenario(tags=("retain-graph", "in-place"))
def data_changed_between_two_backwards(p: Probe) -> None:
    """What a retained graph has saved is read anew in each backward, after a change through `.data` too."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin() * x
    with p.backward():
        y.sum().backward(retain_graph=True)
        p.value("first", x.grad)
        x.data.mul_(3)
        y.sum().backward()


@scenario(tags=("retain-graph", "hooks", "reentrant"))
def gradient_of_the_running_graph_in_a_hook(p: Probe) -> None:
    """A hook may differentiate, with `retain_graph`, the part of its own graph that has not run yet."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y.exp()

    def look_ahead(grad: Tensor) -> None:
        p.event("ahead", torch.autograd.grad(y, x, grad, retain_graph=True)[0])

    z.register_hook(p.hook("z", look_ahead))
    with p.backward():
        z.sum().backward()


@scenario(tags=("retain-graph", "errors"))
def saved_tensors_read_after_backward(p: Probe) -> None:
    """A node's saved tensors can be read before a backward and not after it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    node: Any = node_of(y)
    p.value("before", node._saved_self)
    with p.backward():
        y.sum().backward()
    p.value("after", node._saved_self)
