"""A captured structure, with one plan for each setting and each order in which eager would run it.

In: a `BackwardGraph` as captured. The engine's structural cache holds it. Out: the `Plan` for a backward. The
engine's cache key does not contain sequence numbers, so two backwards of one structure may run in different
orders.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.engine import (
    EngineRequest,
    LiveBackward,
    edge_of,
    forward_line,
    leaf_of,
    read_ranks,
)
from retrograd.errors import Refusal, VerificationError
from retrograd.events import live_log
from retrograd.graph.backward_graph import BackwardGraph, CallKind, call_of
from retrograd.graph.fx import add_copy
from retrograd.live.capture.eager_positions import positions_in_eager
from retrograd.live.capture.grad_dtypes import asked_dtypes, in_dtypes, leaves_with_buffers
from retrograd.live.run.plan import Plan
from retrograd.passes.eager_reordering import reorder_like_eager
from retrograd.process import cached_property
from retrograd.runtime.modes import without_torch_functions
from retrograd.runtime.profiler import event

#: In floating point, two gradients have one sum; three have several, depending on the order.
_ASSOCIATIVE = 2

#: how many plans we keep for one structure
KEPT_PLANS = 32


class CapturedBackward:
    """One structure.

    Attributes:
        graph: as captured.
        needs_engine_frame: whether it must run while the engine's call is active.
        n_outputs: how many gradients the engine expects back.
        has_cpp_functions: whether it calls a C++ function that may keep state on its context. The engine
            hands over a copy of the context, so a later backward does not find that state.
    """

    def __init__(self, graph: BackwardGraph, backward: LiveBackward) -> None:
        _refuse_unusual_leaves(backward.node_calls)
        self.graph = _with_sources(graph, backward.node_calls)
        _return_totals(self.graph, backward)
        self.needs_engine_frame = graph.needs_engine_frame
        self.n_outputs = len(graph.outputs())
        self.has_cpp_functions = any(call.kind is CallKind.CPP_FUNCTION for _, call in graph.calls())
        self._has_user_code = any(
            not (call.kind.is_functional or call.kind is CallKind.ACCUMULATE) for _, call in graph.calls()
        )
        self._has_wide_sums = any(
            call.kind is CallKind.SUM and len(node.args) > _ASSOCIATIVE for node, call in graph.calls()
        )
        self._leaves = leaves_with_buffers(self.graph)
        #: by settings, order, number of dropped outputs, and dtypes of gradients
        self._plans: dict[Hashable, Plan] = {}

    def plan(
        self, config: Config, backward: LiveBackward, inputs: Sequence[torch.Tensor] = ()
    ) -> tuple[Plan, bool]:
        """The plan for `backward`, and whether it is new.

        Args:
            config: the settings.
            backward: the backward to run.
            inputs: what the engine collected; empty while it still captures.

        Raises:
            LookupError: the live graph is not the one that the engine walked.
        """
        request = backward.request
        asks = self._leaves or request.inputs
        dtypes = asked_dtypes(self._leaves, inputs, request.inputs) if asks else ()
        ranks = read_ranks(request) if self._is_order_visible(config) else None
        # A backward that writes `.grad` returns nothing: an output would be a second reference to a gradient.
        dropped = self.n_outputs if request.accumulate_grad else request.added
        key = config, ranks, dropped, dtypes
        known = self._plans.get(key)
        if known is not None and not known.is_outdated:
            return known, False
        with event("retrograd.lay_out"):
            graph = in_dtypes(without_last_outputs(self._laid_out(backward), dropped), dtypes)
            raised = {name: why for plan in [*self._plans.values()] for name, why in plan.raised().items()}
            plan = Plan(graph, config, find_backend(config.backend), raised)
        for oldest in [*self._plans][: 1 - KEPT_PLANS]:
            self._plans.pop(oldest, None)
        self._plans[key] = plan
        return plan, True

    def _is_order_visible(self, config: Config) -> bool:
        """Whether user code can observe the order in which the nodes run, or the rounding of a sum that
        should have eager's bits. Each thread numbers the nodes that it makes, and on a GPU the engine's
        thread makes those of a first derivative: then orders change from step to step."""
        return self._has_user_code or (self._has_wide_sums and not find_backend(config.backend).for_speed)

    def _laid_out(self, backward: LiveBackward) -> BackwardGraph:
        try:
            return reorder_like_eager(self.graph, positions_in_eager(self.graph, backward))
        except (LookupError, VerificationError):
            if not self._plans:
                raise  # still capturing: the stock engine can run this backward
            live_log.exception("eager's order is not known: running in the engine's")
            return self.graph

    def __call__(self, call: Any) -> list[Any]:
        """Run as captured. Stock compiled autograd calls this if it finds our structure in the engine's
        cache. It does not say which backward it runs."""
        unknown = EngineRequest((), (), False, False, accumulate_grad=True)
        return self._as_captured.run(call, LiveBackward(unknown))

    @cached_property
    def _as_captured(self) -> Plan:
        return Plan(self.graph, Config(backend="eager"), find_backend("eager"))


@without_torch_functions
def _refuse_unusual_leaves(nodes: Sequence[Any]) -> None:
    """Refuse leaves about which the engine tells us too little. It does not hand over the post-accumulate
    hooks of a leaf that no longer requires grad, and its cache key does not contain the ``grad_dtype`` of a
    leaf.

    Raises:
        Refusal: there is such a leaf.
    """
    for leaf in (None if node is None else leaf_of(node) for node in nodes):
        if leaf is None:
            continue
        if not leaf.requires_grad and leaf._post_accumulate_grad_hooks:
            raise Refusal("hooks-of-frozen-leaf", "a leaf that was frozen after the forward has hooks")
        if leaf.grad_dtype is not leaf.dtype:
            raise Refusal("grad-dtype", "a leaf asks for a gradient of another dtype than its own")


def _return_totals(graph: BackwardGraph, backward: LiveBackward) -> None:
    """Return the full gradient for a requested output of a compiled function that the function also uses
    itself, as eager does. ``autograd.grad`` in the engine returns only what arrives from outside."""
    if not graph.inlined or not backward.request.inputs:
        return
    index = {node: i for i, node in enumerate(backward.node_calls)}
    outputs = list(graph.outputs())
    for i, (node, slot) in enumerate(map(edge_of, backward.request.inputs)):
        inlined = graph.inlined.get(index.get(node, -1))
        if inlined is not None:
            outputs[i] = inlined.totals.get(slot)
    next(iter(reversed(graph.graph.nodes))).args = (tuple(outputs),)


def _with_sources(backward: BackwardGraph, nodes: Sequence[Any]) -> BackwardGraph:
    """Attach the user's source lines where torch knows them. `nodes` are the autograd nodes by node-call
    index."""
    lines = ["" if node is None else forward_line(node) for node in nodes]
    if not any(lines):
        return backward
    named = [
        replace(call, source=line) if line else call
        for call, line in zip(backward.node_calls, lines, strict=False)
    ]
    return replace(backward, node_calls=tuple(named))


def without_last_outputs(backward: BackwardGraph, count: int) -> BackwardGraph:
    """`backward` without its last `count` outputs."""
    if not count:
        return backward
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    dropped = backward.outputs()[-count:]
    unwanted = _hooks_only_for(backward, dropped)
    for node in backward.graph.nodes:
        if node.op != "output":
            value = node.args[1] if node in unwanted else None
            copied[node] = copied[value] if value is not None else add_copy(graph, node, copied.__getitem__)
    kept = [None if node is None else copied[node] for node in backward.outputs()[:-count]]
    graph.output((*kept, *[None] * count))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and call_of(node).kind.is_functional:
            graph.erase_node(node)
    return backward.with_graph(graph)


def _hooks_only_for(backward: BackwardGraph, dropped: tuple[fx.Node | None, ...]) -> set[fx.Node]:
    """Hooks on the dropped gradients that belong to node calls that execute nothing."""
    executed = {c.node_call for _, c in backward.calls() if c.kind.is_node or c.kind is CallKind.ATEN}
    hooks: set[fx.Node] = set()
    for output in dropped:
        while output is not None and output.op == "call_function" and call_of(output).kind is CallKind.HOOK:
            if call_of(output).node_call in executed:
                break
            hooks.add(output)
            output = output.args[1]  # type: ignore[assignment]
    return hooks
