"""The laws of the values in this folder, checked.

In: values before and after a stage or pass. Out: nothing, or a `VerificationError` that names the stage, the
node, its role and the passes so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd.errors import Reason, VerificationError
from retrograd.graph.backward_graph import BackwardGraph, CallKind
from retrograd.graph.joint import (
    Gradient,
    JointSignature,
    Primal,
    bits_of,
    boundaries_in,
    cotangents_reaching,
)


def verify_layout(before: BackwardGraph, after: BackwardGraph) -> None:
    """`after` makes the calls of `before` in another order.

    Raises:
        VerificationError: a call other than a sum is missing, there twice, or reads a value that is not
            there yet.
    """
    wanted, made = _calls(before), _calls(after)
    if wanted != made:
        missing = wanted - made
        target, index = next(iter(missing + (made - wanted)))
        name = getattr(target, "__name__", str(target))
        _fail(after, index, f"{name} is made {'too rarely' if (target, index) in missing else 'too often'}")
    defined = {node for node, _ in after.placeholders()}
    for node, call in after.calls():
        for value in node.all_input_nodes:
            if value not in defined:
                _fail(after, call.node_call, f"{node.name} reads {value.name} before it is there")
        defined.add(node)


def _calls(backward: BackwardGraph) -> Counter[tuple[Any, int]]:
    return Counter(
        [(node.target, call.node_call) for node, call in backward.calls() if call.kind is not CallKind.SUM]
    )


def _fail(backward: BackwardGraph, node_call: int, text: str) -> None:
    raise VerificationError(
        Reason(
            "layout",
            text,
            "live.schedule",
            node=backward.node_name(node_call),
            source=backward.node_calls[node_call].source,
            way_out="this is a bug in retrograd: please report it with the program",
        )
    )


_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class OutputKind:
    """What callers rely on of one output: its dtype and sizes (as text, so that symbolic ones get no
    guard)."""

    dtype: torch.dtype
    sizes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(self.sizes)}]"


def output_values(graph: fx.Graph) -> tuple[Any, ...]:
    """What the graph returns: nodes, and constants such as None."""
    (values,) = graph.output_node().args
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def output_kinds(graph: fx.Graph) -> tuple[OutputKind | None, ...]:
    """One entry per output; None where the graph's metadata knows no tensor."""
    return tuple(_kind(value) for value in output_values(graph))


def _kind(value: Any) -> OutputKind | None:
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor):
        return None
    return OutputKind(tensor.dtype, tuple(str(size) for size in tensor.shape))


def verify_joint(
    gm: fx.GraphModule,
    signature: JointSignature,
    stage: str,
    passes_so_far: Sequence[str] = (),
    kinds: Sequence[OutputKind | None] | None = None,
) -> None:
    """Check the laws of a joint graph.

    The graph is well formed; it has one placeholder per input role and one output per output role; no output
    of the forward depends on a cotangent, and no gradient on one that is not a root of its region; nothing is
    changed in place but primals, by ``copy_`` at the end; outputs have the dtype and sizes that they had.

    Raises:
        VerificationError: a law is broken.
    """
    law = _Law(stage, tuple(passes_so_far))
    law.well_formed(gm)
    law.complete(gm.graph, signature)
    law.divided(gm.graph, signature)
    law.functional(gm.graph, signature)
    if kinds is not None:
        law.alike(gm.graph, signature, kinds)


@dataclass(frozen=True)
class _Law:
    stage: str
    passes: tuple[str, ...]

    def well_formed(self, gm: fx.GraphModule) -> None:
        try:
            gm.graph.lint()
        except Exception as error:
            self._broken("lint", f"the graph is not well formed: {error}", cause=error)
        last = next(iter(reversed(gm.graph.nodes)), None)
        if last is None or last.op != "output":
            self._broken("lint", "the graph has no output at its end")

    def complete(self, graph: fx.Graph, signature: JointSignature) -> None:
        placeholders = graph.find_nodes(op="placeholder")
        if len(placeholders) != len(signature.inputs):
            missing = signature.inputs[len(placeholders) :]
            text = f"{len(placeholders)} placeholders where the signature has {len(signature.inputs)} inputs"
            self._broken("inputs", text, role=str(missing[0]) if missing else "")
        outputs = output_values(graph)
        if len(outputs) != len(signature.outputs):
            lacking = signature.outputs[len(outputs) :]
            text = f"{len(outputs)} outputs where the signature has {len(signature.outputs)}"
            self._broken("outputs", text, role=str(lacking[0]) if lacking else "")

    def divided(self, graph: fx.Graph, signature: JointSignature) -> None:
        reaching = cotangents_reaching(graph, signature)
        for value, role in zip(output_values(graph), signature.outputs, strict=True):
            allowed = bits_of(signature.regions[role.region].roots) if isinstance(role, Gradient) else 0
            outside = reaching.get(value, 0) & ~allowed
            if outside:
                found = ", ".join(map(str, boundaries_in(outside)))
                text = f"{role} depends on the cotangent of boundary {found}"
                is_gradient = isinstance(role, Gradient)
                why = "which is no root of its region" if is_gradient else "and belongs to the forward"
                self._broken("dependence", f"{text}, {why}", node=value, role=str(role))

    def functional(self, graph: fx.Graph, signature: JointSignature) -> None:
        roles = dict(zip(graph.find_nodes(op="placeholder"), signature.inputs, strict=True))
        at_end = True
        for node in reversed(graph.nodes):
            schema = getattr(node.target, "_schema", None)
            is_mutating = node.op == "call_function" and schema is not None and schema.is_mutable
            into = roles.get(node.args[0]) if node.target is _COPY else None
            if is_mutating and not (at_end and isinstance(into, Primal)):
                text = f"{node.target} changes a tensor in place"
                self._broken("mutation", text, node=node, role=str(into or ""))
            at_end = at_end and (is_mutating or node.op == "output")

    def alike(self, graph: fx.Graph, signature: JointSignature, before: Sequence[OutputKind | None]) -> None:
        outputs = zip(output_values(graph), signature.outputs, before, strict=True)
        for value, role, expected in outputs:
            if expected is None:
                continue
            found = _kind(value)
            if not isinstance(value, fx.Node):
                self._broken("outputs", f"{role} is {value!r} and was {expected}", role=str(role))
            if found is not None and found != expected:
                self._broken("outputs", f"{role} is {found} and was {expected}", node=value, role=str(role))

    def _broken(
        self, code: str, text: str, node: Any = None, role: str = "", cause: Exception | None = None
    ) -> None:
        named = node.name if isinstance(node, fx.Node) else ""
        after = f", after passes [{', '.join(self.passes)}]" if self.passes else ""
        raise VerificationError(
            Reason(
                f"joint-{code}",
                text,
                self.stage + after,
                node=f"{named} ({role})" if named and role else named or role,
                source=_source(node),
                way_out=_WAYS_OUT[code],
            )
        ) from cause


_WAYS_OUT = {
    "lint": "in the pass, insert a node before its users and erase it only when it has none",
    "inputs": "a pass keeps every placeholder, in order, even one that nothing reads",
    "outputs": "a pass keeps every output, in order, with its dtype and sizes",
    "dependence": "in the pass, keep values that a cotangent reaches out of the forward and of other regions",
    "mutation": "use the functional operator; only copy_ into a primal, after everything else, is allowed",
}


def _source(node: Any) -> str:
    trace = node.meta.get("stack_trace") if isinstance(node, fx.Node) else None
    lines = [line.strip() for line in (trace or "").splitlines() if line.strip()]
    return "  ".join(lines[-2:])
