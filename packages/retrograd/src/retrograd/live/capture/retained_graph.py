"""Backwards whose plan needs autograd nodes that still have their saved tensors, or must leave some intact.

In: an `EngineRequest`. Out: what the engine collected, and everything released that eager would release, and
nothing else. Three cases need it when the graph is not to be retained:

- an ``autograd.Function`` behind saved-tensor hooks: only its own context can unpack them;
- a gradient of an intermediate tensor: the engine would release that tensor's node too, which eager does not
  execute and leaves intact;
- a function that AOTAutograd compiled, whose one node stands for many of eager's, and of which this backward
  needs only a part that the rest does not need.

Then the engine collects with the graph kept, and the executed nodes are released by themselves: at once, but
for those Functions, which release their own saved tensors when they have run. Where eager releases node by
node, so that an exception in a hook leaves the rest intact, a plan has released all but those Functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from retrograd._torch.autograd import (
    Collected,
    EngineProtocol,
    EngineRequest,
    collect,
    keeps_saved_tensors,
    read_live_graph,
    release,
    request_to_release,
    window,
)
from retrograd.events import live_log
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.eager_order import ROOT, LiveGraph, eager_walk
from retrograd.live.calls.functions import call_kept_backward
from retrograd.live.capture.recorder import BackwardRecorder, GraphNeededError
from retrograd.live.captured import CapturedBackward
from retrograd.live.run.running_backward import RunningBackward
from retrograd.process import forgotten_by_reset

Finished = Callable[[BackwardGraph, EngineRequest], CapturedBackward]

#: classes of autograd nodes that needed it: Functions behind saved-tensor hooks, and compiled functions. The
#: engine's cache does not tell before it releases, so a graph with one of them is always collected with the
#: graph kept.
_kept_classes: weakref.WeakSet[type] = weakref.WeakSet()
forgotten_by_reset(_kept_classes.clear)


def collect_and_release(
    request: EngineRequest, finished: Finished, run_in_frame: Callable[[Collected], None]
) -> Collected | None:
    """As ``_torch.autograd.collect``, for any request.

    Args:
        finished: makes the artifact of a new structure.

    Raises:
        Exception: as `collect`; nothing was consumed unless `run_in_frame` was called.
    """
    live = None if request.keep_graph else _graph_to_keep(request)
    if live is None:
        try:
            return collect(request, lambda: _protocol(request, finished), run_in_frame)
        except GraphNeededError as needed:
            _kept_classes.add(type(RunningBackward(request).node_calls[needed.node_call]))
            live = read_live_graph(request.as_asked())
    return _collect_kept(request, live, finished, run_in_frame)


def _protocol(request: EngineRequest, finished: Finished) -> EngineProtocol:
    def noting(backward: BackwardGraph) -> CapturedBackward:
        if kept := [*_kept_calls(backward), *backward.intact_calls()]:
            nodes = RunningBackward(request).node_calls
            _kept_classes.update(type(nodes[index]) for index in kept)
        return finished(backward, request)

    return EngineProtocol(BackwardRecorder(noting, request.keep_graph))


def _discarding_protocol(request: EngineRequest) -> EngineProtocol:
    """For a capture that is never run."""
    finished = partial(CapturedBackward, request=request)
    return EngineProtocol(BackwardRecorder(finished, graph_is_kept=True))


def _collect_kept(
    request: EngineRequest,
    live: LiveGraph,
    finished: Finished,
    run_in_frame: Callable[[Collected], None],
) -> Collected | None:
    kept = replace(request, keep_graph=True)
    in_frame: list[CapturedBackward] = []

    def run(call: Collected) -> None:
        in_frame.append(call.artifact)
        run_in_frame(call)

    try:
        with window.capture():
            call = collect(kept, lambda: _protocol(kept, finished), run)
            if call is not None:
                _release_executed(request, live, call.artifact, already_run=False)
    finally:
        # The engine has room for one call at a time: in its frame, nothing can be released before the end.
        if in_frame:
            _release_executed(request, live, in_frame[0], already_run=True)
    return call


def _graph_to_keep(request: EngineRequest) -> LiveGraph | None:
    """The live graph, if it has to be kept as far as can be known before it was collected."""
    if not _kept_classes and all(getattr(tensor, "is_leaf", False) for tensor in request.inputs):
        return None
    live = read_live_graph(request.as_asked())
    if (
        request.added
        or any(type(node.handle) in _kept_classes for node in live.nodes)
        or _has_intact_input(live, request)
    ):
        return live
    return None


def _has_intact_input(live: LiveGraph, request: EngineRequest) -> bool:
    """Whether a gradient is asked for whose node is not executed, but has saved tensors."""
    ends = set(live.wanted or ()) - _executed(live, request)
    return any(keeps_saved_tensors(live.nodes[i].handle) for i in ends)


def _executed(live: LiveGraph, request: EngineRequest) -> set[int]:
    """Indices of the nodes that eager executes, but for accumulations, which save nothing.

    ``autograd.grad`` only captures the gradients of its inputs; ``backward`` executes its inputs' nodes too.
    """
    wanted = frozenset(range(len(live.nodes))) if live.wanted is None else live.wanted
    if request.accumulate_grad:
        return {i for i in wanted if live.nodes[i].edges}
    return {i for i in wanted if any(edge and edge.node in wanted for edge in live.nodes[i].edges)}


def _kept_calls(backward: BackwardGraph) -> list[int]:
    """Node calls that use their own saved tensors when they run."""
    return [call.node_call for node, call in backward.calls() if node.target is call_kept_backward]


def _release_executed(
    request: EngineRequest, live: LiveGraph, artifact: CapturedBackward, already_run: bool
) -> None:
    """Release what eager would; what the plan still needs, it releases itself."""
    nodes = RunningBackward(request).node_calls
    own = {id(nodes[index]) for index in _kept_calls(artifact.backward)}
    intact = {id(nodes[index]) for index in artifact.backward.intact_calls()}
    apart = {i for i, node in enumerate(live.nodes) if id(node.handle) in own | intact}
    begun = already_run
    groups = _levels(live, _executed(live, request.as_asked()), apart)
    for level, group in reversed(list(enumerate(groups))):
        if not group:
            continue
        try:
            part = request_to_release(live, request, group, from_roots=level == 0)
            release(part, partial(_discarding_protocol, part))
        except Exception:
            if not begun:
                raise  # the stock engine can still run this backward
            live_log.exception("saved tensors stay until their graph goes")
        begun = True


def _levels(live: LiveGraph, executed: set[int], apart: set[int]) -> Sequence[set[int]]:
    """The `executed` nodes without those `apart`, by how many of these are above them at most: no path
    between two nodes of one level leads over a node that is apart."""
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
