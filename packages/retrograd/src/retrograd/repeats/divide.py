"""Divide an ATen graph where it repeats itself.

In: a graph. Out: outlines of consecutive runs of its calls, which are all of them; those that repeat have a
key that another has too.

A value that crosses a border is written to memory and read again. Matrix products, convolutions and the like
write what they give in any case, and read what they take; results of the whole graph are written too. Views
cost nothing beyond the value that they show. Nothing but tensors and sizes can cross.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import aliased_inputs, depends_on_data
from retrograd._torch.trace import bytes_of
from retrograd.graph.repeats import boundary_costs, find_repeats
from retrograd.repeats.outline import Outline, TokenisedCall, call_of, holds_graph, outline

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
    # Where nothing is computed, no code is shorter than that of as many views.
    repeats = [one for one in repeats if not all(map(aliased_inputs, calls[one.start : one.stop]))]
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


#: kernels of their own, which nothing is fused with: by a part of the operator's name.
_KERNELS = ("mm", "convolution", "attention", "conv", "embedding", "sort", "topk", "scatter", "index_put")
_WRITTEN_ANYWAY, _WRITTEN, _FUSED = 0.1, 1.0, 2.0


def border_costs(calls: Sequence[fx.Node]) -> list[float | None]:
    """What a border before each call costs, and one after the last; None where there can be none."""
    place = {node: i for i, node in enumerate(calls)}
    owners: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    shown: dict[fx.Node, list[fx.Node]] = {}
    uses: list[tuple[int, int, float | None]] = []
    for i, node in enumerate(calls):
        owners[node] = owner = _owner(node, owners)
        shown.setdefault(owner, []).append(node)
        used = max((place[user] for user in node.users if user in place), default=i)
        last[owner] = max(last.get(owner, i), used)
        if used > i and not _can_cross(node):
            uses.append((i, used, None))
    for owner, views in shown.items():
        if owner in place and last[owner] > place[owner]:
            uses.append((place[owner], last[owner], _cost(owner, views)))
    return boundary_costs(len(calls), uses)


def _owner(node: fx.Node, owners: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node whose memory the value shows."""
    if node.target is operator.getitem and not isinstance(node.args[0].meta.get("val"), torch.Tensor):  # type: ignore[union-attr]
        bases = aliased_inputs(node.args[0])  # type: ignore[arg-type]
    else:
        bases = aliased_inputs(node)
    return owners.get(bases[0], bases[0]) if bases else node


def _can_cross(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if any(user.target is operator.getitem for user in node.users):
        return False
    return isinstance(value, (torch.Tensor, torch.SymInt))


def _cost(owner: fx.Node, views: Sequence[fx.Node]) -> float:
    users = [user for view in views for user in view.users if user not in views]
    kernels = [_is_kernel(user) for user in users]
    share = _FUSED
    if _is_kernel(owner) or (kernels and all(kernels)):
        share = _WRITTEN_ANYWAY
    elif any(kernels) or any(user.op == "output" for user in users):
        share = _WRITTEN
    return share * _bytes(owner.meta.get("val"))


def _is_kernel(node: fx.Node) -> bool:
    name = str(getattr(node.target, "_opname", ""))
    return any(part in name for part in _KERNELS)


def _bytes(value: Any) -> float:
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return bytes_of(value) if isinstance(value, torch.Tensor) else 0.0
