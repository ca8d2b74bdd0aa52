"""The seeds of a graph that is compiled in parts, drawn at once.

In: an ATen graph in which calls draw random numbers. Out: a copy in which they make them of seeds, as
Inductor has them do; one call at its beginning draws the seeds.

Inductor draws the seeds of a graph by one kernel. Of a graph in parts, every part would launch one for its
own, and the host needs longer for that than for any other of its kernels. Drawn at once, they are also the
seeds that code of the whole draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config

from retrograd._torch.fx import copied_module, lazy_graph_module
from retrograd._torch.trace.fakes import know_values

aten = torch.ops.aten

#: the operators that Inductor makes of seeds, and how its own one names them.
_MODES: dict[Any, str] = {aten.rand.default: "rand", aten.randn.default: "randn"}

#: places that a seed has in memory: all begin at a multiple of 16 bytes then, so that copies of a part that
#: repeats get seeds that lie alike.
_WIDTH = 2


def with_seeds_at_once(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """`gm` itself, if fewer than two of its calls draw numbers that Inductor makes of seeds.

    Args:
        gm: a functional ATen graph, which stays as it is.
        inputs: fakes of its inputs.
    """
    if config.fallback_random or getattr(config, "align_random_eager", False):
        return gm
    if sum(map(_is_made_of_seed, gm.graph.nodes)) < 2:
        return gm
    from torch._inductor import inductor_prims

    copy = copied_module(gm, lazy_graph_module)
    graph, by_device = copy.graph, dict[torch.device, list[fx.Node]]()
    for node in filter(_is_made_of_seed, graph.nodes):
        by_device.setdefault(node.meta["val"].device, []).append(node)
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for device, draws in by_device.items():
        with graph.inserting_before(first):
            drawn = graph.call_function(inductor_prims.seeds, (len(draws), device))
            wide = graph.call_function(aten.unsqueeze.default, (drawn, 1))
            wide = graph.call_function(aten.expand.default, (wide, [len(draws), _WIDTH]))
            form: dict[str, Any] = {"memory_format": torch.contiguous_format}
            rows = graph.call_function(aten.clone.default, (wide,), form)
            seeds = [graph.call_function(aten.select.int, (rows, 0, i)) for i in range(len(draws))]
        for node, seed in zip(draws, seeds, strict=True):
            _make_of(seed, node)
    return know_values(copy, inputs)


def _is_made_of_seed(node: fx.Node) -> bool:
    others = {key: value for key, value in node.kwargs.items() if key not in ("dtype", "device")}
    return node.target in _MODES and not any(others.values()) and len(node.args) == 1


def _make_of(seed: fx.Node, node: fx.Node) -> None:
    """Put what makes numbers of `seed` in the place of `node`, which draws them."""
    from torch._inductor import inductor_prims

    graph, value = node.graph, node.meta["val"]
    with graph.inserting_before(node):
        number = graph.call_function(inductor_prims.lookup_seed, (seed, 0))
        made = graph.call_function(inductor_prims.random, (node.args[0], number, _MODES[node.target]))
        if value.dtype != torch.float32:
            made = graph.call_function(torch.ops.prims.convert_element_type.default, (made, value.dtype))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
