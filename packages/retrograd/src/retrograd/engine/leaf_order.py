"""Makes the engine run leaves in a given order when one node hands gradients to all of them.

In: a Function's node whose gradients go to several leaves at once, and the order. Out: the engine runs the
leaves' nodes (``AccumulateGrad``) in that order.

The engine runs ready nodes by sequence number. All leaves share the largest number, so leaves that become
ready together leave its heap in no defined order. While they are in the heap, we give their nodes smaller
numbers, one for each turn; the numbers of all other nodes are far below. We do so only if something can see
the order (see `engine.visible_order`). If that was so in the forward, the last leaf comes after a node of
ours, `LastOrderedLeaf`. The engine runs that node after the other leaves. The node restores their numbers, so
a leaf that still waits for another gradient has the largest number when that arrives. Numbers that no
`LastOrderedLeaf` has restored are restored at the end of the backward.

A hook of a leaf may run another backward through the same leaves, while some are in the heap of the outer
one. The inner backward changes numbers only if its own order requires it, and restores the outer's.

A leaf's node is shared by all graphs that reach it. If two threads differentiate through the same leaves at
the same time, leaf hooks may run in another order on one of them.

Source: ``CompareNodeTaskTime`` in ``torch/csrc/autograd/engine.cpp``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from retrograd.engine.nodes import backward_number, entry_of
from retrograd.engine.request import EngineRequest, edge_of, leaf_of, nodes_below
from retrograd.graph.eager_order import ACCUMULATES


class OrderedLeaves(torch.autograd.Function):
    """A Function whose context lists in ``turns`` the edges that lead to ordered leaves. The last of these
    edges may lead to its leaf through `last_turn`."""


class LastOrderedLeaf(torch.autograd.Function):
    """Passes a gradient on unchanged, after the other leaves have had their turns."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        """Return an alias of the leaf, behind this node."""
        ctx.others = []
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Restore the sequence numbers of the other leaves."""
        _restore(backward_number(), ctx.others)
        return grad


#: Takes a leaf and returns an alias whose gradient reaches the leaf through `LastOrderedLeaf`.
last_turn = entry_of(LastOrderedLeaf)


#: by graph task, the numbers that leaves had before they took turns in it
_numbers: dict[int, dict[Any, int]] = {}


class _WhenAllIsOver:
    """Restores numbers at the end of the graph task that holds it, if `LastOrderedLeaf` has not run: it was
    not needed, or a hook raised."""

    def __init__(self, task: int) -> None:
        self._task = task

    def __call__(self) -> None:
        """The graph task calls this before it releases the object."""

    def __del__(self) -> None:
        _restore(self._task, list(_numbers[self._task]))
        del _numbers[self._task]


def _restore(task: int, leaves: Iterable[Any]) -> None:
    """Restore the numbers that these leaves' nodes had before the graph task."""
    numbers = _numbers.get(task, {})
    others = [other for other in [*_numbers.values()] if other is not numbers]
    for leaf in leaves:
        if (number := numbers.pop(leaf, None)) is not None:
            in_turn = others and any(leaf in other for other in others)
            leaf._set_sequence_nr(number if in_turn else ACCUMULATES)


def take_turns(ctx: Any) -> None:
    """Make the engine, which runs the backward of `ctx`, run the leaves at ``ctx.turns`` in this order. We do
    nothing inside a plan, which knows the order, or if the user calls the node, when there is no order."""
    task = backward_number()
    if not issubclass(type(ctx), BackwardCFunction) or task == -1:
        return
    if task not in _numbers:
        _numbers[task] = {}
        torch.autograd.Variable._execution_engine.queue_callback(_WhenAllIsOver(task))
    numbers, is_alone = _numbers[task], len(_numbers) == 1
    below = ctx.next_functions
    leaves = [below[edge][0] for edge in ctx.turns]
    last = leaves.pop() if is_a(leaves[-1], LastOrderedLeaf) else None
    number = ACCUMULATES + 1
    for leaf in leaves:
        before = ACCUMULATES if is_alone and leaf not in numbers else leaf._sequence_nr()
        numbers.setdefault(leaf, before)
        number = min(number - 1, before)
        leaf._set_sequence_nr(number)
    if last is not None:
        last.others = leaves


def steps_in_turns(node: Any) -> tuple[tuple[int, ...], ...]:
    """Groups of edges that `node` serves one after the other, if it is the node of an `OrderedLeaves` with
    turns; otherwise empty."""
    if not (turns := _turns_of(node)):
        return ()
    _, *following = turns
    at_once = {*range(len(node.next_functions))}.difference(following)
    return (tuple(sorted(at_once)), *((edge,) for edge in following))


def beginning_of(request: EngineRequest) -> tuple[tuple[str, ...], Hashable]:
    """The names of the roots' nodes, and of the nodes below them: equal for equal backwards. For a node with
    turns, which has an edge for each parameter, the turns replace the names below."""
    roots = [edge_of(root)[0] for root in request.tensors]
    return _names(roots), tuple(_turns_of(root) or _below(root) for root in roots)


def _below(node: Any) -> tuple[str, ...]:
    return () if node is None else _names([below for below, _ in node.next_functions])


def _names(nodes: Iterable[Any]) -> tuple[str, ...]:
    return tuple(["" if node is None else node.name() for node in nodes])


def is_mostly_compiled(request: EngineRequest) -> bool:
    """Whether at least half of the nodes of `request`, without leaves and their barriers, are functions that
    we compiled. The live path would call each of these as Python code, and could compile only the others."""
    nodes = [node for node in nodes_below(map(edge_of, request.tensors)) if leaf_of(node) is None]
    counted = [node for node in nodes if not is_a(node, LastOrderedLeaf) and node.name() != "AliasBackward0"]
    compiled = sum(is_a(node, OrderedLeaves) for node in nodes)
    return compiled > 0 and 2 * compiled >= len(counted)


def _turns_of(node: Any) -> tuple[int, ...]:
    return node.turns if is_a(node, OrderedLeaves) else ()


def is_a(node: Any, *functions: type) -> bool:
    """Whether a node is the context of one of these Functions."""
    return issubclass(getattr(node, "_forward_cls", object), functions)


def leads_to_parameter(node: Any, flags: Sequence[bool]) -> bool:
    """Whether one of the edges of `node` that `flags` selects leads to a parameter."""
    nodes = [below for (below, _), flag in zip(node.next_functions, flags, strict=True) if flag and below]
    nodes += [below for one in nodes if is_a(one, LastOrderedLeaf) for below, _ in one.next_functions]
    return any(isinstance(getattr(one, "variable", None), torch.nn.Parameter) for one in nodes)
