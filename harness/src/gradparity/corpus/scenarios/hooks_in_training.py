"""Hooks that come, go, fail and reach across the graph while a backward runs, over several steps.

In: a probe. Out: the order of calls and what is left behind, in the steps after a failure too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.corpus.scenarios.watch import watch_parameters
from gradparity.probe import Probe


@scenario(tags=("hooks", "multi-grad"))
def multi_grad_hook_that_removes_itself(p: Probe) -> None:
    """A hook over two leaves takes itself away in its first call and stays away in the second backward."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in ("x", "y"))
    handle: Any = register_multi_grad_hook(
        (x, y), p.hook("once", lambda grads: handle.remove(), kind="multi")
    )
    for _ in range(2):
        with p.backward():
            (x.sin() * y.cos()).sum().backward()


@scenario(tags=("hooks", "multi-grad", "order"))
def multi_grad_hooks_of_both_modes_with_others(p: Probe) -> None:
    """Where hooks of the modes "any" and "all" stand among tensor hooks and accumulate hooks."""
    x, y, z = (p.leaf(name, p.randn(2, requires_grad=True)) for name in ("x", "y", "z"))
    register_multi_grad_hook((x, y, z), p.hook("all", kind="multi"))
    register_multi_grad_hook((x, y, z), p.hook("any", kind="multi"), mode="any")
    for name, leaf in (("x", x), ("y", y), ("z", z)):
        leaf.register_hook(p.hook(name))
        leaf.register_post_accumulate_grad_hook(p.hook(f"{name}.acc", kind="post_acc"))
    for used in ((x, y, z), (x, z)):
        with p.backward():
            torch.cat([leaf.exp() for leaf in used]).sum().backward()


@scenario(tags=("hooks", "multi-grad", "inputs"))
def multi_grad_hooks_of_a_leaf_and_what_is_made_of_it(p: Probe) -> None:
    """Only the second's gradient is asked for: the hook is called with that, and with none of the leaf."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in ("x", "y"))
    for step in range(2):
        h = (x * y).tanh()
        register_multi_grad_hook((x, h), p.hook(f"leaf first {step}", kind="multi"))
        register_multi_grad_hook((h, y, x), p.hook(f"leaves last {step}", kind="multi"))
        with p.backward():
            p.value(f"grad {step}", torch.autograd.grad((h * x).exp().sum(), h)[0])


def _root_leaf(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [x], [x]


def _root(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [y := x.sin()], [y]


def _root_and_leaf(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [x, y := x.sin()], [y]


def _two_roots(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [y := x.sin()], [y, x.cos()]


def _part_of_a_root(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [*(halves := x.split(1))], [halves[0]]


def _below_a_root(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [x, y := x.sin()], [y * 2]


@scenario(tags=("hooks", "multi-grad", "inputs"))
def multi_grad_hooks_on_roots(p: Probe) -> None:
    """Eager does not count the node of an only root among those that it executes."""
    for make in (_root_leaf, _root, _root_and_leaf, _two_roots, _part_of_a_root, _below_a_root):
        for way in ("all", "any", "all of inputs", "grad"):
            x = p.leaf(f"{make.__name__} {way}", p.randn(2, requires_grad=True))
            hooked, roots = make(x)
            mode = "any" if way == "any" else "all"
            register_multi_grad_hook(hooked, p.hook(f"{make.__name__} {way}", kind="multi"), mode=mode)
            slopes = [torch.ones_like(root) for root in roots]
            with p.backward():
                if way == "grad":
                    if make is not _root_and_leaf and make is not _below_a_root:
                        p.value(way, torch.autograd.grad(roots, hooked, slopes, allow_unused=True))
                else:
                    inputs = hooked if way == "all of inputs" else None
                    torch.autograd.backward(roots, slopes, inputs=inputs)


@scenario(tags=("hooks", "module"))
def module_hooks_come_and_go_during_backward(p: Probe) -> None:
    """A module's backward hook takes another module's hook away, which had been called in the step before."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    first = model[0].register_full_backward_hook(p.hook("first", kind="module"))
    steps: list[int] = []

    def drop(*_: Any) -> None:
        if len(steps) == 2:
            first.remove()

    model[2].register_full_backward_pre_hook(p.hook("last.pre", drop, kind="module_pre"))
    for step in range(3):
        steps.append(step)
        x = p.leaf(f"x{step}", p.randn(2, 3, requires_grad=True))
        with p.backward():
            model(x).sum().backward()


