"""Describes one backward: its autograd graph, and the answers to what user code asks about it.

In: an `EngineRequest`, and the active modes, stock compiled autograd among them. Out: the first obstacle to a
capture, as a code and a sentence. Such a backward runs on the stock engine.

In: an `EngineRequest`. Out: a `LiveGraph`, read from ``next_functions``. Which nodes are needed for
``inputs=`` follows ``GraphTask::init_to_execute`` in ``torch/csrc/autograd/engine.cpp``. The stages pass on a
`LiveBackward`, which knows both orders of the nodes and what user code may ask the engine (see `under_way`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge

from retrograd.engine.collection import GATEWAYS
from retrograd.errors import Refusal
from retrograd.facts.patches import handled_here
from retrograd.graph.eager_order import (
    ROOT,
    Edge,
    LiveGraph,
    LiveNode,
    eager_walk,
    engine_walk,
)
from retrograd.graph.reach import reached
from retrograd.process import cached_property
from retrograd.runtime.modes import without_torch_functions
from retrograd.runtime.streams import side_streams

T = TypeVar("T")


@dataclass(frozen=True)
class EngineRequest:
    """One call of the engine. Field names are the keyword names of the C++ engine.

    Attributes:
        tensors: the roots: tensors or ``GradientEdge``.
        grad_tensors: one cotangent per root.
        keep_graph, create_graph: as in ``torch.autograd.backward``.
        inputs: the tensors or edges whose gradients are wanted; empty for all leaves.
        allow_unreachable: whether an input that the roots do not reach gives None.
        accumulate_grad: whether to write ``.grad`` (backward) instead of returning gradients (grad).
        added: how many of the last `inputs` we added ourselves; the user does not want their gradients.
    """

    tensors: tuple[Any, ...]
    grad_tensors: tuple[Any, ...]
    keep_graph: bool
    create_graph: bool
    inputs: tuple[Any, ...] = ()
    allow_unreachable: bool = False
    accumulate_grad: bool = False
    added: int = 0


def why_not_collectable(request: EngineRequest) -> tuple[str, str] | None:
    """Why the engine cannot hand this backward over to us, as a code and a sentence; None if it can."""
    if torch.is_anomaly_enabled():
        return "anomaly-mode", "anomaly mode checks every node's result as soon as it is there"
    if side_streams.any and torch.cuda.is_current_stream_capturing() and streams_of(request):
        return "cuda-graph-capture", "a CUDA graph is being captured in a program that uses several streams"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "dispatch-mode", "a TorchDispatchMode is active and must see every operation of the backward"
    functorch = torch._C._functorch
    wraps = functorch.is_functorch_wrapped_tensor, functorch.is_legacy_batchedtensor  # newer and older vmap
    tensors = [t for t in (*request.tensors, *request.grad_tensors) if isinstance(t, torch.Tensor)]
    if functorch.maybe_current_level() is not None or any(wrap(t) for t in tensors for wrap in wraps):
        return "functorch", "a functorch transform (grad, vjp, vmap, …) is active"
    if torch.is_inference_mode_enabled():
        return "inference-mode", "inference mode is active"
    return None


def streams_of(request: EngineRequest) -> frozenset[tuple[int, int]]:
    """The streams on which nodes of `request` may have been made, besides the default ones."""
    return side_streams.of_nodes(lambda: oldest_number(request))


def is_traced() -> bool:
    """Whether a tracer runs this backward to record its operations, as AOTAutograd, ``torch.compile``,
    ``torch.export`` and ``make_fx`` do. Then there is nothing to compile, and nothing to report.

    We check this thread's modes: ``torch.compiler.is_compiling`` is true on all threads while Dynamo compiles
    on one."""
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    if torch._C._get_tracing_state() is not None:
        return True
    tracers = (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    return torch._C._len_torch_dispatch_stack() > 0 and any(mode(key) is not None for key in tracers)


def is_transformed(request: EngineRequest) -> bool:
    """Whether ``torch.func`` (grad, vjp, jacrev, vmap, …) differentiates tensors that it has wrapped. Such a
    backward is an internal step of the transform; no user asked for it."""
    roots = [tensor for tensor in request.tensors if isinstance(tensor, torch.Tensor)]
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, roots))


def read_ranks(request: EngineRequest) -> tuple[int, ...]:
    """The ranks of the sequence numbers of all nodes of `request`, in order of discovery. Nodes of different
    threads may have one number, and then one rank.

    Two backwards of equal structure run in the same eager order if these tuples are equal. We compute this on
    every backward whose order is visible, so it reads only sequence numbers.
    """
    numbers = [node._sequence_nr() for node in nodes_below(map(edge_of, request.tensors))]
    ranks = {number: rank for rank, number in enumerate(sorted(set(numbers)))}
    return tuple([ranks[number] for number in numbers])


def oldest_number(request: EngineRequest) -> int:
    """The smallest sequence number of the nodes of `request`; that of leaves is the largest number."""
    return min((node._sequence_nr() for node in nodes_below(map(edge_of, request.tensors))), default=0)


def names_of_nodes(request: EngineRequest) -> tuple[str, ...]:
    """The names of all nodes of `request`, in order of discovery: equal for backwards of equal structure."""
    return tuple([node.name() for node in nodes_below(map(edge_of, request.tensors))])


def nodes_below(edges: Iterable[tuple[Any, int]], ends: Container[Any] = ()) -> Iterator[Any]:
    """The nodes below `edges` (pairs of a node and an input index), nearest first, stopping at `ends`."""
    seen: dict[Any, None] = dict.fromkeys(node for node, _ in edges if node is not None)
    waiting = list(seen)
    for above in waiting:  # the loop appends to the list
        yield above
        for node, _ in () if above in ends else above.next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                waiting.append(node)


def graph_below(
    edges: Iterable[tuple[Any, int]], ends: Container[Any] = (), left_out: Container[Any] = ()
) -> LiveGraph:
    """The graph over `nodes_below`, in their order, without `left_out`: nodes that pass one gradient on."""
    edges = list(edges)
    found = (node for node in nodes_below(edges, ends) if node not in left_out)
    index = {node: number for number, node in enumerate(found)}

    def to(node: Any, slot: int) -> Edge | None:
        while node in left_out:
            ((node, slot),) = node.next_functions
        return None if node is None else Edge(index[node], slot)

    nodes: list[LiveNode] = []
    for above in index:
        below = () if above in ends else above.next_functions
        after = tuple([to(*edge) for edge in below])
        nodes.append(LiveNode(above, above.name(), above._sequence_nr(), after))
    roots = [edge for node, slot in edges if (edge := to(node, slot)) is not None]
    return LiveGraph(tuple(nodes), tuple(roots), None)


_INDEXING = frozenset({"SliceBackward0", "SelectBackward0", "UnsqueezeBackward0", "IndexBackward0"})


def idle_nodes(edges: Iterable[tuple[Any, int]], ends: Container[Any] = ()) -> set[Any]:
    """Nodes made by ``:`` in an index, which pass gradients on unchanged. For ``x[0, :]`` torch makes such a
    node only if sizes are symbolic; for ``x[:]`` it makes a different one (``applySlicing`` in
    ``aten/src/ATen/TensorIndexing.h``). We need the node of ``x[:]`` if `edges` lead to that of ``x`` too."""
    neighbours: dict[Any, set[str]] = {}
    roots = {node for node, _ in edges}
    for above in nodes_below(((node, 0) for node in roots), ends):
        for node, _ in () if above in ends else above.next_functions:
            neighbours.setdefault(node, set()).add(above.name())
            if above in roots and node is not None:
                is_needed = node in roots or _is_idle(node)
                neighbours.setdefault(above, set()).add("" if is_needed else node.name())
    return {n for n, names in neighbours.items() if names <= _INDEXING and n not in ends and _is_idle(n)}


def _is_idle(node: Any) -> bool:
    name = "" if node is None else node.name()
    numbers = (node._saved_start, node._saved_end, node._saved_step) if name == "SliceBackward0" else ()
    is_whole = all(type(number) is int for number in numbers) and numbers == (0, sys.maxsize, 1)
    return is_whole or name == "AliasBackward0"


def passes_through_function(value: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a Python ``autograd.Function`` lies between the history of `value` and that of `base`."""
    end, _ = edge_of(base) if base.requires_grad else (None, 0)
    nodes = nodes_below([edge_of(value)], (end,)) if value.grad_fn is not None else ()
    return any(hasattr(node, "apply") for node in nodes if node is not end)


