"""What a part makes for itself instead of taking it from another.

In: runs of calls that a graph is cut into. Out: the same, with calls before each that are made elsewhere too:
views and element-wise calls that spread small tensors over large ones, as attention masks are made. The code
of the whole makes these anew in each kernel that reads them. A part that took them would read them from
memory, and a code generator would not know that they are the same for each head. What is read by kernels that
nothing is fused with, as a fused attention is, is in memory in any case, and taken from there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import (
    aliased_inputs,
    has_effect,
    is_operator_overload,
    is_random,
    is_write_to_input,
)
from retrograd.repeats.borders import bytes_of_value, is_kernel

#: a value is made again from tensors that are smaller by this factor at least, by so many calls at most.
SPREAD, MOST_CALLS = 8, 16


def with_remade(runs: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """Each run, behind the calls that it makes again, in the order of the graph; nothing is, if the graph
    writes to its inputs, which others may read then."""
    if any(is_write_to_input(node) for run in runs for node in run):
        return [[*run] for run in runs]
    place = {node: i for i, node in enumerate(node for run in runs for node in run)}
    known: dict[fx.Node, Collection[fx.Node]] = {}
    extended = []
    for run in runs:
        inside, again = set(run), set[fx.Node]()
        for node in run:
            for operand in node.all_input_nodes:
                is_made_elsewhere = operand in place and operand not in inside and operand not in again
                if is_made_elsewhere and _is_fused(operand, inside):
                    if operand not in known:
                        known[operand] = _calls_that_make(operand)
                    again.update(known[operand])
        extended.append([*sorted(again - inside, key=place.__getitem__), *run])
    return extended


def _is_fused(value: fx.Node, run: Collection[fx.Node]) -> bool:
    """Whether a call of the run that can be fused with others reads the value, or a view of it."""
    users = [user for user in value.users if user in run]
    return any(
        _is_fused(user, run) if value in aliased_inputs(user) else not is_kernel(user) for user in users
    )


def _calls_that_make(value: fx.Node) -> Collection[fx.Node]:
    """The calls that make `value` from much smaller tensors; none if there is no such way."""
    size, found, pending = bytes_of_value(value), dict[fx.Node, None](), [value]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        if not _is_cheap(node) or len(found) == MOST_CALLS:
            return ()
        found[node] = None
        pending += [given for given in node.all_input_nodes if bytes_of_value(given) * SPREAD > size]
    return found


def _is_cheap(node: fx.Node) -> bool:
    """Whether the call shows what it is given, or computes element by element."""
    target: Any = node.target
    if node.op != "call_function" or not is_operator_overload(target) or has_effect(node) or is_random(node):
        return False
    is_plain = isinstance(node.meta.get("val"), torch.Tensor)
    return is_plain and (torch.Tag.pointwise in target.tags or target in _ALSO or bool(aliased_inputs(node)))


#: not tagged as pointwise.
_ALSO = (
    torch.ops.aten.full.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.iota.default,
)
