"""Compiled forwards as parts of larger graphs: reused, between eager parts, of several sizes, checkpointed.

In: a probe, whose `compile` is the identity for eager. Out: hook timelines and gradients, which compiling
must not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.watch import watch_parameters
from gradparity.probe import Probe


@scenario(tags=("compiled", "hooks", "shared"))
def compiled_block_used_three_times(p: Probe) -> None:
    """One compiled layer applied three times: its parameters get one sum, hooks run last use first."""
    layer = p.module(nn.Linear(3, 3))
    watch_parameters(p, layer)
    run, h = p.compile(layer), p.leaf("x", p.randn(2, 3, requires_grad=True))
    for use in range(3):
        h = run(h).tanh()
        h.register_hook(p.hook(f"use{use}"))
    with p.backward():
        h.pow(2).sum().backward()


@scenario(tags=("compiled", "hooks", "order"))
def compiled_and_eager_layers_in_turn(p: Probe) -> None:
    """Every second layer is compiled; accumulate hooks run from the last layer to the first all the same."""
    layers = [p.module(nn.Linear(3, 3), f"layer{i}") for i in range(4)]
    for i, layer in enumerate(layers):
        watch_parameters(p, layer, f"layer{i}")
    calls = [p.compile(layer) if i % 2 else layer for i, layer in enumerate(layers)]
    h = p.randn(2, 3)
    for call in calls:
        h = call(h).relu()
    with p.backward():
        h.sum().backward()


@scenario(tags=("compiled", "hooks", "branching", "order"))
def compiled_branches_that_meet(p: Probe) -> None:
    """Two compiled branches and an eager one meet; their hooks run last branch first."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    first = p.compile(lambda a: (a * 2).sin())(x)
    middle = x.exp()
    last = p.compile(lambda a: (a * 3).cos())(x)
    for name, tensor in (("first", first), ("middle", middle), ("last", last), ("x", x)):
        tensor.register_hook(p.hook(name))
    with p.backward():
        (last * middle + first).sum().backward()


@scenario(tags=("compiled", "hooks", "shared"))
def compiled_part_shares_a_weight_with_an_eager_part(p: Probe) -> None:
    """A weight is used inside and outside of a compiled function, and its hook sees the sum once."""
    weight = p.leaf("weight", p.randn(3, 3, requires_grad=True))
    weight.register_hook(p.hook("weight"))
    weight.register_post_accumulate_grad_hook(p.hook("weight.acc", kind="post_acc"))
    hidden = p.compile(lambda a: (a @ weight).tanh())(p.randn(2, 3))
    with p.backward():
        (hidden @ weight.t()).pow(2).sum().backward()


@scenario(tags=("compiled", "shapes", "hooks"))
def compiled_sizes_that_settle(p: Probe) -> None:
    """Batch and length of a compiled model change in every step, with a hook on its output."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)))
    watch_parameters(p, model)
    run = p.compile(model)
    for batch, length in ((2, 3), (5, 3), (4, 6), (3, 2), (1, 1)):
        out = run(p.randn(batch, length, 3))
        out.register_hook(p.hook("out"))
        with p.backward():
            out.pow(2).mean().backward()
        p.value(f"grad {batch}x{length}", model[0].weight.grad)


@scenario(tags=("compiled", "shapes"))
def compiled_with_an_empty_batch(p: Probe) -> None:
    """A compiled function gets a batch, an empty batch and a batch of one."""
    weight = p.leaf("weight", p.randn(3, 2, requires_grad=True))
    run = p.compile(lambda a: (a @ weight).softmax(-1))
    for batch in (4, 0, 1):
        with p.backward():
            run(p.randn(batch, 3)).pow(2).sum().backward()
        p.value(f"grad{batch}", weight.grad)


@scenario(tags=("compiled", "random", "hooks"), fp64=False)
def compiled_dropout_over_three_steps(p: Probe) -> None:
    """Every step draws another mask, and the backward of a step uses the mask of its own forward."""
    model = p.module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
    watch_parameters(p, model)
    run = p.compile(model)
    outs = [run(p.randn(3, 4)) for _ in range(3)]
    for number in (1, 2, 0):
        with p.backward():
            outs[number].sum().backward()
        p.value(f"grad{number}", model[0].weight.grad)


@scenario(tags=("compiled", "checkpoint", "hooks"))
def compiled_block_inside_a_checkpoint(p: Probe) -> None:
    """A checkpoint computes the compiled block again in the backward; its parameters' hooks run once."""
    block = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    watch_parameters(p, block)
    run, x = p.compile(block), p.leaf("x", p.randn(2, 3, requires_grad=True))
    out = checkpoint(lambda a: run(a * 2).sin(), x, use_reentrant=False)
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "retain-graph", "hooks"))
def compiled_graph_differentiated_by_leaf_and_by_input(p: Probe) -> None:
    """One compiled graph, kept: all leaves, one input, another input, and all leaves again."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in ("x", "y"))
    x.register_hook(p.hook("x"))
    loss = p.compile(lambda a, b: (a.sin() * b.exp()).sum())(x, y)
    with p.backward():
        loss.backward(retain_graph=True)
        p.value("for x", torch.autograd.grad(loss, x, retain_graph=True))
        p.value("for y", torch.autograd.grad(loss, [y], retain_graph=True))
        loss.backward()


@scenario(tags=("compiled", "inputs", "hooks"))
def compiled_with_chosen_inputs(p: Probe) -> None:
    """`backward(inputs=...)` accumulates into the chosen parameters of a compiled model only."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)))
    watch_parameters(p, model)
    out = p.compile(model)(p.randn(2, 3))
    with p.backward():
        out.sum().backward(inputs=[model[2].weight, model[0].bias])