@scenario(tags=("hooks", "module", "errors"))
def module_hook_that_raises_in_the_second_step(p: Probe) -> None:
    """The exception of a module's hook comes out of the second backward, after the layers behind it."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    watch_parameters(p, model)
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise LookupError("second step")

    model[1].register_full_backward_hook(p.hook("tanh", fail, kind="module"))
    for _ in range(2):
        with p.backward():
            model(p.randn(2, 3)).sum().backward()


@scenario(tags=("hooks", "accumulate"))
def accumulate_hook_raises_and_training_goes_on(p: Probe) -> None:
    """After a hook has raised, the gradients that were there stay, and the next step is an ordinary one."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)))
    watch_parameters(p, model)
    fail = [True]

    def once(_: Tensor) -> None:
        if fail.pop() if fail else False:
            raise KeyError("once")

    model[0].bias.register_post_accumulate_grad_hook(p.hook("fails", once, kind="post_acc"))
    for _ in range(2):
        try:
            with p.backward():
                model(p.randn(2, 3)).pow(2).sum().backward()
        except KeyError as error:
            p.event("caught", str(error))
        p.event("there", *(name for name, q in model.named_parameters() if q.grad is not None))


@scenario(tags=("hooks", "saved"))
def unpack_hook_raises_and_backward_runs_again(p: Probe) -> None:
    """An unpack hook fails in the first backward; the graph is kept, and the second goes through."""
    x = p.leaf("x", p.rand(3, requires_grad=True))
    fail = [True]

    def unpack(tensor: Tensor) -> Tensor:
        p.event("unpack")
        if fail and fail.pop():
            raise OSError("disk")
        return tensor

    with saved_tensors_hooks(lambda t: t.clone(), unpack):
        y = x.sin().exp()
    y.register_hook(p.hook("y"))
    for _ in range(2):
        try:
            with p.backward():
                y.sum().backward(retain_graph=True)
        except OSError as error:
            p.event("caught", str(error))


def _numbered(number: int, tensor: Tensor) -> tuple[int, Tensor]:
    return number, tensor


@scenario(tags=("hooks", "saved", "order"))
def unpack_hooks_between_hooks_of_three_layers(p: Probe) -> None:
    """Each layer's saved tensors are unpacked after the hooks of the layer behind it have run."""
    model = p.module(nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(2, 2), nn.Sigmoid())]))
    watch_parameters(p, model)
    h = p.leaf("x", p.randn(2, 2, requires_grad=True))

    def unpack(packed: tuple[int, Tensor]) -> Tensor:
        p.event("unpack", packed[0])
        return packed[1]

    for number, layer in enumerate(model):
        with saved_tensors_hooks(partial(_numbered, number), unpack):
            h = layer(h)
        h.register_hook(p.hook(f"out{number}"))
    with p.backward():
        h.sum().backward()


@scenario(tags=("hooks", "callbacks", "saved"))
def callback_queued_while_unpacking(p: Probe) -> None:
    """A callback that an unpack hook queues runs after the last accumulate hook."""
    x = p.leaf("x", p.rand(3, requires_grad=True))
    x.register_post_accumulate_grad_hook(p.hook("x.acc", kind="post_acc"))

    def unpack(tensor: Tensor) -> Tensor:
        p.event("unpack")
        Variable._execution_engine.queue_callback(p.hook("done", kind="callback"))
        return tensor

    with saved_tensors_hooks(lambda t: t, unpack):
        y = x.exp()
    with p.backward():
        (y * 2).sum().backward()


@scenario(tags=("hooks", "callbacks", "function"))
def callback_queued_by_a_functions_backward(p: Probe) -> None:
    """A Function's backward queues a callback in every step; each runs at the end of its own backward."""

    class Queues(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Variable._execution_engine.queue_callback(p.hook("done", kind="callback"))
            return grad * 2

    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_hook(p.hook("x"))
    for _ in range(2):
        with p.backward():
            Queues.apply(Queues.apply(x).sin()).sum().backward()


@scenario(tags=("hooks", "node"))
def node_hooks_removed_by_a_hook_below_and_above(p: Probe) -> None:
    """A hook takes hooks of nodes away that have run already, and of nodes that have not."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    a = x.sin()
    b = a.exp()
    c = b * 2
    handles = [node_of(t).register_hook(p.hook(n, kind="node_post")) for n, t in (("a", a), ("c", c))]

    def drop(_: Tensor) -> None:
        for handle in handles:
            handle.remove()

    b.register_hook(p.hook("b", drop))
    with p.backward():
        c.sum().backward(retain_graph=True)
        c.sum().backward()


@scenario(tags=("hooks", "accumulate", "training", "steps"))
def optimizer_in_backward_with_tied_and_frozen_weights(p: Probe) -> None:
    """Each parameter is stepped and its gradient dropped as it arrives: tied once, frozen never."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    model[2].requires_grad_(False)
    tied = model[0].weight

    def step(param: Tensor) -> None:
        p.event("alive", sum(q.grad is not None for q in model.parameters()))
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for name, param in model.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(p.hook(name, step, kind="post_acc"))
    for _ in range(3):
        h = model(p.randn(2, 3))
        with p.backward():
            (h @ tied).pow(2).mean().backward()
    p.value("tied", tied.detach())
