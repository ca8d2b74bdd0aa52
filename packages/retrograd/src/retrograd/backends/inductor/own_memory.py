"""Results in memory of their own.

In: a graph before Inductor's joint passes, and behind them. They leave out what adds zeros or multiplies by
ones: in its place stands what it was given, perhaps an input or another result. Out: the same graph, in which
a result that has memory of its own in eager is a copy. Whoever gets it may change one and not the other.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from retrograd.backends.inductor.padding import behind
from retrograd.graph.aliases import aliased_inputs
from retrograd.graph.reach import reached

Shown = list[set[fx.Node]]


def memory_shown(graph: fx.Graph) -> Shown:
    """For each result, the nodes whose memory it may show, itself among them."""
    results: Any = graph.output_node().args[0]
    return [{*reached([one], aliased_inputs)} if isinstance(one, fx.Node) else set() for one in results]


def part_results(graph: fx.Graph, before: Shown) -> list[fx.Node]:
    """Copy results that show an input, or what an earlier result shows, and did not `before`. Returns the
    copies."""
    output, now, copies = graph.output_node(), memory_shown(graph), []
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    inputs = {*graph.find_nodes(op="placeholder")}
    shown_by = defaultdict[fx.Node, list[int]](list)
    for place, shown in enumerate(now):
        earlier = {i for node in shown for i in shown_by[node]}
        if inputs & shown - before[place] or any(before[i].isdisjoint(before[place]) for i in earlier):
            with graph.inserting_after(behind(results[place])):
                results[place] = graph.call_function(torch.ops.aten.clone.default, (results[place],))
            copies.append(results[place])
            shown = {results[place]}
        for node in shown:
            shown_by[node].append(place)
    output.args = (results,)
    return copies
