"""What it costs to cut a sequence of calls.

In: the calls of an ATen graph in order, or what crosses each border of a sequence. Out: what a border before
each call costs, and one after the last; None where there can be none.

A value that crosses a border is written to memory and read again. Kernels that nothing is fused with write
what they give in any case, and read what they take; so does what stands between two of them, where a later
one reads it. Results of the whole graph are written too. Views cost nothing beyond the value that they show.
Nothing but tensors and sizes can cross.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.facts import is_of_family
from retrograd._torch.fx import aliased_inputs
from retrograd._torch.trace import bytes_of

#: what a byte costs that crosses a border: of a value that is written to memory and read from it in any case;
#: that is written in any case, but that the next call would have had in a register; that nothing else writes.
#: They are whole numbers, so that equal costs are equal.
_IN_MEMORY, _READ_AGAIN, _WRITTEN = 1, 10, 20


def boundary_costs(count: int, uses: Sequence[tuple[int, int, float | None]]) -> list[float | None]:
    """What a cut before each of `count` calls costs, and one after the last.

    Args:
        uses: for each value that is used later on: the place of the call that makes it, the place of the last
            call that uses it, and what it costs to hand it over (None: that is not possible).
    """
    change, forbidden = [0.0] * (count + 2), [0] * (count + 2)
    for made, used, cost in uses:
        if cost is None:
            forbidden[made + 1] += 1
            forbidden[used + 1] -= 1
        else:
            change[made + 1] += cost
            change[used + 1] -= cost
    costs: list[float | None] = []
    price, closed = 0.0, 0
    for i in range(count + 1):
        price += change[i]
        closed += forbidden[i]
        costs.append(None if closed else price)
    return costs


def last_use(node: fx.Node, place: Mapping[fx.Node, int]) -> int:
    """The place of the last of the calls that reads a value; its own if none does."""
    return max((place[user] for user in node.users if user in place), default=place[node])


def border_costs(calls: Sequence[fx.Node]) -> list[float | None]:
    """What a border before each call costs, and one after the last; None where there can be none."""
    place = {node: i for i, node in enumerate(calls)}
    levels = _levels(calls)
    owners: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    shown: dict[fx.Node, list[fx.Node]] = {}
    uses: list[tuple[int, int, float | None]] = []
    for i, node in enumerate(calls):
        owners[node] = owner = _owner(node, owners)
        shown.setdefault(owner, []).append(node)
        used = last_use(node, place)
        last[owner] = max(last.get(owner, i), used)
        if used > i and not _can_cross(node):
            uses.append((i, used, None))
    for owner, views in shown.items():
        if owner not in place or last[owner] == place[owner]:
            continue
        size, readers = bytes_of_value(owner), _readers(views)
        uses.append((place[owner], last[owner], _IN_MEMORY * size))
        if fused := _fused(owner, readers, levels):
            is_written = len(fused) < len(readers)
            extra = (_READ_AGAIN if is_written else _WRITTEN) - _IN_MEMORY
            uses.append((place[owner], max(place[node] for node in fused), extra * size))
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


def _levels(calls: Sequence[fx.Node]) -> Mapping[fx.Node, int]:
    """How many kernels stand one after the other before a value is there. Calls of one level can be fused;
    what reads a value at a later level reads it from memory."""
    levels: dict[fx.Node, int] = {}
    for node in calls:
        before = max((levels.get(value, 0) for value in node.all_input_nodes), default=0)
        levels[node] = before + (is_kernel(node) and node.target is not operator.getitem)
    return levels


def _fused(owner: fx.Node, readers: Sequence[fx.Node], levels: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The readers that a code generator would fuse with the call that makes a value. It makes it at its level
    if anything is there that reads it, else with the first that does."""
    if is_kernel(owner):
        return []
    pointwise = [node for node in readers if node in levels and not is_kernel(node)]
    is_made_early = len(pointwise) < len(readers) or any(levels[node] == levels[owner] for node in pointwise)
    home = levels[owner] if is_made_early else min(levels[node] for node in pointwise)
    return [node for node in pointwise if levels[node] == home]


def _readers(views: Sequence[fx.Node]) -> list[fx.Node]:
    """What reads elements of a value that `views` show."""
    users = dict.fromkeys(user for view in views for user in view.users if user not in views)
    return [user for user in users if not is_of_family("reads_no_element", _operator(user))]


def is_kernel(node: fx.Node) -> bool:
    """Whether the call, or the one that it takes a result of, is a kernel that nothing is fused with."""
    made_by = node.args[0] if node.target is operator.getitem else node
    return is_of_family("unfused", _operator(made_by))


def _operator(node: Any) -> str:
    return str(getattr(node.target, "_opname", ""))


def bytes_of_value(node: fx.Node) -> float:
    """How many bytes a node's value takes; 0 if it is no tensor."""
    value = node.meta.get("val")
    return bytes_of(value) if isinstance(value, torch.Tensor) else 0.0
