"""Graphs with several branches: in which order nodes run, and in which order their gradients are added.

In: a probe. Out: hook events in eager's order, and sums of several gradients that depend on association.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import hook_every_node, node_of
from gradparity.probe import Probe


@scenario(tags=("hooks", "order", "branching"), issue="pytorch#138553")
def two_branches_every_hook_kind(p: Probe) -> None:
    """Hooks of four kinds on two branches run by the sequence number of their node, not depth first."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    left = x.sin()
    right = y.cos()
    deeper = left.exp()
    for name, tensor in (("left", left), ("right", right), ("deeper", deeper)):
        tensor.register_hook(p.hook(f"{name}.grad"))
        node_of(tensor).register_prehook(p.hook(f"{name}.pre", kind="node_pre"))
        node_of(tensor).register_hook(p.hook(f"{name}.post", kind="node_post"))
    for name, leaf in (("x", x), ("y", y)):
        leaf.register_hook(p.hook(f"{name}.grad"))
        leaf.register_post_accumulate_grad_hook(p.hook(f"{name}.acc", kind="post_acc"))
    with p.backward():
        (deeper + right).sum().backward()


@scenario(tags=("hooks", "order", "branching"), issue="pytorch#138553")
def two_branches_tensor_hooks(p: Probe) -> None:
    """The branch that was built last is differentiated first, whatever its place in the sum."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    first = x.sin()
    second = x.cos()
    first_end = first * 2
    for name, tensor in (("first", first), ("second", second), ("first_end", first_end)):
        tensor.register_hook(p.hook(name))
    with p.backward():
        (second * first_end).sum().backward()


@scenario(tags=("hooks", "order", "branching"), issue="pytorch#138553")
def two_branches_node_hooks(p: Probe) -> None:
    """Node hooks on two branches of unequal depth interleave by sequence number."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    a1 = x.sin()
    b1 = x.exp()
    a2 = a1.tanh()
    b2 = b1.sigmoid()
    a3 = a2 * a1
    loss = (b2 + a3).sum()
    hook_every_node(p, loss)
    with p.backward():
        loss.backward()


@scenario(tags=("hooks", "order", "branching"), issue="pytorch#138553")
def two_branches_accumulate_hooks(p: Probe) -> None:
    """A leaf's gradient is accumulated as soon as it is complete, before any other node that is ready."""
    leaves = [p.leaf(f"w{i}", p.randn(3, requires_grad=True)) for i in range(4)]
    for i, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(p.hook(f"w{i}", kind="post_acc"))
    left = leaves[0].sin()
    right = leaves[1].cos()
    left = (left * leaves[2]).tanh()
    with p.backward():
        (left + right * leaves[3]).sum().backward()


@scenario(tags=("hooks", "order", "branching"))
def diamond(p: Probe) -> None:
    """The node under a diamond runs once, after both arms, with the sum of their gradients."""
    x = p.leaf("x", p.randn(5, requires_grad=True))
    base = x.tanh()
    left = base.exp()
    right = base.sin()
    for name, tensor in (("base", base), ("left", left), ("right", right)):
        tensor.register_hook(p.hook(name))
    with p.backward():
        (left * right).sum().backward()


@scenario(tags=("hooks", "order", "branching"))
def diamond_built_in_reverse(p: Probe) -> None:
    """When the arms are built in the other order than they are used, the order of building decides."""
    x = p.leaf("x", p.randn(5, requires_grad=True))
    base = x.tanh()
    right = base.sin().cos()
    left = base.exp().sqrt()
    loss = (left * right).sum()
    hook_every_node(p, loss)
    with p.backward():
        loss.backward()


@scenario(tags=("order", "branching"))
def nested_diamonds(p: Probe) -> None:
    """Diamonds inside a diamond: every join waits for all of its arms."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def fork(t: Tensor) -> Tensor:
        return t.sin() * t.cos()

    base = x.exp()
    loss = (fork(base) + fork(base.tanh())).sum()
    hook_every_node(p, loss, post=True)
    with p.backward():
        loss.backward()


@scenario(tags=("sums", "branching"))
def three_contributions_to_a_leaf(p: Probe) -> None:
    """Three gradients are added in the order in which eager's nodes run; rounding shows any other order."""
    x = p.leaf("x", p.randn(64, requires_grad=True))
    parts = [x * p.randn(64) for _ in range(3)]
    x.register_hook(p.hook("x"))
    with p.backward():
        (parts[2] + parts[0] + parts[1]).sum().backward()


