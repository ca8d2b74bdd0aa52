"""A captured structure and its plans: one per setting and per order in which eager would run it.

In: a `BackwardGraph` as captured; it is kept by the engine's structural cache. Out: the `Plan` for a request.
The engine's cache does not hold sequence numbers, so a structure met again may run in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from retrograd._torch.engine import EngineRequest
from retrograd._torch.live_graph import forward_line, read_live_graph, read_ranks
from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.errors import VerificationError
from retrograd.events import counters, live_log
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.hook_kind import CallKind, HookKind
from retrograd.graph.live_graph import LiveGraph
from retrograd.live.eager_order import ROOT, eager_walk, engine_walk
from retrograd.live.plan import Plan
from retrograd.live.running import RunningBackward
from retrograd.passes.lay_out_like_eager import lay_out_like_eager

__all__ = ["CapturedBackward"]

#: two gradients have one sum in floating point; three have more than one.
_ASSOCIATIVE = 2


class CapturedBackward:
    """One structure.

    Args:
        backward: as captured.
        request: the backward that it was captured from.

    Attributes:
        n_outputs: how many gradients the engine expects back.
        needs_engine_frame: whether it must run while the engine's call is alive.
        has_unpack_hooks: whether a saved tensor is behind an unpack hook. The engine does not tell such a
            tensor's own history, which a differentiable backward needs.
        has_cpp_functions: whether a C++ function is called that may keep state on its context. The engine
            hands over a copy of it: what a backward leaves there is lost to a later one.
    """

    def __init__(self, backward: BackwardGraph, request: EngineRequest) -> None:
        counters["captures"] += 1
        self.backward = _with_sources(backward, RunningBackward(request).node_calls)
        self.needs_engine_frame = backward.needs_engine_frame
        self.n_outputs = len(backward.outputs())
        self.has_unpack_hooks = any(call.hook is HookKind.UNPACK for _, call in backward.calls())
        kinds = {call.kind for _, call in backward.calls()}
        self.has_cpp_functions = CallKind.CPP_FUNCTION in kinds
        self._order_is_visible = _order_is_visible(backward)
        self._plans: dict[tuple[Config, tuple[int, ...] | None], Plan] = {}

    def plan(self, config: Config, request: EngineRequest) -> tuple[Plan, bool]:
        """The plan for `request`, and whether it was made just now.

        Raises:
            LookupError: the live graph is not what the engine walked.
        """
        ordered = self._order_is_visible or request.create_graph
        key = (config, read_ranks(request) if ordered else None)
        known = self._plans.get(key)
        if known is not None:
            return known, False
        backward = self._laid_out(read_live_graph(request)) if ordered else self.backward
        plan = self._plans[key] = Plan(backward, config, find_backend(config.backend))
        return plan, True

    def _laid_out(self, live: LiveGraph) -> BackwardGraph:
        try:
            return lay_out_like_eager(self.backward, _positions(self.backward, live))
        except (LookupError, VerificationError):
            if not self._plans:
                raise  # still capturing: the stock engine can run this backward
            live_log.exception("eager's order is not known: running in the engine's")
            return self.backward

    def __call__(self, call: Any) -> list[Any]:
        """Run as captured: stock compiled autograd found our structure in the engine's cache."""
        plan = Plan(self.backward, Config(backend="eager"), find_backend("eager"))
        return plan.run(call, RunningBackward(None))


def _order_is_visible(backward: BackwardGraph) -> bool:
    """Whether anybody can tell in which order the nodes ran: user code, or the rounding of a long sum."""
    return any(
        not (call.kind.is_functional or call.kind is CallKind.ACCUMULATE)
        or (call.kind is CallKind.SUM and len(node.args) > _ASSOCIATIVE)
        for node, call in backward.calls()
    )


def _with_sources(backward: BackwardGraph, nodes: Sequence[Any]) -> BackwardGraph:
    """Name the user's lines where torch knows them; `nodes` are the autograd nodes by node-call index."""
    lines = ["" if node is None else forward_line(node) for node in nodes]
    named = [replace(call, source=line) for call, line in zip(backward.node_calls, lines, strict=False)]
    return replace(backward, node_calls=tuple(named))


def _positions(backward: BackwardGraph, live: LiveGraph) -> list[int]:
    """For each node call, its place in eager's order."""
    walk = engine_walk(live)
    for call, i in zip(backward.node_calls, walk, strict=False):
        if i != ROOT and call.name and call.name != live.nodes[i].name:
            raise LookupError(f"node call {call.index} is {call.name}, expected {live.nodes[i].name}")
    if len(walk) < len(backward.node_calls):
        raise LookupError(f"{len(backward.node_calls)} node calls, expected {len(walk)}")
    place = {node: position for position, node in enumerate(eager_walk(live))}
    return [place[node] for node in walk]
