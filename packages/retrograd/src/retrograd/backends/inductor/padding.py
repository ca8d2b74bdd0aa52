"""Completes Inductor's padding of matrix products.

In: a graph after Inductor's joint passes. If the rows of an operand are not aligned, those passes pad the
operand, and slice the padded product. Out: the same graph, changed. If another product reads the same operand
transposed, as for a weight's gradient, it reads the padded operand too. And we give visible results their
traced strides again. We add the copy as a call in the graph, so that it can be fused with a kernel that reads
the product anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._prims_common import make_contiguous_strides_for

from retrograd.graph.fx import is_symbolic
from retrograd.runtime.tensor import is_dense

aten = torch.ops.aten


def read_padded(graph: fx.Graph) -> None:
    """If a product reads a matrix padded, have the products of its transpose read it padded too."""
    for padded in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        matrix: Any = padded.args[0]
        if _widens_rows(padded, matrix.meta["val"]):
            for product in list(_products_of_transposed(matrix)):
                behind(matrix).append(padded)
                _pad(product, padded, matrix.meta["val"].shape[1])


def close_gaps(graph: fx.Graph) -> list[fx.Node]:
    """Copy results that have gaps but were traced as contiguous. Returns the copies."""
    output, copies = graph.output_node(), []
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    strides = output.meta.get("original_output_strides", ())
    for place in output.meta.get("user_visible_output_idxs", ()) if strides else ():
        value = results[place].meta.get("val")
        is_static = isinstance(value, torch.Tensor) and not is_symbolic(value)
        has_gaps = is_static and not is_dense(value)
        if has_gaps and tuple(strides[place]) == make_contiguous_strides_for(value.shape):
            with graph.inserting_before(output):
                results[place] = graph.call_function(
                    aten.clone.default, (results[place],), {"memory_format": torch.contiguous_format}
                )
            copies.append(results[place])
    output.args = (results,)
    return copies


def _widens_rows(padded: fx.Node, matrix: torch.Tensor) -> bool:
    given: Any = padded.args
    front, behind, *others = given[1]
    is_static = matrix.dim() == 2 and not is_symbolic(matrix)
    return is_static and front == 0 and behind > 0 and not any(others) and not any(given[2:])


def _products_of_transposed(matrix: fx.Node) -> Iterator[fx.Node]:
    for user in matrix.users:
        if user.target is aten.permute.default and list(user.args[1]) == [1, 0]:  # type: ignore[arg-type]
            for product in user.users:
                # If it is a result, the user would get a gradient in a larger memory than eager's.
                is_result = any(reader.op == "output" for reader in product.users)
                if product.target is aten.mm.default and product.args[0] is user and not is_result:
                    yield product


def behind(node: fx.Node) -> fx.Node:
    """The node after which we may insert calls that read only `node`."""
    return node.graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node


def _pad(product: fx.Node, padded: fx.Node, rows: int) -> None:
    graph = product.graph
    with graph.inserting_before(product):
        transposed = graph.call_function(aten.permute.default, (padded, [1, 0]))
        wide = graph.call_function(aten.mm.default, (transposed, product.args[1]))
        narrow = graph.call_function(aten.slice.Tensor, (wide, 0, 0, rows))
    for made in (transposed, wide, narrow):
        made.meta.update({key: value for key, value in product.meta.items() if key not in _OF_VALUES})
    product.replace_all_uses_with(narrow)
    graph.erase_node(product)


#: entries of a node's metadata that describe its value.
_OF_VALUES = ("val", "tensor_meta")
