"""Add contributions to half-precision gradients in single precision.

In: a joint graph. Out: the same, where sums of gradients in float16 or bfloat16 are computed in float32 and
rounded once. The results are more accurate, but not the same, so this pass is opt-in.

- A sum of three or more contributions is rounded at its end, not at each step.
- The reductions that end in a parameter's gradient (``sum`` over many elements, the scatter of an embedding)
  are computed in float32. Their results are added before they are rounded.

Dtypes and layouts of the graph's outputs do not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import same_layout
from retrograd.graph.joint import cotangents_reaching, output_values
from retrograd.graph.reach import reached
from retrograd.passes.aten.edit import call, signature_of

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_ADD = _aten.add.Tensor
_CAST = _aten._to_copy.default
_SUMS = frozenset({_aten.sum.default, _aten.sum.dim_IntList})
#: positions of the tensors that hold the addends; elsewhere it is the first argument.
_ADDENDS: Mapping[Any, tuple[int, ...]] = {
    _ADD: (0, 1),
    _aten.embedding_dense_backward.default: (0,),
    _aten.index_add.default: (0, 3),
    _aten.scatter_add.default: (0, 3),
}
#: add to rows of a table.
_SCATTERS = frozenset(_ADDENDS) - {_ADD}
_VIEWS = frozenset(
    {_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default, _aten.reshape.default}
)


def accumulate_in_fp32(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, many: int = 1024
) -> fx.GraphModule:
    """Rewrite the sums of gradients in `gm`, in place.

    Args:
        gm: a joint graph with its signature and ``meta["val"]``.
        example_inputs: unused.
        many: a ``sum`` over at least this many elements is computed in float32.

    Raises:
        PassError: the graph has no signature.
    """
    signature = signature_of(gm, "accumulate_in_fp32")
    outputs = output_values(gm.graph)
    ends = {outputs[place] for place in signature.parameter_gradients} - {None}
    rules = _Rules(cotangents_reaching(gm.graph, signature), many, _reductions_before(ends))
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    changed = False
    for node in reversed(place):
        if node.users and (node in ends or node.target is _ADD):
            tree = sorted(rules.tree(node), key=place.__getitem__)
            if sum(map(rules.roundings, tree)) > 1:
                changed = _rewritten(node, tree) or changed
    if changed:
        gm.recompile()
    return gm


def _reductions_before(ends: set[fx.Node]) -> frozenset[fx.Node]:
    """The sums and scatters that lead to `ends` through nothing but views and additions."""
    passed = {*_VIEWS, _ADD}
    found = reached(ends, lambda node: node.all_input_nodes if node.target in passed else ())
    return frozenset(node for node in found if node.target in _SUMS or node.target in _SCATTERS)


@dataclass(frozen=True)
class _Rules:
    """What is computed in float32: additions, views between them, and chosen reductions."""

    reaching: Mapping[fx.Node, int]
    many: int
    reductions: frozenset[fx.Node]

    def tree(self, root: fx.Node) -> set[fx.Node]:
        """The additions, views and reductions that lead to `root` and to nothing else."""
        found: set[fx.Node] = set()
        pending = [root]
        while pending:
            node = pending.pop()
            if not self._is_half(node) or (node is not root and len(node.users) > 1):
                continue
            if self._adds(node) or node.target in _VIEWS:
                found.add(node)
                pending += node.all_input_nodes
            elif self._sums(node) or (node.target in _SCATTERS and node in self.reductions):
                found.add(node)
        return found

    def roundings(self, node: fx.Node) -> int:
        """How often the call rounds to half precision: 0, 1, or 2 for "at every element"."""
        return 0 if node.target in _VIEWS else 2 if node.target in _SCATTERS else 1

    def _is_half(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        return value.dtype in _HALVES and bool(self.reaching.get(node))

    def _adds(self, node: fx.Node) -> bool:
        if node.target is not _ADD or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            return False
        return all(self._is_half(value) for value in node.all_input_nodes)

    def _sums(self, node: fx.Node) -> bool:
        if node.target not in _SUMS or node not in self.reductions or node.kwargs.get("dtype") is not None:
            return False
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        if not all(isinstance(size, int) for size in (*before.shape, *after.shape)):
            return True
        return math.prod(before.shape) >= self.many * max(math.prod(after.shape), 1)


def _rewritten(root: fx.Node, tree: Sequence[fx.Node]) -> bool:
    """Replace `root` by the sum in float32, rounded, unless that would have another layout."""
    made: list[fx.Node] = []
    try:
        rounded = _rounded(root, tree, made)
    except RuntimeError:  # a view that the layout of the sum in float32 does not allow
        rounded = None
    if rounded is None or not same_layout(rounded.meta["val"], root.meta["val"]):
        for node in reversed(made):
            root.graph.erase_node(node)
        return False
    root.replace_all_uses_with(rounded)
    for node in reversed(tree):
        root.graph.erase_node(node)
    return True


def _rounded(root: fx.Node, tree: Sequence[fx.Node], made: list[fx.Node]) -> fx.Node:
    """`root` computed in float32 and rounded; each call stands where that of `tree` stood, and in `made`."""
    exact: dict[fx.Node, fx.Node] = {}

    def new(like: fx.Node, target: Any, args: Sequence[Any], **kwargs: Any) -> fx.Node:
        made.append(call(like, target, tuple(args), kwargs))
        return made[-1]

    def in_fp32(value: Any) -> fx.Node:
        if value not in exact:
            exact[value] = new(value, _CAST, (value,), dtype=torch.float32)
        return exact[value]

    for node in tree:
        with root.graph.inserting_before(node):
            if node.target in _SUMS:
                exact[node] = new(node, node.target, node.args, **{**node.kwargs, "dtype": torch.float32})
                continue
            cast_at = _ADDENDS.get(node.target, (0,))
            args = [in_fp32(arg) if n in cast_at else arg for n, arg in enumerate(node.args)]
            exact[node] = new(node, node.target, args, **node.kwargs)
    with root.graph.inserting_before(root):
        return new(root, _CAST, (exact[root],), dtype=root.meta["val"].dtype)
