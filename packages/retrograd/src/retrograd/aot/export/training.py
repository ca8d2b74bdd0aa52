"""Forward, loss and backward as one graph.

In: a joint graph and the value that is the loss. Out: a graph that takes the primals and gives the forward
values and the gradients, each added up as eager's engine adds it up when the loss is differentiated with
cotangent 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from retrograd._torch.fx import is_symbolic
from retrograd.errors import ExportError
from retrograd.graph.joint import Cotangent, Gradient, Region, bits_of, cotangents_reaching, output_values
from retrograd.graph.joint_graph import JointValues
from retrograd.passes.aten.edit import call
from retrograd.passes.aten.remove_dead_code import remove_dead_code

_aten = torch.ops.aten


@dataclass
class WholeBackward:
    """Forward, loss and backward of `joint`, under way."""

    joint: JointValues
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    cotangents: dict[int, fx.Node] = field(default_factory=dict)
    gradients: dict[int, fx.Node] = field(default_factory=dict)

    def built(self, loss: int, wanted: Sequence[int]) -> tuple[fx.GraphModule, tuple[int, ...]]:
        """The graph, and the primals whose gradients it gives after the forward values `wanted`, in eager's
        order.

        Raises:
            ExportError: a part of the backward needs to know that a cotangent is undefined.
        """
        signature, nodes = self.joint.signature, self.joint.gm.graph.nodes
        self.reaching = cotangents_reaching(self.joint.gm.graph, signature)
        roles = zip(self.joint.gm.graph.find_nodes(op="placeholder"), signature.inputs, strict=True)
        self.entries = {role.boundary: node for node, role in roles if isinstance(role, Cotangent)}
        self.outputs = list(zip(output_values(self.joint.gm.graph), signature.outputs, strict=True))
        self._copy([node for node in nodes if node.op != "output" and not self.reaching[node]])
        forward = [value for value, role in self.outputs if not isinstance(role, Gradient)]
        root = next(i for i, boundary in enumerate(signature.boundaries) if boundary.value == loss)
        start = self.made[forward[loss]]
        self.cotangents[root] = call(start, _aten.ones_like.default, (start,))
        for step in signature.order:
            if not step.is_leaf:
                self._run(step.index, signature.regions[step.index])
        results = [self.made.get(forward[value], forward[value]) for value in wanted]
        order = [step.index for step in signature.order if step.is_leaf and step.index in self.gradients]
        order += [primal for primal in self.gradients if primal not in order]
        self.graph.output((*results, *(self.gradients[primal] for primal in order)))
        gm = fx.GraphModule(self.joint.gm, self.graph, "training")
        remove_dead_code(gm)
        gm.recompile()
        return gm, tuple(order)

    def _copy(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            copy = self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
            copy.meta, copy.name = dict(node.meta), node.name

    def _run(self, number: int, region: Region) -> None:
        if not any(root in self.cotangents for root in region.roots):
            return
        for root in region.roots:
            self.made[self.entries[root]] = self._cotangent(number, root)
        bits = bits_of(region.roots)
        inside = [node for node, found in self.reaching.items() if found & bits]
        self._copy([node for node in inside if node.op not in ("placeholder", "output")])
        for value, role in self.outputs:
            if isinstance(role, Gradient) and role.region == number and value is not None:
                to = self.cotangents if role.of.is_boundary else self.gradients
                made, before = self.made[value], to.get(role.of.index)
                to[role.of.index] = made if before is None else call(made, _aten.add.Tensor, (before, made))

    def _cotangent(self, region: int, root: int) -> fx.Node:
        """What flows into `root`, in the layout that was traced."""
        traced = self.entries[root].meta["val"]
        if root in self.cotangents:
            return _laid_out(self.cotangents[root], traced)
        if region in self.joint.undefined_matters:
            raise ExportError.because(
                "undefined-cotangent",
                f"region {region} of the backward has to know that nothing flows into boundary {root}, as a "
                "custom function sees it",
                "aot.export",
                node=f"cotangent of boundary {root}",
                way_out='kind="joint", or return the loss alone',
            )
        value = self.made[self.outputs[self.joint.signature.boundaries[root].value][0]]
        return _laid_out(call(value, _aten.zeros_like.default, (value,)), traced)


def _laid_out(cotangent: fx.Node, traced: torch.Tensor) -> fx.Node:
    found = cotangent.meta["val"]
    if [str(stride) for stride in found.stride()] == [str(stride) for stride in traced.stride()]:
        return cotangent
    if is_symbolic(traced):
        return call(cotangent, _aten.clone.default, (cotangent,), {"memory_format": torch.contiguous_format})
    sizes, strides = list(traced.shape), list(traced.stride())
    empty = call(cotangent, _aten.new_empty_strided.default, (cotangent, sizes, strides))
    return call(cotangent, _aten.copy.default, (empty, cotangent))