def leads_to(value: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the history of `value` goes back to `base`."""
    end, _ = edge_of(base)
    return any(node is end for node in nodes_below([edge_of(value)], (end,)))


@contextmanager
def accumulating_only_into(is_ours: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Inside, refuse every backward of this thread that would write the ``.grad`` of a tensor that is not
    ours."""

    def run(original: Callable[..., Any], tensors: Any, *args: Any, **options: Any) -> Any:
        if options.get("accumulate_grad"):
            leaves = map(leaf_of, nodes_below(edge_of(tensor) for tensor in tensors if tensor.requires_grad))
            if not all(leaf is None or is_ours(leaf) for leaf in leaves):
                raise Refusal("backward-effect", "its backward runs another, which accumulates into a leaf")
        return original(tensors, *args, **options)

    with handled_here(GATEWAYS[0], run), handled_here(GATEWAYS[1], run):
        yield


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor into whose ``.grad`` the node accumulates; None for other nodes."""
    return getattr(node, "variable", None)


def read_live_graph(request: EngineRequest) -> LiveGraph:
    """The graph of `request`, in order of discovery from its roots."""
    graph = graph_below(map(edge_of, request.tensors))
    index = {node.handle: number for number, node in enumerate(graph.nodes)}
    targets = [index[node] for node, _ in map(edge_of, request.inputs) if node in index]
    return replace(graph, wanted=_wanted(graph.nodes, targets)) if request.inputs else graph


def forward_line(node: Any) -> str:
    """The user's line that made `node`, such as ``model.py:88  y = x.sin()``. torch records it if the forward
    ran in anomaly mode. Otherwise, for an ``autograd.Function``, the place of its backward, such as
    ``model.py:12  Exp.backward``; otherwise empty."""
    frames = node.metadata.get("traceback_")
    found = re.search(r'File "([^"]+)", line (\d+).*\n\s*(.*)', frames[-1]) if frames else None
    if found:
        return f"{os.path.basename(found[1])}:{found[2]}  {found[3].strip()}"
    function: Any = getattr(node, "_forward_cls", None)
    backward: Any = getattr(function, "backward", None)
    code = getattr(backward, "__code__", None)
    if code is None or (function.__module__ or "").startswith("torch."):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}  {backward.__qualname__}"


def edge_of(root: Any) -> tuple[Any, int]:
    """The autograd node of a tensor or ``GradientEdge``, and which of the node's outputs it is.

    The node is None if nothing is differentiable, or for a view of a differentiable tensor made under
    `no_grad`.
    """
    if isinstance(root, GradientEdge):
        return root.node, root.output_nr
    if not isinstance(root, torch.Tensor) or not root.requires_grad:
        return None, 0
    if root.grad_fn is not None:
        return root.grad_fn, root.output_nr
    with torch.enable_grad():
        reader = root.view_as(root) if root.layout is torch.strided else root.clone()
        return reader.grad_fn.next_functions[0]  # type: ignore[union-attr]


@without_torch_functions
def _with_edges(request: EngineRequest) -> EngineRequest:
    """`request` with an edge in the place of each tensor."""
    roots, inputs = (
        tuple(GradientEdge(*edge_of(tensor)) for tensor in tensors)
        for tensors in (request.tensors, request.inputs)
    )
    return replace(request, tensors=roots, inputs=inputs)


def _wanted(nodes: Sequence[LiveNode], targets: list[int]) -> frozenset[int]:
    """The nodes from which a target can be reached, including the targets."""
    producers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for edge in node.edges:
            if edge is not None:
                producers.setdefault(edge.node, []).append(i)
    return frozenset(reached(targets, lambda node: producers.get(node, ())))


_NOT_OF_LEAVES = (
    "A leaf node was passed to _will_engine_execute_node but we are currently running autograd.grad(). "
    "This is currently not supported."
)


class LiveBackward:
    """One backward.

    Attributes:
        asked: what the user asked of the engine.
        request: what we ask of the engine, perhaps with gradients for more inputs.
        node_call: the node call whose user code the plan runs now.
        is_reentered: whether user code in the plan has differentiated through nodes of this backward.
    """

    def __init__(self, asked: EngineRequest) -> None:
        self.asked = self.request = asked
        self.node_call = 0
        self.is_reentered = False

    @cached_property
    def asked_graph(self) -> LiveGraph:
        """The live graph for `asked`."""
        return read_live_graph(self.asked)

    @cached_property
    def graph(self) -> LiveGraph:
        """The live graph for `request`."""
        return self.asked_graph if self.request is self.asked else read_live_graph(self.request)

    @cached_property
    def _places(self) -> dict[Any, int]:
        return {node.handle: i for i, node in enumerate(self.graph.nodes)}

    @cached_property
    def walk(self) -> list[int]:
        """Indices of the graph's nodes, in the order of node calls."""
        return engine_walk(self.graph)

    @cached_property
    def node_calls(self) -> list[Any]:
        """The autograd nodes in the order of node calls; None for the graph root."""
        return [None if i == ROOT else self.graph.nodes[i].handle for i in self.walk]

    @cached_property
    def inner_nodes(self) -> frozenset[Any]:
        """The nodes that do not belong to leaves."""
        return frozenset(node for node in self.node_calls if node is not None and leaf_of(node) is None)

    def hold_edges(self) -> None:
        """Read the nodes of the roots and inputs now, before user code runs: a hook that changes a tensor in
        place gives it another node, but this backward still runs through the old one."""
        is_as_asked = self.request is self.asked
        self.asked = _with_edges(self.asked)
        self.request = self.asked if is_as_asked else _with_edges(self.request)

    # answers to user code

    def current_node(self) -> Any:
        """The autograd node that eager would be executing."""
        return self.node_calls[self.node_call]

    def has(self, node: Any) -> bool:
        """Whether the live graph has this autograd node."""
        return node in self._places

    def has_numbered(self, number: int) -> bool:
        """Whether the live graph has a node of this sequence number."""
        return number in self._numbers

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(node._sequence_nr() for node in self.inner_nodes)

    def will_execute(self, node: Any) -> bool:
        """Whether eager reports that this backward executes `node`. If there is only one root, eager answers
        False for its node: ``Engine::compute_dependencies`` then uses that node as the ``GraphRoot``.

        Raises:
            RuntimeError: `node` is a leaf's and this is ``autograd.grad``, for which eager does not answer.
        """
        index = self._places.get(node)
        if [index] == [root.node for root in self.graph.roots]:
            return False
        is_executed = index is not None and (self.graph.wanted is None or index in self.graph.wanted)
        if is_executed and not self.asked.accumulate_grad and leaf_of(node) is not None:
            raise RuntimeError(_NOT_OF_LEAVES)
        return is_executed

    def execution_order(self) -> list[Any]:
        """The nodes in eager's order of execution."""
        return [self.graph.nodes[i].handle for i in eager_walk(self.graph) if i != ROOT]
