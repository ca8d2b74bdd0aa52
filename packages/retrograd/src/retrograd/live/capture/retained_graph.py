"""Runs backwards that need autograd nodes with intact saved tensors, or must leave some nodes intact.

In: a `LiveBackward`, and a callback that runs it once it is collected. Out: the backward has run, and exactly
the nodes that eager would release are released. Four kinds of backward need this without ``retain_graph``:

- An ``autograd.Function`` behind saved-tensor hooks: only its own context can unpack the tensors.
- A gradient of an intermediate tensor: eager does not execute that tensor's node and leaves it intact, but
  the engine would release it too.
- A function that AOTAutograd compiled, if this backward needs only a part of it and the rest does not need
  that part. Its one node replaces many of eager's.
- Hooks or Functions that ask for gradients, perhaps through nodes that eager has not executed yet (as deep
  equilibrium models do). We release the nodes after the run. If user code reached some of them meanwhile, we
  leave later backwards that call the same code to the engine. A Function is watched only when its structure
  is new. Hooks that may raise, unpack hooks among them, need this too: eager can execute the rest of the
  graph in a second backward.

For these, the engine collects as for a retained graph, and we release the executed nodes ourselves. We do so
at once, except for Functions behind saved-tensor hooks, which release their saved tensors after they have
run. Eager releases node by node, so that an exception leaves the rest intact. Other backwards are released as
a whole before their plan runs.

The engine does not execute a node whose input is requested. But ``autograd.grad`` for an output that a
compiled function uses itself (Grad-CAM, a loss on hidden states) needs the part of the function's backward
that leads there. So we request a gradient behind the node, too. The engine keeps the function's saved tensors
for the other parts, and would not notice that one part is used twice. We record the use here, and raise
eager's error.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from retrograd.engine import (
    AsSaved,
    Collected,
    EngineProtocol,
    EngineRequest,
    LiveBackward,
    beginning_of,
    collect,
    edge_of,
    is_aot_node,
    leaf_of,
    names_of_nodes,
    request_to_release,
    run_stock,
    window,
)
from retrograd.errors import Refusal
from retrograd.events import live_log
from retrograd.graph.backward_graph import BackwardGraph, CallKind, HookKind
from retrograd.graph.eager_order import ROOT, LiveGraph, eager_walk, executed_nodes
from retrograd.live.calls.user_code import call_kept_backward
from retrograd.live.capture.recorder import BackwardRecorder
from retrograd.live.capture.reentry import asks, asks_in, is_context, leaf_asks, who_asks
from retrograd.live.captured import CapturedBackward
from retrograd.process import forgotten_by_reset
from retrograd.runtime.profiler import event

Finished = Callable[[BackwardGraph, LiveBackward], CapturedBackward]

#: Classes of autograd nodes that needed a retained graph: Functions behind saved-tensor hooks, and compiled
#: functions. The engine reports them only after it has released them, so we always collect graphs that
#: contain one as retained graphs.
_kept_classes: weakref.WeakSet[type] = weakref.WeakSet()
forgotten_by_reset(_kept_classes.clear)

#: Roots and node names of graphs whose unpack hooks ask for gradients or may raise. The engine reports those
#: just as late.
_kept_graphs: set[Hashable] = set()
forgotten_by_reset(_kept_graphs.clear)

_GRAPH_NEEDED = "graph-needed"

#: code of hooks and Functions that has differentiated through nodes of the running backward
_reentering: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
forgotten_by_reset(_reentering.clear)


def collect_and_run(backward: LiveBackward, finished: Finished, run: Callable[[Collected], None]) -> None:
    """Like ``engine.collect``, for any backward. `run` is called in the engine's frame or after it.

    Raises:
        Refusal: user code differentiates through the graph of the running backward.
        Exception: as `collect`; nothing was consumed unless `run` was called.
    """
    request = backward.request
    is_known = not request.keep_graph and (asks_in(request) or _is_to_be_kept(backward))
    if not is_known:
        try:
            call = _collect(backward, finished, request, run)
        except Refusal as refusal:
            if refusal.code != _GRAPH_NEEDED:
                raise
        else:
            if call is not None:
                run(call)
            return
    _run_kept(backward, finished, run, is_known)


def _collect(
    backward: LiveBackward, finished: Finished, request: EngineRequest, run: Callable[[Collected], None]
) -> Collected | None:
    def noting(graph: BackwardGraph) -> CapturedBackward:
        if kept := _kept_calls(graph):
            _kept_classes.update(type(backward.node_calls[index]) for index in kept)
        if not request.keep_graph and (kept or _may_be_reentered(graph, backward.node_calls)):
            raise Refusal(_GRAPH_NEEDED, "user code may need the autograd graph")
        return finished(graph, backward)

    with event("retrograd.collect"):
        return collect(request, lambda: EngineProtocol(BackwardRecorder(noting)), run)


def _is_watched(call: Collected) -> bool:
    """Whether user code in `call` may differentiate through the graph that is running.

    Raises:
        Refusal: it has done so before.
    """
    if not _reentering:
        return asks(call.hooks)
    asking = who_asks(call.hooks)
    if not asking.isdisjoint(_reentering):
        _note_reentry(call.hooks, asking)
        raise Refusal(
            "reentered-graph",
            "a hook or Function differentiates through nodes that the running backward comes to later",
        )
    return bool(asking)


def _run_kept(
    backward: LiveBackward, finished: Finished, run: Callable[[Collected], None], is_known: bool
) -> None:
    kept = replace(backward.request, keep_graph=True)
    ran: list[tuple[CapturedBackward, list[Any], AsSaved]] = []

    def look(call: Collected) -> bool:
        is_watched, calls = _is_watched(call), call.artifact.graph.calls()
        if is_watched and not is_known and any(called.hook is HookKind.UNPACK for _, called in calls):
            _kept_graphs.update((beginning_of(backward.asked), names_of_nodes(backward.asked)))
        return is_watched

    def run_in_frame(call: Collected) -> None:
        look(call)
        run_then_release(call)

    def run_then_release(call: Collected) -> None:
        ran.append((call.artifact, list(call.hooks), AsSaved(call.inputs)))
        run(call)

    is_cut_short = True
    try:
        with window.capture():
            call = _collect(backward, finished, kept, run_in_frame)
            is_watched = call is not None and look(call)
            if call is not None and not is_watched:
                _release_executed(backward, call.artifact, already_run=False)
        if call is not None:
            (run_then_release if is_watched else run)(call)
        is_cut_short = False
    finally:
        # The engine runs one call at a time, so nothing can be released inside its frame.
        for artifact, hooks, as_saved in ran:
            if backward.is_reentered:
                _note_reentry(hooks, who_asks(hooks))
            with as_saved:
                _release_executed(backward, artifact, already_run=True, is_cut_short=is_cut_short)


def _note_reentry(hooks: Sequence[Any], asking: set[types.CodeType]) -> None:
    """Record that the code `asking`, found behind `hooks`, reaches nodes of the running backward."""
    _reentering.update(asking)
    _kept_classes.update(type(hook) for hook in hooks if is_context(hook) and asks([hook]))


def _is_to_be_kept(backward: LiveBackward) -> bool:
    """Whether we know before collection that the graph must be retained."""
    if _kept_graphs and all(read(backward.asked) in _kept_graphs for read in (beginning_of, names_of_nodes)):
        return True
    if not _kept_classes and all(getattr(tensor, "is_leaf", False) for tensor in backward.request.inputs):
        return False
    live = backward.asked_graph
    executed = executed_nodes(live, backward.asked.accumulate_grad)
    intact = set(live.wanted or ()) - executed  # requested, but not executed
    return (
        backward.request.added > 0
        or any(type(node.handle) in _kept_classes for node in live.nodes)
        or any(name.startswith("_raw_saved_") for i in intact for name in dir(live.nodes[i].handle))
    )


def _kept_calls(graph: BackwardGraph) -> list[int]:
    """Node calls that need their own saved tensors when they run, or of which a part stays intact."""
    calls = (call.node_call for node, call in graph.calls() if node.target is call_kept_backward)
    return [*calls, *graph.intact_calls()]


def _may_be_reentered(graph: BackwardGraph, nodes: Sequence[Any]) -> bool:
    """Whether user code that we have not inspected yet may differentiate through the graph: a hook of a node
    other than a leaf's, or a Function or a leaf's hook that asks for gradients."""
    return any(
        (call.kind is CallKind.HOOK and ((leaf := leaf_of(nodes[call.node_call])) is None or leaf_asks(leaf)))
        or (call.kind is CallKind.FUNCTION and asks([nodes[call.node_call]]))
        for _, call in graph.calls()
    )


def _release_executed(
    backward: LiveBackward, artifact: CapturedBackward, already_run: bool, is_cut_short: bool = False
) -> None:
    """Release what eager would release, except what the plan still needs and releases itself.

    Args:
        backward: the running backward.
        artifact: its structure.
        already_run: whether it has run.
        is_cut_short: whether an error has ended it. Eager has then released the nodes before the one that
            raised.
    """
    live, request = backward.asked_graph, backward.request
    handles = {id(backward.node_calls[index]) for index in _kept_calls(artifact.graph)}
    separate = {i for i, node in enumerate(live.nodes) if id(node.handle) in handles}
    begun = already_run
    executed = executed_nodes(live, backward.asked.accumulate_grad)
    groups = _levels(live, executed & _done(backward) if is_cut_short else executed, separate)
    for level, group in reversed(list(enumerate(groups))):
        if not group:
            continue
        try:
            part = request_to_release(live, request, group, from_roots=level == 0)
            # The engine releases what it has handed over. Torch offers no other way to release nodes.
            collect(part, partial(_never_run, part), lambda call: None)
        except Exception:
            if not begun:
                raise  # the stock engine can still run this backward
            live_log.exception("saved tensors stay until their graph goes")
        begun = True


def _done(backward: LiveBackward) -> set[int]:
    """The nodes that eager has executed when it reaches the node whose user code ran last."""
    order = eager_walk(backward.asked_graph)
    current = backward.current_node()
    place = next(
        (n for n, i in enumerate(order) if i != ROOT and backward.asked_graph.nodes[i].handle == current), 0
    )
    return {i for i in order[:place] if i != ROOT}


def _never_run(request: EngineRequest) -> EngineProtocol:
    """The protocol for a capture that only releases nodes."""
    return EngineProtocol(BackwardRecorder(partial(CapturedBackward, backward=LiveBackward(request))))


def _levels(live: LiveGraph, executed: set[int], separate: set[int]) -> Sequence[set[int]]:
    """Group the `executed` nodes that are not in `separate`, by the largest number of separate nodes on a
    path to them. No path between two nodes of one group contains a separate node."""
    if not separate:
        return [executed]
    level = dict.fromkeys(range(len(live.nodes)), 0)
    for i in eager_walk(live):
        if i == ROOT:
            continue
        for edge in live.nodes[i].edges:
            if edge is not None:
                level[edge.node] = max(level[edge.node], level[i] + (i in separate))
    groups: list[set[int]] = [set() for _ in range(max(level.values(), default=0) + 1)]
    for i in executed - separate:
        groups[level[i]].add(i)
    return groups


#: by the context of a compiled function: which of eager's nodes in it have released their saved tensors
_used: weakref.WeakKeyDictionary[Any, frozenset[float]] = weakref.WeakKeyDictionary()


def ask_for_compiled_functions(backward: LiveBackward) -> None:
    """Add inputs to the request of a backward, so that the engine executes the compiled functions."""
    asked = backward.asked
    nodes = {node for node, _ in map(edge_of, asked.inputs) if node is not None and is_aot_node(node)}
    if not nodes or asked.accumulate_grad:
        return
    live = backward.asked_graph
    wanted = live.wanted or frozenset()
    added: list[GradientEdge] = []
    for node in live.nodes:
        edges = [edge for edge in node.edges if edge is not None]
        # The engine would not execute the node, because no node behind it is requested.
        if node.handle in nodes and edges and not any(edge.node in wanted for edge in edges):
            added.append(GradientEdge(live.nodes[edges[0].node].handle, edges[0].slot))
    if added:
        backward.request = replace(asked, inputs=(*asked.inputs, *added), added=len(added))


def use_up(captured: BackwardGraph, backward: LiveBackward) -> None:
    """Record which parts of compiled functions a backward is about to consume.

    Raises:
        RuntimeError: eager's error, if a part has been consumed already.
    """
    parts, request = captured.intact_calls(), backward.request
    if not (_used or parts or request.added):
        return
    for index, keys in _used_now(captured, backward).items():
        node = backward.node_calls[index]
        before = _used.get(node, frozenset())
        if before & keys:
            _raise_as_eager()
        # The engine itself tracks the nodes that it releases.
        if not request.keep_graph and (index in parts or request.added):
            _used[node] = before | keys


def _used_now(captured: BackwardGraph, backward: LiveBackward) -> dict[int, frozenset[float]]:
    """For each inlined node call, the keys that this backward consumes: all, or those of the part that leads
    to a requested output."""
    used = {index: inlined.consumed for index, inlined in captured.inlined.items()}
    if backward.request.added:
        edges = [edge_of(tensor) for tensor in backward.asked.inputs]
        for index in used:
            slots = [slot for node, slot in edges if node is backward.node_calls[index]]
            if slots:
                used[index] = frozenset().union(*map(captured.inlined[index].consumed_for.__getitem__, slots))
    return used


def _raise_as_eager() -> None:
    """Raise what the installed torch raises when a graph is used a second time."""
    with torch.enable_grad():
        root = torch.ones((), requires_grad=True).exp()
    request = EngineRequest((root,), (torch.ones(()),), False, False, (), accumulate_grad=True)
    run_stock(request)
    run_stock(request)
