"""Shorten views: no chains, no views that change nothing, no pairs that undo each other.

In: a joint graph. Out: the same values in the same memory, with fewer views.

- a view of a view becomes one view (view, reshape, _unsafe_view; expand; t, transpose and permute);
- a view that gives its input's sizes and strides is replaced by that input.

Permutations are composed by arithmetic. Every other change is tried on the fake values first, and made only
if sizes, strides and offset stay the same. So a chain that copies still copies: its result is contiguous, and
a view of the source with the same strides would mean that there was nothing to copy. A view that is itself an
output stays a tensor of its own. Other chains over symbolic sizes are left alone, because trying them would
add guards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import same_layout
from retrograd.passes.aten.edit import fake_value

_aten = torch.ops.aten
_SHAPES = frozenset({_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default})
_EXPANDS = frozenset({_aten.expand.default})
_PERMUTES = frozenset({_aten.t.default, _aten.transpose.int, _aten.permute.default})
_SAME = frozenset({_aten.alias.default, _aten.detach.default})
_VIEWS = _SHAPES | _EXPANDS | _PERMUTES | _SAME
#: a chain becomes the operator of its outer view, unless an inner one may copy.
_FAMILIES = (_SHAPES, _EXPANDS, _PERMUTES)


def normalise_views(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Normalise the views of `gm`, in place."""
    outputs = set(gm.graph.output_node().all_input_nodes)
    for node in list(gm.graph.nodes):
        if node.target not in _VIEWS or not _has_tensors(node):
            continue
        _shorten(node)
        if node not in outputs and same_layout(node.meta["val"], _source(node).meta["val"]):
            node.replace_all_uses_with(_source(node))
    for node in reversed(gm.graph.nodes):
        if not node.users and node.target in _VIEWS:
            gm.graph.erase_node(node)
    return gm


def _source(node: fx.Node) -> Any:
    return node.args[0]


def _has_tensors(node: fx.Node) -> bool:
    source = _source(node)
    values = (node.meta.get("val"), source.meta.get("val") if isinstance(source, fx.Node) else None)
    return all(isinstance(value, torch.Tensor) and value.layout is torch.strided for value in values)


def _shorten(node: fx.Node) -> None:
    """Let `node` read the source of its own source, if that gives the same."""
    inner = _source(node)
    family = next((family for family in _FAMILIES if node.target in family), frozenset())
    if inner.target not in family or not _has_tensors(inner):
        return
    outer, rest = _composed(node, inner)
    if family is _PERMUTES or _same(node, inner, outer, rest):
        node.target = outer
        node.args = (_source(inner), *rest)


def _composed(node: fx.Node, inner: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """One operator, with its arguments after the source, that does what both do."""
    if node.target in _PERMUTES:
        order = [_order(inner)[dim] for dim in _order(node)]
        is_trivial = order == sorted(order)
        return (_aten.alias.default, ()) if is_trivial else (_aten.permute.default, (order,))
    if node.target in _EXPANDS:
        return node.target, (list(node.meta["val"].shape), *node.args[2:])
    return node.target, (list(node.meta["val"].shape),)


def _order(node: fx.Node) -> list[int]:
    """Which dimension of its source each dimension of a permuting view is."""
    rank = node.meta["val"].dim()
    if node.target is _aten.permute.default:
        return [int(dim) % rank for dim in node.args[1]]  # type: ignore[arg-type, union-attr]
    order = list(range(rank))
    if node.target is _aten.t.default:
        return order[::-1]
    one, other = (int(dim) % rank if rank else 0 for dim in node.args[1:3])  # type: ignore[arg-type]
    if rank:
        order[one], order[other] = order[other], order[one]
    return order


def _is_symbolic(node: fx.Node) -> bool:
    value = node.meta["val"]
    return any(not isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))


def _same(node: fx.Node, inner: fx.Node, target: Any, rest: tuple[Any, ...]) -> bool:
    """Whether `target` on the source of `inner` gives what `node` gives, in memory of the same kind."""
    if _is_symbolic(_source(inner)):
        return False
    source = _source(inner).meta["val"]
    try:
        between = fake_value(inner.target, (source, *inner.args[1:]), inner.kwargs)  # type: ignore[arg-type]
        old = fake_value(node.target, (between, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
        new = target(source, *rest, **node.kwargs)
    except RuntimeError:  # no view of the source has these sizes
        return False
    return old is not None and same_layout(new, old)
