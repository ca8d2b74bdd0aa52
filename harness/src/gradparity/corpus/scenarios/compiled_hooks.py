"""A compiled forward and hooks around it: order of accumulation, what is visible, hooks that come later.

In: a probe, whose `compile` is the identity for eager. Out: hook events, which compiling must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


def _three_layers(p: Probe) -> nn.Module:
    """Return three linear layers with ReLU after each, registered with the probe."""
    return p.module(nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU())]))


@scenario(tags=("compiled", "hooks", "accumulate", "order"), issue="pytorch#144376")
def accumulate_hooks_after_a_compiled_forward(p: Probe) -> None:
    """Post-accumulate hooks of a compiled network run from the last layer to the first."""
    model = _three_layers(p)
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    out = p.compile(model)(p.randn(2, 4))
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "hooks", "accumulate", "visibility"), issue="pytorch#109774")
def gradients_visible_after_a_compiled_forward(p: Probe) -> None:
    """When a parameter's hook runs, the gradients of earlier layers are not there yet."""
    model = _three_layers(p)

    def look(param: Tensor) -> None:
        p.event("set", *(name for name, q in model.named_parameters() if q.grad is not None))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, look, kind="post_acc"))
    out = p.compile(model)(p.randn(2, 4))
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "hooks", "accumulate", "visibility"), issue="pytorch#109774")
def optimizer_in_backward_after_a_compiled_forward(p: Probe) -> None:
    """Stepping and freeing in the hook leaves one gradient alive at a time, over three steps."""
    model = _three_layers(p)
    run = p.compile(model)

    def step(param: Tensor) -> None:
        p.event("alive", sum(q.grad is not None for q in model.parameters()))
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, step, kind="post_acc"))
    for _ in range(3):
        loss = run(p.randn(2, 4)).pow(2).mean()
        with p.backward():
            loss.backward()


@scenario(tags=("compiled", "hooks", "node", "accumulate"), issue="pytorch#138538")
def accumulate_node_hooks_after_a_compiled_forward(p: Probe) -> None:
    """Post hooks on AccumulateGrad nodes, as DDP sets them, run from the last layer to the first."""
    model = _three_layers(p)
    nodes = {name: node_of(param) for name, param in model.named_parameters()}
    for name, node in nodes.items():
        node.register_hook(p.hook(name, kind="node_post"))
    out = p.compile(model)(p.randn(2, 4))
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "hooks", "order"), issue="pytorch#138553")
def leaf_hooks_after_a_compiled_forward(p: Probe) -> None:
    """Tensor hooks on parameters of two branches, which also change their gradients, run in node order."""
    left, right = p.module(nn.Linear(3, 3), "left"), p.module(nn.Linear(3, 3), "right")
    for name, layer in (("left", left), ("right", right)):
        layer.weight.register_hook(p.hook(f"{name}.weight", lambda g: g * 2))
        layer.bias.register_hook(p.hook(f"{name}.bias", lambda g: g + 1))
    out = p.compile(lambda x: left(x).sin() * right(x.cos()).exp())(p.randn(2, 3))
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "hooks", "saved"), issue="pytorch#116221")
def saved_tensor_hooks_around_a_compiled_forward(p: Probe) -> None:
    """Hooks that double what was saved change the gradient of a compiled function as well."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    run = p.compile(lambda a: a.pow(2))
    with saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        y = run(x)
    with p.backward():
        y.sum().backward()


@scenario(tags=("compiled", "hooks", "module"), issue="pytorch#117265")
def module_hooks_added_after_the_first_call(p: Probe) -> None:
    """A module hook that is added after the first compiled call runs in the second."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    run = p.compile(model)
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    for step in range(2):
        if step == 1:
            model[0].register_full_backward_hook(p.hook("linear", kind="module"))
        out = run(x)
        with p.backward():
            out.sum().backward()


@scenario(tags=("compiled", "callbacks"), issue="pytorch#121071")
def callback_after_a_compiled_forward(p: Probe) -> None:
    """A callback queued by the first accumulate hook runs after the last one."""
    model = _three_layers(p)
    queued: list[int] = []

    def queue_once(param: Tensor) -> None:
        if not queued:
            queued.append(1)
            Variable._execution_engine.queue_callback(p.hook("finish", kind="callback"))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, queue_once, kind="post_acc"))
    out = p.compile(model)(p.randn(2, 4))
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "hooks", "errors"))
def bad_hook_results_after_a_compiled_forward(p: Probe) -> None:
    """A hook on a compiled output that returns another shape is refused with a RuntimeError."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    y = p.compile(torch.sin)(x)
    y.register_hook(p.hook("y", lambda g: g.sum(0)))
    with p.backward():
        y.exp().sum().backward()


@scenario(tags=("compiled", "modes", "errors"), issue="pytorch#149897")
def anomaly_in_a_compiled_function(p: Probe) -> None:
    """A NaN in the backward of a compiled function is a RuntimeError under anomaly detection."""
    x = p.leaf("x", p.tensor([1.0, -1.0], requires_grad=True))
    y = p.compile(torch.sqrt)(x)
    with torch.autograd.set_detect_anomaly(True), p.backward():
        (y * 0.0).nansum().backward()


@scenario(tags=("compiled", "engine-state"))
def engine_state_after_a_compiled_forward(p: Probe) -> None:
    """Hooks after a compiled forward run inside a graph task, without grad mode."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(torch.sin)(x)

    def look(*args: Any) -> None:
        p.event("state", torch._C._current_graph_task_id() != -1, torch.is_grad_enabled())

    y.register_hook(p.hook("y", look))
    x.register_hook(p.hook("x", look))
    x.register_post_accumulate_grad_hook(p.hook("x.acc", look, kind="post_acc"))
    with p.backward():
        y.exp().sum().backward()


def _compiled_once(p: Probe) -> Callable[[Tensor], Tensor]:
    """Return a compiled function that has already made one ordinary step."""
    run: Callable[[Tensor], Tensor] = p.compile(lambda a: (a.sin() * a).exp())
    out = run(p.randn(3, requires_grad=True))
    with p.backward():
        out.sum().backward()
    return run


@scenario(tags=("compiled", "hooks"))
def hooks_that_come_and_go_between_steps(p: Probe) -> None:
    """Tensor hooks on the output of a function that is compiled already, present in every other step."""
    run = _compiled_once(p)
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for step in range(4):
        out = run(x)
        if step % 2:
            out.register_hook(p.hook(f"step{step}", lambda g: g * 2))
        with p.backward():
            out.sum().backward()


@scenario(tags=("compiled", "hooks", "in-place"))
def compiled_hook_of_a_leaf_in_place(p: Probe) -> None:
    """A hook changes a leaf's gradient in place; a branch that gets the same tensor sees the change."""
    linear = p.module(nn.Linear(3, 3))
    shift, other = (p.leaf(name, p.randn(2, 3, requires_grad=True)) for name in ("shift", "other"))
    shift.register_hook(lambda grad: grad.clamp_(-0.1, 0.1))
    for fn in (lambda a: linear(a) + shift, lambda a: (linear(a) + shift.view(6).view(2, 3)) + other):
        run = p.compile(fn)
        with p.backward():
            run(p.randn(2, 3)).square().sum().backward()
