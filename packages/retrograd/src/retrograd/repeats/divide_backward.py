"""Divide a run of captured calls where it repeats itself, so that each kind of part is compiled once.

In: a run of calls of a `BackwardGraph`, in eager's order. Out: the same calls as consecutive parts: the
copies of what repeats (the layers of a deep model), and what stands before, between and after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from retrograd.graph.backward_graph import CallKind, call_of
from retrograd.graph.repeats import boundary_costs, find_repeats
from retrograd.graph.structure import token_of

#: calls per autograd node in a captured graph: the node, its check, and a projection or two of each.
_CALLS_PER_NODE = 4

#: nodes whose gradients are written to memory in any case, so that nothing is lost by a border behind them.
_WRITES_TO_MEMORY = frozenset(
    {
        "AddmmBackward0",
        "BaddbmmBackward0",
        "BmmBackward0",
        "ConvolutionBackward0",
        "EmbeddingBackward0",
        "LinearBackward0",
        "MmBackward0",
    }
)


def regions_of(run: Sequence[fx.Node], smallest: int, copies: int = 2) -> list[Sequence[fx.Node]]:
    """`run`, divided; in one piece if nothing in it repeats.

    Args:
        run: the calls.
        smallest: autograd nodes that a region has at least. copies: of a region, at least.
    """
    least = smallest * _CALLS_PER_NODE
    if len(run) < 2 * least:
        return [run]
    repeats = find_repeats([token_of(node) for node in run], _costs(run), least, copies)
    cuts = sorted({0, len(run), *(cut for repeat in repeats for cut in repeat.cuts())})
    return [run[start:stop] for start, stop in itertools.pairwise(cuts)]


def _costs(run: Sequence[fx.Node]) -> list[float | None]:
    place = {node: i for i, node in enumerate(run)}
    uses = []
    for i, node in enumerate(run):
        used = max((place[user] for user in node.users if user in place), default=i)
        if used > i:
            uses.append((i, used, _cost(node)))
    return boundary_costs(len(run), uses)


def _cost(node: fx.Node) -> float | None:
    """What it costs to hand a value over to another region; None for what is no tensor."""
    if any(_is_projection(user) for user in node.users if user.op == "call_function"):
        return None
    return 1.0 if _source(node) in _WRITES_TO_MEMORY else 2.0


def _is_projection(node: fx.Node) -> bool:
    return call_of(node).kind is CallKind.PROJECT or getattr(node.target, "__name__", "") == "getitem"


def _source(node: fx.Node) -> str:
    """The name of the autograd node that made a value, behind projections and checks of it."""
    place = 0
    while call_of(node).kind in (CallKind.PROJECT, CallKind.VALIDATE):
        if call_of(node).kind is CallKind.PROJECT:
            place = node.args[1]  # type: ignore[assignment]
            before = node.args[0]
        else:
            before = node.args[0][place]  # type: ignore[index]
        if not isinstance(before, fx.Node) or before.op != "call_function":
            return ""
        node = before
    return getattr(node.target, "__name__", "")
