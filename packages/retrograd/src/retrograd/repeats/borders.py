"""What it costs to cut a sequence of calls.

In: the calls of a graph in order, and what it costs to hand over a value. Out: what a border before each call
costs, and one after the last; None where there can be none.

In an ATen graph, a value that crosses a border is written to memory and read again. Kernels that nothing is
fused with write what they give in any case, and read what they take. Views cost nothing beyond the value that
they show. Nothing but tensors and sizes can cross.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from retrograd.facts import is_of_family
from retrograd.graph.aliases import aliased_inputs
from retrograd.policy import UNFUSED_COST
from retrograd.trace import bytes_of

_NO_OWNERS: Mapping[fx.Node, fx.Node] = MappingProxyType({})


def border_costs(
    calls: Sequence[fx.Node],
    cost: Callable[[fx.Node], float | None],
    owners: Mapping[fx.Node, fx.Node] = _NO_OWNERS,
    closed: Iterable[tuple[int, int]] = (),
) -> list[float | None]:
    """What a border before each of `calls` costs, and one after the last; None where there can be none.

    Args:
        cost: what it costs to hand a value over to a later call; None: that is not possible.
        owners: for views, the value whose memory they show: it is handed over as long as they are used.
        closed: places of calls between which there can be no border.
    """
    place = {node: i for i, node in enumerate(calls)}
    used = {node: max([place.get(user, i) for user in node.users] or [i]) for node, i in place.items()}
    shown = dict(used)
    for view, owner in owners.items():
        if owner in shown:
            shown[owner] = max(shown[owner], used[view])
    change, forbidden = [0.0] * (len(calls) + 2), [0] * (len(calls) + 2)
    ranges = [*closed]
    for node, i in place.items():
        if (price := cost(node)) is None:
            ranges.append((i, used[node]))
        else:
            change[i + 1] += price
            change[shown[node] + 1] -= price
    for first, last in ranges:
        forbidden[first + 1] += 1
        forbidden[last + 1] -= 1
    pairs = zip(itertools.accumulate(change), itertools.accumulate(forbidden), strict=True)
    return [None if is_closed else price for price, is_closed in pairs][:-1]


def aten_border_costs(calls: Sequence[fx.Node]) -> list[float | None]:
    """The same for calls of an ATen graph, by the bytes that cross."""
    owners: dict[fx.Node, fx.Node] = {}
    for node in calls:
        if (owner := _owner(node, owners)) is not node:
            owners[node] = owner

    def cost(node: fx.Node) -> float | None:
        value = node.meta.get("val")
        if any(user.target is operator.getitem for user in node.users):
            return None
        if not isinstance(value, torch.Tensor):
            return 0.0 if isinstance(value, torch.SymInt) else None
        is_written = any(map(_is_kernel, (node, *node.users)))
        return 0.0 if node in owners else bytes_of(value) * (1 if is_written else UNFUSED_COST)

    return border_costs(calls, cost, owners)


def _owner(node: fx.Node, owners: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The node whose memory the value shows."""
    if node.target is operator.getitem and not isinstance(node.args[0].meta.get("val"), torch.Tensor):  # type: ignore[union-attr]
        bases = aliased_inputs(node.args[0])  # type: ignore[arg-type]
    else:
        bases = aliased_inputs(node)
    return owners.get(bases[0], bases[0]) if bases else node


def _is_kernel(node: fx.Node) -> bool:
    """Whether the call, or the one that it takes a result of, is a kernel that nothing is fused with."""
    made_by: Any = node.args[0] if node.target is operator.getitem else node
    return is_of_family("unfused", str(getattr(made_by.target, "_opname", "")))