@scenario(tags=("compiled", "accumulation", "hooks"))
def compiled_steps_that_add_up(p: Probe) -> None:
    """Three backwards of a compiled model into the same `.grad`, which stays the same tensor."""
    model = p.module(nn.Linear(3, 2))
    watch_parameters(p, model)
    run, kept = p.compile(model), []
    for _ in range(3):
        with p.backward():
            run(p.randn(4, 3)).exp().mean().backward()
        kept.append(model.weight.grad)
    p.event("same", kept[0] is kept[1] is kept[2])


class _Cube(torch.autograd.Function):
    """A cube that keeps its input on ctx and saves its square."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (square,) = ctx.saved_tensors
        return grad * square * 3


@scenario(tags=("compiled", "function", "hooks"))
def compiled_function_between_eager_functions(p: Probe) -> None:
    """A custom Function is used before, inside and after a compiled part."""
    x = p.leaf("x", p.rand(3, requires_grad=True))
    before = _Cube.apply(x)
    inside = p.compile(lambda a: _Cube.apply(a.sin()) * 2)(before)
    for name, tensor in (("before", before), ("inside", inside)):
        tensor.register_hook(p.hook(name))
    with p.backward():
        _Cube.apply(inside).sum().backward()


@scenario(tags=("compiled", "in-place", "hooks"))
def compiled_function_that_writes_into_its_input(p: Probe) -> None:
    """A compiled function changes an intermediate in place; the gradient is that of the changed tensor."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def change(h: Tensor) -> Tensor:
        h.mul_(2)
        return h.sin()

    h = x + 1
    out = p.compile(change)(h)
    h.register_hook(p.hook("changed"))
    with p.backward():
        (out * h).sum().backward()


@scenario(tags=("compiled", "autocast", "dtype", "hooks"), fp64=False)
def compiled_under_autocast(p: Probe) -> None:
    """Under autocast a compiled model computes in bfloat16, and its parameters get float32 gradients."""
    model = p.module(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    watch_parameters(p, model)
    run = p.compile(model)
    for _ in range(2):
        with torch.autocast(p.device.type, dtype=torch.bfloat16):
            out = run(p.randn(3, 4))
        with p.backward():
            out.float().sum().backward()


@scenario(tags=("compiled", "hooks", "multi-grad"))
def multi_grad_hook_over_a_compiled_model(p: Probe) -> None:
    """A hook over all parameters of a compiled model is called once, with all their gradients."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    params = list(model.parameters())
    torch.autograd.graph.register_multi_grad_hook(params, p.hook("all", kind="multi"))
    torch.autograd.graph.register_multi_grad_hook(params, p.hook("any", kind="multi"), mode="any")
    out = p.compile(model)(p.randn(2, 3))
    with p.backward():
        functional.mse_loss(out, p.randn(2, 1)).backward()
