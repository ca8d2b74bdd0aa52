"""What the engine tells a hook about itself: callbacks at the end, the current task, node and grad mode.

In: a probe. Out: events about the engine's state inside hooks, and the order of final callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import FunctionCtx

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


def _queue(callback: Callable[[], Any]) -> None:
    """Ask the engine to call ``callback`` at the end of the backward that is running."""
    Variable._execution_engine.queue_callback(callback)


@scenario(tags=("callbacks",), issue="pytorch#121071")
def queued_callback_runs_at_the_end(p: Probe) -> None:
    """A callback that a hook queues runs once, after all nodes and hooks, before backward returns."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    done = p.hook("done", lambda: p.event("x.grad", x.grad), kind="callback")
    y.register_hook(p.hook("y", lambda g: _queue(done)))
    x.register_post_accumulate_grad_hook(p.hook("x", kind="post_acc"))
    with p.backward():
        y.exp().sum().backward()
    p.event("returned")


@scenario(tags=("callbacks",), issue="pytorch#121071")
def callbacks_from_hooks_of_every_kind(p: Probe) -> None:
    """Callbacks run in the order in which tensor, node and accumulate hooks queued them."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def queueing(site: str) -> Callable[..., None]:
        return lambda *args: _queue(p.hook(f"{site}.done", kind="callback"))

    y.register_hook(p.hook("tensor", queueing("tensor")))
    node_of(y).register_prehook(p.hook("pre", queueing("pre"), kind="node_pre"))
    node_of(y).register_hook(p.hook("post", queueing("post"), kind="node_post"))
    x.register_post_accumulate_grad_hook(p.hook("acc", queueing("acc"), kind="post_acc"))
    with p.backward():
        y.sum().backward()


@scenario(tags=("callbacks",), issue="pytorch#121071")
def callback_that_queues_a_callback(p: Probe) -> None:
    """A callback may queue another one, which still runs in the same backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    last = p.hook("last", kind="callback")
    first = p.hook("first", lambda: _queue(last), kind="callback")
    y.register_hook(p.hook("y", lambda g: _queue(first)))
    with p.backward():
        y.sum().backward()


@scenario(tags=("callbacks", "errors"), issue="pytorch#121071")
def callback_that_raises(p: Probe) -> None:
    """The exception of a final callback comes out of backward; gradients are complete by then."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def refuse() -> None:
        raise LookupError("refused")

    y.register_hook(p.hook("y", lambda g: _queue(refuse)))
    with p.backward():
        y.sum().backward()


@scenario(tags=("callbacks",), issue="pytorch#121071")
def average_in_a_final_callback(p: Probe) -> None:
    """The way of sharded data parallelism: the first hook queues one callback that rescales all gradients."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    queued: list[int] = []

    def finish() -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(2)
        queued.clear()

    def queue_once(param: Tensor) -> None:
        if not queued:
            queued.append(1)
            _queue(p.hook("finish", finish, kind="callback"))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, queue_once, kind="post_acc"))
    with p.backward():
        for _ in range(2):
            model(p.randn(2, 3)).sum().backward()


@scenario(tags=("callbacks", "errors"))
def callback_outside_of_backward(p: Probe) -> None:
    """Queueing a callback where no backward runs is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        x.sum().backward()
        _queue(p.hook("never", kind="callback"))


@scenario(tags=("engine-state",))
def graph_task_is_set_in_hooks(p: Probe) -> None:
    """Inside hooks of all kinds there is a current graph task, the same one; outside there is none."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    seen: list[int] = []

    def look(*args: Any) -> None:
        seen.append(torch._C._current_graph_task_id())
        p.event("inside", seen[-1] != -1, seen[-1] == seen[0])

    y.register_hook(p.hook("tensor", look))
    node_of(y).register_prehook(p.hook("pre", look, kind="node_pre"))
    node_of(y).register_hook(p.hook("post", look, kind="node_post"))
    x.register_post_accumulate_grad_hook(p.hook("acc", look, kind="post_acc"))
    with p.backward():
        y.sum().backward()
    p.event("outside", torch._C._current_graph_task_id() == -1)


class NamesItself(torch.autograd.Function):
    """Identity that reports the engine's current node from its backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, record: Callable[..., Any]) -> Tensor:
        ctx.record = record
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        node = torch._C._current_autograd_node()
        ctx.record(None if node is None else node.name())
        return grad, None


@scenario(tags=("engine-state",))
def current_node_in_hooks(p: Probe) -> None:
    """The engine's current node in a hook, and in a Function's backward, is the node that it belongs to."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = NamesItself.apply(y, p.hook("backward", kind="function"))

    def look(*args: Any) -> None:
        node = torch._C._current_autograd_node()
        p.event("node", None if node is None else node.name())

    z.register_hook(p.hook("z", look))
    y.register_hook(p.hook("y", look))
    node_of(y).register_prehook(p.hook("y.pre", look, kind="node_pre"))
    node_of(y).register_hook(p.hook("y.post", look, kind="node_post"))
    x.register_hook(p.hook("x", look))
    x.register_post_accumulate_grad_hook(p.hook("x.acc", look, kind="post_acc"))
    with p.backward():
        z.sum().backward()


@scenario(tags=("engine-state",))
def node_metadata_in_hooks(p: Probe) -> None:
    """What forward code left in a node's metadata can be read in hooks on that node."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    node: Any = node_of(y)
    node.metadata["layer"] = "sine"

    def look(grads: Any) -> None:
        current: Any = torch._C._current_autograd_node()
        p.event("layer", None if current is None else current.metadata.get("layer", "missing"))

    node.register_prehook(p.hook("pre", look, kind="node_pre"))
    with p.backward():
        y.sum().backward()


@scenario(tags=("engine-state", "higher-order"))
def grad_mode_inside_hooks(p: Probe) -> None:
    """Grad mode inside hooks and Functions is that of the backward: on only under `create_graph`."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    record = p.hook("backward", lambda name: p.event("function", torch.is_grad_enabled()), kind="function")
    y = NamesItself.apply(x.exp(), record)

    def look(*args: Any) -> None:
        p.event("grad_mode", torch.is_grad_enabled())

    y.register_hook(p.hook("tensor", look))
    node_of(y).register_prehook(p.hook("pre", look, kind="node_pre"))
    node_of(y).register_hook(p.hook("post", look, kind="node_post"))
    with p.backward():
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.autograd.grad(y.sum(), x, create_graph=True)
