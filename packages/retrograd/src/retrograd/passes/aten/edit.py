"""Put calls into a joint graph, with the metadata that later stages read; find what is visible outside of it.

In: a graph, an operator, arguments, and the node whose place and origin the new call takes. Out: the new
node. Its ``meta["val"]`` is computed from that of its arguments. Of a graph also the nodes whose value may
share memory with an output, or with a tensor that the graph writes to: each must stay a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from retrograd._torch.fx import aliased_inputs, is_mutating
from retrograd.errors import PassError
from retrograd.graph.joint import JointSignature

_OF_THE_VALUE = ("val", "tensor_meta", "original_aten", "recompute")


def call(
    like: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """A new call at the graph's insertion point, with the origin (``seq_nr``, stack trace, module) of
    `like`."""
    node = like.graph.call_function(target, args, kwargs or {})
    node.meta = {key: value for key, value in like.meta.items() if key not in _OF_THE_VALUE}
    value = fake_value(target, args, kwargs or {})
    if value is not None:
        node.meta["val"] = value
    return node


def fake_value(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result for the fake values of the arguments; None if an argument has no fake value."""
    found: list[fx.Node] = []
    map_arg((args, kwargs), found.append)
    if any("val" not in node.meta for node in found):
        return None
    fake_args, fake_kwargs = map_arg((args, kwargs), lambda node: node.meta["val"])
    return target(*fake_args, **fake_kwargs)


def signature_of(gm: fx.GraphModule, name: str) -> JointSignature:
    """The roles of a joint graph."""
    signature = gm.meta.get("signature")
    if not isinstance(signature, JointSignature):
        text = f"{name} needs to know what the graph's inputs and outputs mean, and gm.meta has no signature"
        way_out = "give it a joint graph (retrograd.aot.capture), and keep gm.meta in passes before it"
        raise PassError.because("no-signature", text, f"passes.{name}", way_out=way_out)
    return signature


def nodes_seen_outside(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that share memory with an output or with a tensor that is written to; outputs included."""
    base: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while base[node] is not node:
            base[node] = base[base[node]]
            node = base[node]
        return node

    for node in graph.nodes:
        base[node] = node
        for value in aliased_inputs(node):
            base[root(value)] = root(node)
    seen = {root(value) for value in graph.output_node().all_input_nodes}
    for node in graph.nodes:
        if is_mutating(node):
            seen |= {root(value) for value in node.all_input_nodes}
    return frozenset(node for node in base if root(node) in seen)
