"""Backwards whose plan needs autograd nodes that still have their saved tensors, or must leave some intact.

In: a `LiveBackward`. Out: what the engine collected; everything that eager would release is released, and
nothing else. Three kinds of backward need this although the graph is not to be retained:

- an ``autograd.Function`` behind saved-tensor hooks: only its own context can unpack them;
- a gradient of an intermediate tensor: eager does not execute that tensor's node and leaves it intact, but
  the engine would release it too;
- a function that AOTAutograd compiled, whose one node stands for many of eager's, if this backward needs only
  a part of it that the rest does not need.

Then the engine collects with the graph kept, and the executed nodes are released separately: at once, except
for those Functions, which release their own saved tensors when they have run. Eager releases node by node, so
that an exception in a hook leaves the rest intact; a plan has released everything but those Functions by
then.

The engine does not execute the node whose input is asked for. ``autograd.grad`` for an output that a compiled
function uses itself (Grad-CAM, a loss on hidden states) needs the part of that function's own backward that
leads there, so the engine is asked for something behind the node, too. It keeps the function's saved tensors
for the other parts, and would not notice that one is used twice. That is noted here, and raises eager's
error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from retrograd._torch.autograd import (
    Collected,
    EngineProtocol,
    EngineRequest,
    LiveBackward,
    collect,
    edge_of,
    is_aot_node,
    request_to_release,
    run_stock,
    window,
)
from retrograd.errors import Refusal
from retrograd.events import live_log
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.eager_order import ROOT, LiveGraph, eager_walk
from retrograd.live.calls.user_code import call_kept_backward
from retrograd.live.capture.recorder import BackwardRecorder
from retrograd.live.captured import CapturedBackward
from retrograd.process import forgotten_by_reset

Finished = Callable[[BackwardGraph, LiveBackward], CapturedBackward]

#: classes of autograd nodes that needed it: Functions behind saved-tensor hooks, and compiled functions. The
#: engine's cache does not tell before it releases, so a graph with one of them is always collected with the
#: graph kept.
_kept_classes: weakref.WeakSet[type] = weakref.WeakSet()
forgotten_by_reset(_kept_classes.clear)

_GRAPH_NEEDED = "graph-needed"


def collect_and_release(
    backward: LiveBackward, finished: Finished, run_in_frame: Callable[[Collected], None]
) -> Collected | None:
    """As ``_torch.autograd.collect``, for any backward.

    Raises:
        Exception: as `collect`; nothing was consumed unless `run_in_frame` was called.
    """
    request = backward.request
    if request.keep_graph or not ((_kept_classes or request.inputs) and _is_to_be_kept(backward)):
        try:
            return collect(request, lambda: _protocol(backward, finished, request.keep_graph), run_in_frame)
        except Refusal as refusal:
            if refusal.code != _GRAPH_NEEDED:
                raise
    return _collect_kept(backward, finished, run_in_frame)


def _protocol(backward: LiveBackward, finished: Finished, graph_is_kept: bool) -> EngineProtocol:
    def noting(graph: BackwardGraph) -> CapturedBackward:
        if kept := _kept_calls(graph):
            _kept_classes.update(type(backward.node_calls[index]) for index in kept)
            if not graph_is_kept:
                raise Refusal(_GRAPH_NEEDED, f"{graph.node_name(kept[0])} needs the autograd graph")
        return finished(graph, backward)

    return EngineProtocol(BackwardRecorder(noting))


def _collect_kept(
    backward: LiveBackward, finished: Finished, run_in_frame: Callable[[Collected], None]
) -> Collected | None:
    kept = replace(backward.request, keep_graph=True)
    in_frame: list[CapturedBackward] = []

    def run(call: Collected) -> None:
        in_frame.append(call.artifact)
        run_in_frame(call)

    try:
        with window.capture():
            call = collect(kept, lambda: _protocol(backward, finished, True), run)
            if call is not None:
                _release_executed(backward, call.artifact, already_run=False)
    finally:
        # The engine has room for one call at a time: in its frame, nothing can be released before the end.
        if in_frame:
            _release_executed(backward, in_frame[0], already_run=True)
    return call


def _is_to_be_kept(backward: LiveBackward) -> bool:
    """Whether it is known before it is collected that the graph has to be kept."""
    if not _kept_classes and all(getattr(tensor, "is_leaf", False) for tensor in backward.request.inputs):
        return False
    live = backward.asked_graph
    intact = set(live.wanted or ()) - _executed(live, backward.asked)  # asked for, but not executed
    return (
        backward.request.added > 0
        or any(type(node.handle) in _kept_classes for node in live.nodes)
        or any(name.startswith("_raw_saved_") for i in intact for name in dir(live.nodes[i].handle))
    )


def _executed(live: LiveGraph, request: EngineRequest) -> set[int]:
    """Indices of the nodes that eager executes, without accumulations, which save nothing.

    ``autograd.grad`` only captures the gradients of its inputs; ``backward`` executes its inputs' nodes too.
    """
    wanted = frozenset(range(len(live.nodes))) if live.wanted is None else live.wanted
    if request.accumulate_grad:
        return {i for i in wanted if live.nodes[i].edges}
    return {i for i in wanted if any(edge and edge.node in wanted for edge in live.nodes[i].edges)}


def _kept_calls(graph: BackwardGraph) -> list[int]:
    """Node calls that use their own saved tensors when they run, or of which a part stays intact."""
    calls = (call.node_call for node, call in graph.calls() if node.target is call_kept_backward)
    return [*calls, *graph.intact_calls()]


def _release_executed(backward: LiveBackward, artifact: CapturedBackward, already_run: bool) -> None:
    """Release what eager would release, except what the plan still needs and releases itself."""
    live, request = backward.asked_graph, backward.request
    handles = {id(backward.node_calls[index]) for index in _kept_calls(artifact.graph)}
    apart = {i for i, node in enumerate(live.nodes) if id(node.handle) in handles}
    begun = already_run
    groups = _levels(live, _executed(live, backward.asked), apart)
    for level, group in reversed(list(enumerate(groups))):
        if not group:
            continue
        try:
            part = request_to_release(live, request, group, from_roots=level == 0)
            # The engine releases what it has handed over, and torch has no other call for that.
            collect(part, partial(_never_run, part), lambda call: None)
        except Exception:
            if not begun:
                raise  # the stock engine can still run this backward
            live_log.exception("saved tensors stay until their graph goes")
        begun = True


def _never_run(request: EngineRequest) -> EngineProtocol:
    """For a capture that only releases."""
    return EngineProtocol(BackwardRecorder(partial(CapturedBackward, backward=LiveBackward(request))))


def _levels(live: LiveGraph, executed: set[int], apart: set[int]) -> Sequence[set[int]]:
    """The `executed` nodes without those `apart`, by the largest number of nodes apart on a path to them: no
    path between two nodes of one level contains a node that is apart."""
    level = dict.fromkeys(range(len(live.nodes)), 0)
    for i in eager_walk(live):
        if i == ROOT:
            continue
        for edge in live.nodes[i].edges:
            if edge is not None:
                level[edge.node] = max(level[edge.node], level[i] + (i in apart))
    groups: list[set[int]] = [set() for _ in range(max(level.values(), default=0) + 1)]
    for i in executed - apart:
        groups[level[i]].add(i)
    return groups


#: by the context of a compiled function: which of eager's nodes in it have released what they saved.
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
        # Eager would not execute the node if nothing behind it is asked for.
        if node.handle in nodes and edges and not any(edge.node in wanted for edge in edges):
            added.append(GradientEdge(live.nodes[edges[0].node].handle, edges[0].slot))
    if added:
        backward.request = replace(asked, inputs=(*asked.inputs, *added), added=len(added))


def use_up(captured: BackwardGraph, backward: LiveBackward) -> None:
    """Note what a backward with compiled functions is about to use.

    Raises:
        RuntimeError: eager's, if a part has been used already.
    """
    parts, request = captured.intact_calls(), backward.request
    if not (_used or parts or request.added):
        return
    for index, keys in _used_now(captured, backward).items():
        node = backward.node_calls[index]
        before = _used.get(node, frozenset())
        if before & keys:
            _raise_as_eager()
        # The engine itself watches what it releases.
        if not request.keep_graph and (index in parts or request.added):
            _used[node] = before | keys


def _used_now(captured: BackwardGraph, backward: LiveBackward) -> dict[int, frozenset[float]]:
    """By inlined node call, what this backward uses: all of it, or what leads to an output asked for."""
    used = {index: inlined.consumed for index, inlined in captured.inlined.items()}
    if backward.request.added:
        edges = [edge_of(tensor) for tensor in backward.asked.inputs]
        for index in used:
            slots = [slot for node, slot in edges if node is backward.node_calls[index]]
            if slots:
                used[index] = frozenset().union(*map(captured.inlined[index].consumed_for.__getitem__, slots))
    return used


def _raise_as_eager() -> None:
    """What torch raises where a graph is used a second time, in the words of the installed torch."""
    with torch.enable_grad():
        root = torch.ones((), requires_grad=True).exp()
    request = EngineRequest((root,), (torch.ones(()),), False, False, (), accumulate_grad=True)
    with window.stock():
        run_stock(request)
        run_stock(request)
