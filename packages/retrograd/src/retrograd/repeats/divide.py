"""Divide an ATen graph where it repeats itself.

In: a graph. Out: outlines of consecutive runs of its calls, which are all of them; those that repeat have a
key that another has too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from retrograd._torch.fx import aliased_inputs, depends_on_data
from retrograd.graph.repeats import find_repeats
from retrograd.repeats.calls import TokenisedCall, call_of
from retrograd.repeats.costs import border_costs
from retrograd.repeats.outline import Outline, holds_graph, outline

_OPS = frozenset({"placeholder", "get_attr", "call_function", "output"})


def divided(graph: fx.Graph, least: int, visible: int | None, copies: int = 2) -> list[Outline]:
    """The parts of `graph`, in order; none if nothing in it repeats itself.

    Args:
        graph: functional, its values known by example (``meta["val"]``).
        least: calls that a part that repeats has at least.
        visible: how many results, from the first, must have the strides that they were traced with.
        copies: of a part that repeats, at least.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if len(calls) < 2 * least or not _can_be_divided(graph):
        return []
    known = {node: call_of(node) for node in calls}
    repeats = find_repeats([known[node].token for node in calls], border_costs(calls), least, copies)
    repeats = [repeat for repeat in repeats if not _only_views(calls[repeat.start : repeat.stop])]
    if not repeats:
        return []
    cuts = sorted({0, len(calls), *(cut for repeat in repeats for cut in repeat.cuts())})
    runs = [calls[start:stop] for start, stop in itertools.pairwise(cuts)]
    parts = _united(runs, known, _results(graph, visible))
    return parts if len({part.key for part in parts}) < len(parts) else []


def _can_be_divided(graph: fx.Graph) -> bool:
    return not any(
        node.op not in _OPS
        or (node.op == "placeholder" and "val" not in node.meta)
        or (node.op == "get_attr" and "val" not in node.meta and not holds_graph(node))
        or (node.op == "call_function" and depends_on_data(node))
        for node in graph.nodes
    )


def _only_views(calls: Sequence[fx.Node]) -> bool:
    """Whether nothing is computed: no code is shorter than that of as many views."""
    return all(aliased_inputs(node) for node in calls)


def _results(graph: fx.Graph, visible: int | None) -> Mapping[fx.Node, bool]:
    """By result, whether it must have its traced strides."""
    given: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    found: dict[fx.Node, bool] = {}
    for place, node in enumerate(given):
        if isinstance(node, fx.Node):
            found[node] = found.get(node, False) or place < (visible or 0)
    return found


def _united(
    runs: Sequence[Sequence[fx.Node]], known: Mapping[fx.Node, TokenisedCall], results: Mapping[fx.Node, bool]
) -> list[Outline]:
    """Outlines, neighbours that are like no other run taken together."""
    parts = [outline(run, known, results) for run in runs]
    count = Counter(part.key for part in parts)
    united: list[Outline] = []
    for is_single, group in itertools.groupby(parts, key=lambda part: count[part.key] == 1):
        same = list(group)
        if is_single and len(same) > 1:
            same = [outline([node for part in same for node in part.calls], known, results)]
        united += same
    return united
