"""Leaves to which one node hands gradients, in a given order.

In: a Function's node whose gradients go to several leaves at once, and the order. Out: the engine runs the
leaves' nodes (``AccumulateGrad``) in that order.

The engine runs what is ready by sequence number. All leaves have the largest one, so those that become ready
together leave its heap in no order of theirs. For as long as they are in the heap, their nodes get numbers
below that, one for each turn; all other nodes' are far below. The last leaf waits behind a node of ours,
`LastOrderedLeaf`, which the engine runs after the other leaves, and which takes the numbers back. A leaf that
waits for another gradient then has the largest number again when that comes. What `LastOrderedLeaf` could not
take back is taken back at the end of the backward.

A leaf's node belongs to all graphs that reach it. Where two threads differentiate through the same leaves at
the same time, hooks of leaves may run in another order on one of them.

Source: ``CompareNodeTaskTime`` in ``torch/csrc/autograd/engine.cpp``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from retrograd.engine.nodes import entry_of
from retrograd.engine.request import EngineRequest, edge_of, leaf_of, nodes_below
from retrograd.graph.eager_order import ACCUMULATES


class OrderedLeaves(torch.autograd.Function):
    """A Function whose context names, in ``turns``, those of its edges that lead to leaves and have an order.
    The last of them leads to a leaf through `last_turn`."""


class LastOrderedLeaf(torch.autograd.Function):
    """Hands a gradient on as it is, after the other leaves have had their turns."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        """The leaf, behind this node."""
        ctx.others = []
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Take the others' numbers back."""
        _take_back(ctx.others)
        return grad


#: given a leaf, returns what leads to it through `LastOrderedLeaf`.
last_turn = entry_of(LastOrderedLeaf)


class _WhenAllIsOver:
    """Takes numbers back at the end of a graph task, which holds it, if no `LastOrderedLeaf` has: it was not
    asked
    for, or a hook has raised. What `LastOrderedLeaf` has taken back is no longer in the list that both
    hold."""

    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves

    def __call__(self) -> None:
        """The graph task calls it before it lets go of it."""

    def __del__(self) -> None:
        _take_back(self._leaves)


def _take_back(leaves: list[Any]) -> None:
    """Give these leaves' nodes the number that all leaves have; empties the list."""
    while leaves:
        leaves.pop()._set_sequence_nr(ACCUMULATES)


def take_turns(ctx: Any) -> None:
    """Have the engine, which runs the backward of `ctx`, run the leaves at ``ctx.turns`` in this order. Where
    a plan of ours runs it, the plan knows the order; where the user calls it, there is no order."""
    if not issubclass(type(ctx), BackwardCFunction) or torch._C._current_graph_task_id() == -1:
        return
    below = ctx.next_functions
    *leaves, last = [below[edge][0] for edge in ctx.turns]
    for turn, leaf in enumerate(leaves):
        leaf._set_sequence_nr(ACCUMULATES - turn)
    last.others = leaves
    torch.autograd.Variable._execution_engine.queue_callback(_WhenAllIsOver(leaves))


def steps_in_turns(node: Any) -> tuple[tuple[int, ...], ...]:
    """The edges that `node` serves one step after the other, if it is the node of an `OrderedLeaves` with
    turns;
    else nothing."""
    if not (turns := _turns_of(node)):
        return ()
    _, *following = turns
    at_once = {*range(len(node.next_functions))}.difference(following)
    return (tuple(sorted(at_once)), *((edge,) for edge in following))


def beginning_of(request: EngineRequest) -> tuple[tuple[str, ...], Hashable]:
    """The names of the roots' nodes, and what is below them: equal for equal backwards. Of a node with turns,
    which has an edge for each parameter, that is the turns."""
    roots = [edge_of(root)[0] for root in request.tensors]
    return _names(roots), tuple(_turns_of(root) or _below(root) for root in roots)


def _below(node: Any) -> tuple[str, ...]:
    return () if node is None else _names([below for below, _ in node.next_functions])


def _names(nodes: Iterable[Any]) -> tuple[str, ...]:
    return tuple(["" if node is None else node.name() for node in nodes])


def nodes_outside_regions(request: EngineRequest) -> int | None:
    """How many nodes `request` has besides those of functions that we compiled, their barriers and leaves;
    None if it has no such function."""
    nodes = [node for node in nodes_below(map(edge_of, request.tensors)) if leaf_of(node) is None]
    if not any(_is_a(node, OrderedLeaves) for node in nodes):
        return None
    return sum(
        not _is_a(node, OrderedLeaves, LastOrderedLeaf) and node.name() != "AliasBackward0" for node in nodes
    )


def _turns_of(node: Any) -> tuple[int, ...]:
    return node.turns if _is_a(node, OrderedLeaves) else ()


def _is_a(node: Any, *functions: type) -> bool:
    return issubclass(getattr(node, "_forward_cls", object), functions)
