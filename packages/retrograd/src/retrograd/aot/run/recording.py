"""Give one half of a partition to a backend; record its code as CUDA graphs if the user wants that.

In: as in `lower_half`, and what is known of the half's inputs and results. Out: a boxed callable.

What cannot be recorded would keep a whole graph from it: an operator that works on the host, or waits for
the device. So the graph is cut there. Each stretch between two cuts is compiled and recorded for itself;
stretches that are equal, as those of layers are, share code. That a custom operator waits for the device
shows when it is recorded: then the graph is cut and compiled once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from retrograd.repeats.compile import CompilePart, Division, divide_at
from retrograd.runtime.modes import are_modes_plain


class InStretches:
    """Code of which stretches are recorded."""

    def __init__(self, run: Boxed) -> None:
        self._run = run

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results; `inputs` is emptied."""
        return self._run(inputs)


def may_replay(code: Boxed | None) -> bool:
    """Whether the code, or stretches of it, may be replayed."""
    return isinstance(code, (GraphedFunction, InStretches))


def lower_half(
    backend: Backend, graph: LazyGraph, state: CaptureState, half: GraphKind, config: Config, values: Values
) -> Boxed:
    """As `lower`; with CUDA graphs, what it gives is replayed where that is safe."""
    if not config.cudagraphs:
        return lower(backend, graph, state, half, config)

    def compile_stretch(gm: fx.GraphModule, examples: Sequence[Any], visible: int | None) -> Boxed:
        return lower(backend, lazy_graph(gm, examples), state, replace(half, visible=visible), config)

    if config.patience is None and (cut := _cut(graph, half)) is not None:
        return InStretches(cut.code(compile_stretch, values))
    code = lower(backend, graph, state, half, config)
    if not is_ready(code):
        return code

    @torch.compiler.disable  # Dynamo would trace it, where a compiled function runs a backward
    def instead(results: Sequence[Any]) -> Boxed | None:
        """Code in stretches. Its results lie as those of the code in one piece: backwards are compiled for
        that."""
        if not are_modes_plain() or (cut := _cut(graph, half)) is None:
            return None
        with torch.inference_mode(False):
            return with_strides_of(cut.code(compile_stretch, values), results)

    return graphed(code, graph.gm.graph, values=values, instead=instead)


def _cut(graph: LazyGraph, half: GraphKind) -> _Cut | None:
    """The graph cut at what cannot be recorded; None if nothing is, or if hardly anything else is there."""
    reasons = unrecordable_calls(graph.gm.graph)
    if not reasons:
        return None
    division = divide_at(graph.gm, graph.summary.inputs, half.visible, reasons)
    recorded = {key: _is_worth_it(gm.graph) for key, (gm, _, _) in division.graphs.items()}
    if not division.steps or not any(recorded.values()):
        return None
    for reason in dict.fromkeys(reasons.values()):
        tell_report(reason)
    return _Cut(division, recorded)


def _is_worth_it(graph: fx.Graph) -> bool:
    """Whether it can be recorded, and starts more than a kernel."""
    calls = [node for node in graph.nodes if node.op == "call_function" and not aliased_inputs(node)]
    return len(calls) >= FEWEST_RECORDED and not unrecordable_calls(graph)


@dataclass(frozen=True, eq=False)
class _Cut:
    """A graph in parts.

    Attributes:
        is_recorded: by key of a part, whether it is.
    """

    division: Division
    is_recorded: Mapping[Hashable, bool]

    def code(self, compile_stretch: CompilePart, values: Values) -> Boxed:
        """Code of each part, recorded for each place in which it stands."""
        division = self.division
        codes = {key: compile_stretch(*graph) for key, graph in division.graphs.items()}
        #: of values that recordings give, how memory knows them.
        known = {division.names[place]: name for place, name in values.results.items()}
        loose = {division.names[place] for place in values.loose}
        kept = {division.results[place]: name for place, name in values.kept.items()}
        seen = {name for place, name in enumerate(division.results) if place not in values.kept}
        run: list[Boxed] = []
        for step in division.steps:
            if not self.is_recorded[step.key]:
                loose.update(step.makes)
                run.append(codes[step.key])
                continue
            reads, makes = [*enumerate(step.reads)], enumerate(step.makes)
            own = Values(
                kept={i: kept.get(name, (self, name)) for i, name in makes if name not in seen},
                loose=[i for i, name in reads if name in loose],
                results={i: known[name] for i, name in reads if name in known},
                memory=values.memory,
            )
            known.update({step.makes[i]: name for i, name in own.kept.items()})
            gm, _, _ = division.graphs[step.key]
            run.append(graphed(codes[step.key], gm.graph, values=own))
        return division.joined(run)
