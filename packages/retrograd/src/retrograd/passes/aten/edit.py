"""Put calls into a joint graph, with the metadata that later stages read.

In: a graph, an operator, arguments, and the node whose place and origin the new call takes. Out: the new
node. Its ``meta["val"]`` is computed from that of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.node import map_arg

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
    if all("val" in value.meta for value in node.all_input_nodes):
        fake_args, fake_kwargs = map_arg((args, kwargs or {}), lambda value: value.meta["val"])
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def signature_of(gm: fx.GraphModule, name: str) -> JointSignature:
    """The roles of a joint graph."""
    signature = gm.meta.get("signature")
    if not isinstance(signature, JointSignature):
        text = f"{name} needs to know what the graph's inputs and outputs mean, and gm.meta has no signature"
        way_out = "give it a joint graph (retrograd.aot.capture), and keep gm.meta in passes before it"
        raise PassError.because("no-signature", text, f"passes.{name}", way_out=way_out)
    return signature
