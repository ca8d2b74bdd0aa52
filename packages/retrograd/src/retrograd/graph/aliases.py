"""Alias analysis: which values of an FX graph share memory.

In: calls with example values. Out: the inputs whose memory a call's result may share, according to the
operator's schema; for each call of a graph, the calls that own the memory of its value.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import getitem

import torch
from torch import fx
from torch.fx.node import map_arg

from retrograd.facts import fact
from retrograd.graph.fx import SYMBOLIC, arguments_of, is_operator_overload, is_wait
from retrograd.graph.reach import origins

#: Types of ``meta["val"]`` of values that may share memory; None if the value is unknown.
_MAY_HOLD_MEMORY = (torch.Tensor, list, tuple, type(None))


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the call's result may share."""
    target = node.target
    if node.op != "call_function" or target in SYMBOLIC:
        return []
    inputs: list[fx.Node] = node.all_input_nodes
    if isinstance(target, torch._ops.OpOverload):
        if any(returned.alias_info is not None for returned in target._schema.returns):
            given, inputs = arguments_of(node), []
            shared = [one.name for one in target._schema.arguments if one.alias_info is not None]
            map_arg([given.get(name) for name in shared], inputs.append)
        elif not (
            fact("alias", target) == "undeclared"
            or torch.Tag.maybe_aliasing_or_mutating in target.tags
            or is_wait(node)
        ):
            return []
    return [value for value in inputs if isinstance(value.meta.get("val"), _MAY_HOLD_MEMORY)]


def memory_owners(nodes: Iterable[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each of `nodes`, which come in graph order, the nodes whose memory its value shares; itself if it
    owns its memory."""
    return origins(nodes, bases_of)


def bases_of(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the call's result is known to share.

    Higher-order calls own the memory of their results. So does a call with several results, unless the call
    is a view, as ``split`` is.
    """
    bases = aliased_inputs(node)
    if node.target is getitem:
        return bases if bases and bases_of(bases[0]) else []
    return bases if is_operator_overload(node.target) else []