@scenario(tags=("sums", "branching"))
def five_contributions_to_an_intermediate(p: Probe) -> None:
    """Five gradients meet in the buffer of one inner node; their association is the order of arrival."""
    x = p.leaf("x", p.randn(64, requires_grad=True))
    hub = x.sin()
    spokes = [(hub * (i + 0.3)).tanh() * p.randn(64) for i in range(5)]
    hub.register_hook(p.hook("hub"))
    with p.backward():
        (spokes[3] + spokes[0] + spokes[4] + spokes[1] + spokes[2]).sum().backward()


@scenario(tags=("sums", "branching"))
def deep_chain_with_shortcuts(p: Probe) -> None:
    """A shortcut's gradient waits in the buffer while the long way round is differentiated."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    h = x
    for i in range(5):
        h = (h * 1.3).sin() + x
        h.register_hook(p.hook(f"h{i}"))
    with p.backward():
        (h + x * 0.1).sum().backward()


@scenario(tags=("order", "branching"))
def residual_blocks(p: Probe) -> None:
    """A residual network's whole node order: blocks from last to first, shortcuts joined in between."""
    blocks = p.module(nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    h = p.leaf("x", p.randn(2, 4, requires_grad=True))
    for block in blocks:
        h = h + block(h)
    loss = h.pow(2).mean()
    hook_every_node(p, loss)
    with p.backward():
        loss.backward()


@scenario(tags=("order", "branching"))
def four_branches_of_unequal_depth(p: Probe) -> None:
    """Four branches that were built in turns run in turns."""
    inputs = [p.leaf(f"x{i}", p.randn(3, requires_grad=True)) for i in range(4)]
    branches = list(inputs)
    for step in range(4):
        for i in range(step, 4):
            branches[i] = branches[i].sin()
            branches[i].register_hook(p.hook(f"branch{i}.step{step}"))
    with p.backward():
        torch.cat(branches).prod().backward()


@scenario(tags=("order", "branching", "hooks"))
def tensor_with_two_consumers(p: Probe) -> None:
    """A hook on a tensor with two consumers is called once, with the total."""
    x = p.leaf("x", p.randn(3, 3, requires_grad=True))
    y = x @ x.t()
    y.register_hook(p.hook("y"))
    with p.backward():
        (y.softmax(0).sum() + (y * y).mean()).backward()


@scenario(tags=("order", "branching"))
def pieces_rejoined_in_reverse(p: Probe) -> None:
    """The pieces of a split that are put together the other way round meet again in one node."""
    x = p.leaf("x", p.randn(6, 2, requires_grad=True))
    pieces = [piece.sin() for piece in x.exp().split(2)]
    for i, piece in enumerate(pieces):
        piece.register_hook(p.hook(f"piece{i}"))
    with p.backward():
        (torch.cat(pieces[::-1]) * p.randn(6, 2)).sum().backward()


@scenario(tags=("order", "branching"))
def leaf_at_the_top_and_at_the_bottom(p: Probe) -> None:
    """A leaf that is used near the loss and far from it is accumulated once, when the far use is done."""
    near = p.leaf("near", p.randn(3, requires_grad=True))
    both = p.leaf("both", p.randn(3, requires_grad=True))
    for name, leaf in (("near", near), ("both", both)):
        leaf.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    h = both.sin()
    h.register_hook(p.hook("h"))
    with p.backward():
        (h.exp() * near * both).sum().backward()


@scenario(tags=("order", "branching", "sums"))
def seeded_random_graph(p: Probe) -> None:
    """Fourteen operations over random earlier results: the whole order of a graph that nobody designed."""
    choose = random.Random(7)
    operations: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, torch.mul, torch.sub, torch.hypot]
    pool = [p.leaf(f"x{i}", p.rand(3, requires_grad=True)) for i in range(3)]
    for _ in range(14):
        left, right = choose.choice(pool), choose.choice(pool)
        pool.append(choose.choice(operations)(left.tanh(), right))
    loss = torch.stack(pool[-6:]).sum()
    hook_every_node(p, loss)
    with p.backward():
        loss.backward()
