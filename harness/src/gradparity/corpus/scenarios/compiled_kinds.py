"""Compiled forwards over what compiled autograd gets wrong by itself: sparse, undefined, resized, repacked.

In: a probe, whose `compile` is the identity for eager. Out: hook timelines and gradients, which compiling
must not change.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


@scenario(tags=("compiled", "sparse", "hooks"))
def compiled_sparse_embedding(p: Probe) -> None:
    """An embedding with sparse gradients behind a compiled part: `.grad` stays sparse over two steps."""
    table = p.leaf("table", p.randn(5, 3, requires_grad=True))
    table.register_post_accumulate_grad_hook(p.hook("table", kind="post_acc"))
    run = p.compile(lambda h: h.sin().pow(2).sum())
    for count in (2, 4):
        with p.backward():
            run(functional.embedding(p.randint(5, count), table, sparse=True)).backward()
        p.event("layout", str(table.grad.layout))


@scenario(tags=("compiled", "undefined", "hooks"))
def compiled_normalize_with_p_zero(p: Probe) -> None:
    """The norm of order zero has no gradient; the quotient has one, and the hook sees it alone."""
    x = p.leaf("x", p.rand(2, 3, requires_grad=True))
    x.register_hook(p.hook("x"))
    out = p.compile(lambda a: functional.normalize(a, p=0.0))(x)
    with p.backward():
        out.sin().sum().backward()


@scenario(tags=("compiled", "interpolate", "hooks", "shapes"))
def compiled_parts_around_an_interpolation(p: Probe) -> None:
    """An interpolation in eager mode between two compiled parts, at two sizes, with a hook on either side."""
    weight = p.leaf("weight", p.randn(2, 1, 3, 3, requires_grad=True))
    before = p.compile(lambda image: functional.conv2d(image, weight).relu())
    after = p.compile(lambda image: image.exp().mean())
    for size in (5, 6):
        small = before(p.randn(1, 1, size, size))
        large = functional.interpolate(small, scale_factor=2.0, mode="bilinear")
        small.register_hook(p.hook("small"))
        large.register_hook(p.hook("large"))
        with p.backward():
            after(large).backward()


@scenario(tags=("compiled", "hooks", "branching", "node"), issue="pytorch#138553")
def compiled_branches_with_every_hook_kind(p: Probe) -> None:
    """Tensor, node and accumulate hooks on two compiled branches, the one that was built last first."""
    left, right = (p.leaf(name, p.randn(3, requires_grad=True)) for name in ("left", "right"))
    branches = {"left": p.compile(lambda a: a.sin())(left), "right": p.compile(lambda a: a.exp())(right)}
    for name, branch in branches.items():
        end = branch * 2
        end.register_hook(p.hook(f"{name}.end"))
        node_of(end).register_prehook(p.hook(f"{name}.pre", kind="node_pre"))
        node_of(end).register_hook(p.hook(f"{name}.post", kind="node_post"))
        branches[name] = end
    for name, leaf in (("left", left), ("right", right)):
        leaf.register_post_accumulate_grad_hook(p.hook(f"{name}.acc", kind="post_acc"))
    with p.backward():
        (branches["left"] * branches["right"]).sum().backward()


@scenario(tags=("compiled", "hooks", "saved", "order"), issue="pytorch#134361")
def unpack_hooks_around_a_compiled_part(p: Probe) -> None:
    """What eager parts saved is unpacked between the hooks on either side of a compiled part."""
    x = p.leaf("x", p.rand(3, requires_grad=True))
    run = p.compile(lambda a: a * 3 + 1)

    def unpack(tensor: Tensor) -> Tensor:
        p.event("unpack", tensor)
        return tensor

    with saved_tensors_hooks(lambda t: t.clone(), unpack):
        low = x.sin()
    middle = run(low)
    with saved_tensors_hooks(lambda t: t.clone(), unpack):
        high = middle.exp()
    for name, tensor in (("low", low), ("middle", middle), ("high", high)):
        tensor.register_hook(p.hook(name))
    with p.backward():
        high.sum().backward()


@scenario(tags=("compiled", "visibility", "hooks"))
def gradients_of_two_compiled_parts_become_visible(p: Probe) -> None:
    """When the hook between two compiled parts runs, the upper part's gradients are there already."""
    weights = {name: p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in ("low", "high")}
    low = p.compile(lambda a: torch.tanh(a @ weights["low"]))(p.randn(2, 3))

    def look(_: Tensor) -> None:
        p.event("there", *(name for name, weight in weights.items() if weight.grad is not None))

    low.register_hook(p.hook("between", look))
    out = p.compile(lambda a: torch.tanh(a @ weights["high"]))(low)
    with p.backward():
        out.sum().backward()
