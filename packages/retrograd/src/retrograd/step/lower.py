"""Give the graph of a whole step to a backend.

In: a `StepGraph` and a backend. Out: a boxed callable that takes the graph's inputs. A backend that compiles
nothing gets the graph as it is. Another one gets the part that computes with tensors, after its
decompositions; what computes numbers runs around it on the host, in Python, as it does eagerly.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.boxed import boxed
from retrograd._torch.number_tensors import with_number_tensors
from retrograd.backends.base import Backend, Boxed, Half
from retrograd.backends.eager import EagerBackend
from retrograd.events import counters
from retrograd.step.draws import draw_in_place
from retrograd.step.host import HostPart, host_part
from retrograd.step.plan import StepGraph

__all__ = ["lower"]


def lower(backend: Backend, step: StepGraph) -> Boxed:
    """Compile the graph.

    Raises:
        NumbersInTheWayError, UnknownNumberError: numbers cannot be taken out of the graph.
        Exception: whatever the backend raises.
    """
    counters["step_compiles"] += 1
    if isinstance(backend, EagerBackend):
        examples = [step.examples[i] for i in sorted(step.used)]
        return backend.compile(draw_in_place(step.gm), examples, _half(step.gm))
    part = host_part(step.gm)
    examples = [node.meta["val"] for node in part.given]
    rest, inputs = with_number_tensors(part.rest, examples, step.fake_mode, backend.decompositions())
    return _around(step.gm, part, backend.compile(rest, inputs, _half(rest)))


def _half(gm: fx.GraphModule) -> Half:
    results: Sequence[Any] = gm.graph.output_node().args[0]  # type: ignore[assignment]
    return Half(is_inference=True, visible=len(results))


def _around(gm: fx.GraphModule, part: HostPart, code: Boxed) -> Boxed:
    """A callable that runs what comes before, the compiled rest, and what comes after."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def copied(nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)

    copied([node for node in gm.graph.nodes if node.op == "placeholder"])
    copied(part.before)
    given = [
        graph.call_function(_as_tensor, (made[node],))
        if isinstance(node.meta["val"], torch.SymFloat)
        else made[node]
        for node in part.given
    ]
    results = graph.call_function(_running(code), tuple(given))
    for place, node in enumerate(part.wanted):
        made[node] = graph.call_function(operator.getitem, (results, place))
    copied(part.after)
    graph.node_copy(gm.graph.output_node(), made.__getitem__)
    return boxed(graph, gm)


def _as_tensor(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _running(code: Boxed) -> Any:
    def compiled_step(*values: Any) -> Sequence[Any]:
        return code(list(values))

    return compiled_step
