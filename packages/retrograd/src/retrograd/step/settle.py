"""Make the graph of a step ready to run: what only tracing needed goes, writes to inputs come at the end.

In: a graph as traced, whose last outputs are new values of some inputs. Out: the same graph, changed: those
values are written by ``copy_`` instead, and no other output shares memory with an input or another output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.effects import without_tokens
from retrograd._torch.operators import aliased_inputs, is_collective_with_work, is_mutating
from retrograd._torch.stand_ins import StepRefusedError
from retrograd.passes.aten.remove_dead_code import remove_dead_code

__all__ = ["settle"]

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
_PROFILER = "profiler::"


def settle(gm: fx.GraphModule, written: Sequence[int], count: int) -> frozenset[int]:
    """Change `gm` in place.

    Args:
        gm: the graph. written: places of the inputs whose new values are the outputs from `count` on.

    Returns:
        The places of the inputs that the graph still takes.

    Raises:
        StepRefusedError: it writes to a tensor otherwise, or communicates in a way that no graph shows.
    """
    without_tokens(gm.graph)
    _drop_tracing(gm.graph)
    for node in gm.graph.nodes:
        if is_mutating(node) or is_collective_with_work(node):
            raise StepRefusedError("mutation", f"calls {node.target}, which a functional graph does not hold")
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    output = gm.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    owned: set[fx.Node] = set()
    kept = [_own(gm.graph, output, value, owned) for value in values[:count]]
    news = [_own(gm.graph, output, value, owned, is_copied=True) for value in values[count:]]
    with gm.graph.inserting_before(output):
        for place, value in zip(written, news, strict=True):
            copy = gm.graph.call_function(_aten.copy_.default, (placeholders[place], value))
            copy.meta = {"val": placeholders[place].meta.get("val")}
    output.args = (tuple(kept),)
    remove_dead_code(gm)
    used = frozenset(place for place, node in enumerate(placeholders) if node.users)
    for node in placeholders:
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return used


def _drop_tracing(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        if node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif str(getattr(node.target, "name", lambda: "")()).startswith(_PROFILER):
            graph.erase_node(node)


def _own(graph: fx.Graph, output: fx.Node, value: Any, owned: set[fx.Node], is_copied: bool = False) -> Any:
    """`value`, or a copy of it if its memory belongs to an input or to another output. What is copied in the
    end may be shared, but not with an input, which may have been written before."""
    if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    roots = _roots(value)
    if any(root.op in ("placeholder", "get_attr") for root in roots) or (not is_copied and roots & owned):
        with graph.inserting_before(output):
            copy = graph.call_function(_aten.clone.default, (value,))
        copy.meta = dict(value.meta)
        return copy
    if not is_copied:
        owned |= roots
    return value


def _roots(value: fx.Node) -> set[fx.Node]:
    """The nodes that made the memory that a value may show."""
    found: set[fx.Node] = set()
    stack, seen = [value], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        shown = aliased_inputs(node)
        stack.extend(shown)
        if not shown:
            found.add(node)
    return found
