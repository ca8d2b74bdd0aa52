"""Keeps results from sharing memory that they do not share in eager.

In: a graph before and after Inductor's joint passes. Those passes remove `x + 0` and `x * 1`, so a result may
become an alias of an input or of another result. Out: the same graph, in which we copy such results. Their
caller may change one tensor and not the other.
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
    """For each result, the nodes whose memory it may alias, including itself."""
    results: Any = graph.output_node().args[0]
    return [{*reached([one], aliased_inputs)} if isinstance(one, fx.Node) else set() for one in results]


def part_results(graph: fx.Graph, before: Shown) -> list[fx.Node]:
    """Copy results that alias an input, or memory of an earlier result, unless they did so `before`. Returns
    the copies."""
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
