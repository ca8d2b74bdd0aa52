"""What `.grad` becomes when gradients of several kinds meet in it, step by step.

In: a probe. Out: `.grad` after every step: its values, layout, dtype and identity, and what hooks see.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("accumulation", "sparse", "steps", "hooks"))
def sparse_and_dense_gradients_in_turn(p: Probe) -> None:
    """Sparse, dense, sparse, and both in one backward: what `.grad` is after each."""
    table = p.leaf("table", p.randn(5, 2, requires_grad=True))
    table.register_post_accumulate_grad_hook(p.hook("table", kind="post_acc"))
    tokens = p.randint(5, 4)
    for kinds in (("sparse",), ("dense",), ("sparse",), ("sparse", "dense")):
        looked_up = functional.embedding(tokens, table, sparse=True)
        losses = {"sparse": looked_up.pow(2).sum(), "dense": table.sin().sum()}
        loss = sum(losses[kind] for kind in kinds)
        with p.backward():
            loss.backward()
        p.event("layout", str(table.grad.layout))


@scenario(tags=("accumulation", "sparse", "identity", "hooks"))
def sparse_gradients_add_up(p: Probe) -> None:
    """Sparse gradients of three steps are added without being made dense."""
    table = p.leaf("table", p.randn(5, 2, requires_grad=True))
    table.register_hook(p.hook("table"))
    for count in (2, 3, 1):
        with p.backward():
            functional.embedding(p.randint(5, count), table, sparse=True).exp().sum().backward()
        p.event("entries", table.grad._nnz())


@scenario(tags=("accumulation", "layout", "hooks", "steps"))
def channels_last_weight_over_several_steps(p: Probe) -> None:
    """The gradient of a channels-last weight has the weight's strides, new and added to."""
    layer = p.module(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    layer.weight.register_post_accumulate_grad_hook(p.hook("weight", kind="post_acc"))
    for size in (5, 4, 6):
        with p.backward():
            layer(p.randn(2, 3, size, size)).pow(2).mean().backward()
        p.event("strides", layer.weight.grad.stride())


@scenario(tags=("accumulation", "dtype", "hooks", "steps"))
def half_and_bfloat16_leaves_add_up(p: Probe) -> None:
    """Gradients of low precision are rounded in every addition, leaf by leaf."""
    leaves = [p.leaf(str(d), p.randn(6).to(d).requires_grad_()) for d in (torch.float16, torch.bfloat16)]
    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(p.hook(str(leaf.dtype), kind="post_acc"))
    for scale in (1.0, 1 / 3, 1 / 7):
        with p.backward():
            (leaves[0].float().sin() * leaves[1].float().exp() * scale).sum().backward()


@scenario(tags=("accumulation", "dtype", "hooks"))
def complex_and_real_leaves_in_one_sum(p: Probe) -> None:
    """A real leaf that meets a complex one gets a real gradient, the complex one a complex one."""
    real = p.leaf("real", p.randn(3, requires_grad=True))
    other = p.leaf("complex", torch.complex(p.randn(3), p.randn(3)).requires_grad_())
    for name, leaf in (("real", real), ("complex", other)):
        leaf.register_hook(p.hook(name))
    for _ in range(2):
        with p.backward():
            ((real * other).exp() * other.conj()).abs().sum().backward()


@scenario(tags=("accumulation", "broadcast", "identity", "hooks"))
def expanded_gradients_meet_dense_ones(p: Probe) -> None:
    """An expanded gradient alone, then added to a dense one, then the other way round."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    x.register_post_accumulate_grad_hook(p.hook("x", kind="post_acc"))
    for kinds in ("e", "ed", "de", "ee"):
        with p.backward():
            sum(x.sum() if kind == "e" else x.exp().sum() for kind in kinds).backward()
        p.event("strides", x.grad.stride())


@scenario(tags=("accumulation", "hooks", "identity"))
def grad_is_dropped_and_replaced_between_micro_batches(p: Probe) -> None:
    """`.grad` is set to None, zeroed, replaced by a view and by a tensor that somebody else holds."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    buffer = torch.zeros(2, 4, dtype=p.dtype, device=p.device)
    x.register_post_accumulate_grad_hook(p.hook("x", kind="post_acc"))
    for step, given in enumerate((None, "zero", buffer[0], buffer[1], None)):
        if given == "zero":
            x.grad.zero_()
        else:
            x.grad = given
        with p.backward():
            (x.sin() * (step + 1)).sum().backward()
    p.value("buffer", buffer)


@scenario(tags=("accumulation", "hooks", "shapes"))
def zero_dimensional_and_empty_leaves_over_steps(p: Probe) -> None:
    """A scalar, an empty tensor and a tensor of one element get their gradients in each of two steps."""
    shapes = {"scalar": (), "empty": (0, 3), "one": (1, 1)}
    leaves = {name: p.leaf(name, p.randn(*shape, requires_grad=True)) for name, shape in shapes.items()}
    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    for _ in range(2):
        with p.backward():
            (leaves["scalar"].exp() * leaves["one"].sum() + leaves["empty"].sin().sum()).backward()


@scenario(tags=("accumulation", "views", "layout", "hooks"))
def leaves_that_are_views_of_one_storage(p: Probe) -> None:
    """Strided leaves over one storage get gradients of their own layout, which share nothing."""
    flat = p.randn(12)
    views = {"rows": flat[:6].view(2, 3), "turned": flat[6:].view(3, 2).t(), "even": flat[::2]}
    leaves = {name: p.leaf(name, view.detach().requires_grad_()) for name, view in views.items()}
    for name, leaf in leaves.items():
        leaf.register_hook(p.hook(name))
    for _ in range(2):
        with p.backward():
            ((leaves["rows"] * leaves["turned"]).sin().flatten() * leaves["even"].exp()).sum().backward()
    p.event("strides", *(leaf.grad.stride() for leaf in leaves.values()))
