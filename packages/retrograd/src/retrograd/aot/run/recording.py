"""Lowers one graph of a partition, and records its code as CUDA graphs if the user wants that.

In: the arguments of `lower_half`, including what we know about the graph's inputs and results. Out: a boxed
callable.

Some calls cannot be recorded: an operator that works on the host or waits for the device. One of them would
prevent the recording of the whole graph, so we cut the graph there. We compile and record each stretch
between two cuts separately; equal stretches, such as layers, share code. Only the recording shows that a
custom operator waits for the device: we then cut the graph and compile it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from retrograd.aot.run.lowering import is_ready, lower
from retrograd.backends.base import Backend, Boxed, GraphKind
from retrograd.config import Config
from retrograd.cudagraphs.graphed_call import Values
from retrograd.cudagraphs.graphed_function import GraphedFunction, graphed, tell_report, unrecordable_calls
from retrograd.graph.aliases import aliased_inputs
from retrograd.graph.fx import lazy_graph, with_strides_of
from retrograd.graph.joint_graph import CaptureState
from retrograd.graph.lazy import LazyGraph
from retrograd.policy import FEWEST_RECORDED
from retrograd.repeats.compile import CompilePart, Division, division_of
from retrograd.repeats.divide import cut_at
from retrograd.runtime.modes import are_modes_plain


class InStretches:
    """Code whose stretches are recorded."""

    def __init__(self, run: Boxed) -> None:
        self._run = run

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results; `inputs` is emptied."""
        return self._run(inputs)


def may_replay(code: Boxed | None) -> bool:
    """Whether the code, or a stretch of it, may be replayed."""
    return isinstance(code, (GraphedFunction, InStretches))


def lower_half(
    backend: Backend, graph: LazyGraph, state: CaptureState, half: GraphKind, config: Config, values: Values
) -> Boxed:
    """Like `lower`. With CUDA graphs, the code is replayed when that is safe."""
    if not config.cudagraphs:
        return lower(backend, graph, state, half, config)

    def compile_stretch(gm: fx.GraphModule, examples: Sequence[Any], visible: int | None) -> Boxed:
        return lower(backend, lazy_graph(gm, examples), state, replace(half, visible=visible), config)

    if config.patience is None and (division := _cut(graph, half)) is not None:
        return InStretches(_code_of(division, compile_stretch, values))
    code = lower(backend, graph, state, half, config)
    if not is_ready(code):
        return code

    @torch.compiler.disable  # Dynamo would trace it if a compiled function runs a backward
    def instead(results: Sequence[Any]) -> Boxed | None:
        """Code in stretches. Its results have the strides of the uncut code, because the backward was
        compiled for them."""
        if not are_modes_plain() or (division := _cut(graph, half)) is None:
            return None
        with torch.inference_mode(False):
            return with_strides_of(_code_of(division, compile_stretch, values), results)

    return graphed(code, graph.gm.graph, values=values, instead=instead)


def _cut(graph: LazyGraph, half: GraphKind) -> Division | None:
    """The graph, cut at calls that cannot be recorded. None if there are none, or if too little is left."""
    reasons = unrecordable_calls(graph.gm.graph)
    if not reasons:
        return None
    parts = cut_at(graph.gm.graph, half.visible, reasons)
    division = division_of(graph.gm, graph.summary.inputs, half.visible, parts)
    if not division.steps or not any(_is_worth_it(gm.graph) for gm, _, _ in division.graphs.values()):
        return None
    for reason in dict.fromkeys(reasons.values()):
        tell_report(reason)
    return division


def _is_worth_it(graph: fx.Graph) -> bool:
    """Whether the graph can be recorded and starts more than one kernel."""
    calls = [node for node in graph.nodes if node.op == "call_function" and not aliased_inputs(node)]
    return len(calls) >= FEWEST_RECORDED and not unrecordable_calls(graph)


def _code_of(division: Division, compile_stretch: CompilePart, values: Values) -> Boxed:
    """Code for a graph in stretches. Equal stretches share code; each use is recorded separately."""
    codes = {key: compile_stretch(*graph) for key, graph in division.graphs.items()}
    recorded = {key: gm.graph for key, (gm, _, _) in division.graphs.items() if _is_worth_it(gm.graph)}
    #: values that recordings produce, with their names in `Values.results`.
    known = {division.names[place]: name for place, name in values.results.items()}
    loose = {division.names[place] for place in values.loose}
    kept = {division.results[place]: name for place, name in values.kept.items()}
    seen = {name for place, name in enumerate(division.results) if place not in values.kept}
    run: list[Boxed] = []
    for step in division.steps:
        if step.key not in recorded:
            loose.update(step.makes)
            run.append(codes[step.key])
            continue
        reads, makes = [*enumerate(step.reads)], enumerate(step.makes)
        own = Values(
            kept={i: kept.get(name, (division, name)) for i, name in makes if name not in seen},
            loose=[i for i, name in reads if name in loose],
            results={i: known[name] for i, name in reads if name in known},
            memory=values.memory,
        )
        known.update({step.makes[i]: name for i, name in own.kept.items()})
        run.append(graphed(codes[step.key], recorded[step.key], values=own))
    return division.joined(run)
