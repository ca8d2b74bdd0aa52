"""What it costs to end a region before a call of an ATen graph.

In: the calls, in order. Out: for each place between two of them the bytes of traffic that a border there
adds, as `graph.repeats.boundary_costs` has them.

A value that crosses a border is written to memory and read again. Matrix products, convolutions and the like
write what they give in any case, and read what they take; results of the whole graph are written too. Views
cost nothing beyond the value that they show. Nothing but tensors and sizes can cross.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import aliased_inputs
from retrograd._torch.trace import bytes_of
from retrograd.graph.repeats import boundary_costs

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
