"""The cost of cutting a sequence of calls.

In: the calls of a graph in order, and the cost of passing each value across a border. Out: the cost of a
border before each call, and after the last; None if no border is possible there.

In an ATen graph, a value that crosses a border is written to memory and read again. Kernels that are never
fused write their results and read their inputs anyway. Views cost no more than the value that owns their
memory. Only tensors and sizes can cross.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from retrograd.facts import is_of_family
from retrograd.graph.aliases import memory_owners
from retrograd.policy import UNFUSED_COST
from retrograd.trace import bytes_of

_NO_OWNERS: Mapping[fx.Node, Collection[fx.Node]] = MappingProxyType({})


def border_costs(
    calls: Sequence[fx.Node],
    cost: Callable[[fx.Node], float | None],
    owners: Mapping[fx.Node, Collection[fx.Node]] = _NO_OWNERS,
    closed: Iterable[tuple[int, int]] = (),
) -> list[float | None]:
    """The cost of a border before each of `calls`, and after the last; None if no border is possible there.

    Args:
        calls: the calls, in order.
        cost: the cost of passing a value to a later call; None if that is not possible.
        owners: the owners of each value's memory. An owner must be passed on while its views are used.
        closed: pairs of indices of calls between which no border is possible.
    """
    place = {node: i for i, node in enumerate(calls)}
    used = {node: max([place.get(user, i) for user in node.users] or [i]) for node, i in place.items()}
    shown = dict(used)
    for view, shared in owners.items():
        for owner in shared:
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
    """`border_costs` for calls of an ATen graph, in bytes that cross."""
    owners = memory_owners(calls)

    def cost(node: fx.Node) -> float | None:
        value = node.meta.get("val")
        if any(user.target is operator.getitem for user in node.users):
            return None
        if not isinstance(value, torch.Tensor):
            return 0.0 if isinstance(value, torch.SymInt) else None
        is_written = any(map(_is_kernel, (node, *node.users)))
        return 0.0 if node not in owners[node] else bytes_of(value) * (1 if is_written else UNFUSED_COST)

    return border_costs(calls, cost, owners)


def _is_kernel(node: fx.Node) -> bool:
    """Whether the call (for ``getitem``: the call that made its tuple) is a kernel that is never fused."""
    made_by: Any = node.args[0] if node.target is operator.getitem else node
    return is_of_family("unfused", str(getattr(made_by.target, "_opname", "")))
