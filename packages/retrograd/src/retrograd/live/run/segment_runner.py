"""Run segments: by shared code where they are equal, or one call at a time.

In: a `Segment` and the values that arrive at it. Out: its outputs. `step_through` puts something around each
call. It is slower than the segment's generated code, so it is used only to trace, under a profiler, and where
user code has left modes switched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx

from retrograd._torch.state import KeptModes, ModesKept
from retrograd.backends.base import Backend
from retrograd.config import Config
from retrograd.graph.backward_graph import Segment, call_of
from retrograd.graph.emit import boxed_calls, last_uses
from retrograd.graph.structure import structure_of
from retrograd.live.lower.lowered import BoxedFunction, How, Lowerings
from retrograd.live.lower.runner import BoxedRunner
from retrograd.live.plan_log import PlanLog
from retrograd.process import Recent
from retrograd.repeats.lift_scalars import Family
from retrograd.report import LoweringReport

Around = Callable[[fx.Node], AbstractContextManager[Any]]

#: runners of segments, by settings, place and structure: those of an earlier plan serve equal segments.
_runners: Recent[BoxedRunner] = Recent()

#: segments that differ only in their numbers, by settings and structure without the numbers.
_families: Recent[Family] = Recent()

#: the code of segments, by settings and structure.
_lowerings: Recent[Lowerings] = Recent()


def runner_of(segment: Segment, number: int, config: Config, backend: Backend, log: PlanLog) -> BoxedRunner:
    """A runner for the segment: that of an equal segment in the same place of an earlier plan, if there was
    one; else a new one, which shares the code of equal segments in other places.

    Args:
        segment: the segment, and `number` its place among the segments of its schedule.
        config, backend: how to lower it.
        log: is told every lowering.
    """
    because = _why_interpreted(segment, backend)
    structure = structure_of(segment.nodes, segment.inputs, segment.outputs) if because is None else None

    def make(shared: Lowerings | None = None) -> BoxedRunner:
        names = tuple(getattr(node.target, "__name__", str(node.target)) for node in segment.nodes)
        how = How(number, names, config, backend, log)
        return BoxedRunner(_function_of(segment, number, log), how, because, shared)

    if structure is None:
        return make()

    def new() -> Lowerings:
        family = _families.get((config, structure.family), Family)[0] if structure.numbers else None
        return Lowerings(family=family, numbers=structure.numbers)

    shared, _ = _lowerings.get((config, structure), new)
    # The runner knows its calls by node call: for profilers, and for modes that hooks leave switched.
    node_calls = tuple(call_of(node).node_call for node in segment.nodes)
    runner, is_new = _runners.get((config, number, structure, node_calls), lambda: make(shared))
    if not is_new:
        because = "shared with an earlier backward's equal segment"
        log.lowered(LoweringReport(number, backend.name, "", because))
    return runner


def _function_of(segment: Segment, number: int, log: PlanLog) -> BoxedFunction:
    # Most segments of a deep model are never interpreted: they run the code of an equal one.
    generated = functools.cache(lambda: boxed_calls(segment.inputs, segment.nodes, segment.outputs))

    def run(args: list[Any]) -> Sequence[Any]:
        return generated()(args)

    return BoxedFunction(
        run,
        noted=lambda args: step_through(segment, args, log.node_noted),
        ranged=lambda args: step_through(segment, args, log.node_ranges),
        range=lambda: log.segment_range(segment, number),
    )


def _why_interpreted(segment: Segment, backend: Backend) -> str | None:
    if not backend.traces:
        return f"backend {backend.name} interprets"
    if segment.interpret_because:
        return segment.interpret_because
    return None if segment.worth_compiling else "nothing in it is worth compiling"


class LeakedModes:
    """Modes that user code left switched, for what remains of its node call.

    Eager puts the thread's modes back between nodes, not between the hooks of a node and the node itself:
    after a pre hook that leaves grad mode on, the gradients of its own node have a history, those of the next
    node do not.

    Args:
        node: the call that left them. modes: how it left them.
    """

    def __init__(self, node: fx.Node, modes: KeptModes) -> None:
        self._node_call, self._modes = call_of(node).node_call, modes

    def reach(self, segment: Segment) -> bool:
        """Whether a call of `segment` belongs to the same node."""
        return any(call_of(node).node_call == self._node_call for node in segment.nodes)

    def around(self, node: fx.Node) -> AbstractContextManager[Any]:
        """The modes in which `node` runs: these if it belongs to the same node, else as they are."""
        return ModesKept(self._modes) if call_of(node).node_call == self._node_call else nullcontext()


def step_through(segment: Segment, args: list[Any], around: Around) -> tuple[Any, ...]:
    """The outputs of `segment`, computed call by call inside `around`.

    `args` is emptied, and values are let go after their last use.
    """
    values = dict(zip(segment.inputs, args, strict=True))
    args.clear()
    reads = [(i, (node, *node.all_input_nodes)) for i, node in enumerate(segment.nodes)]
    dying = last_uses([*reads, (len(reads), segment.outputs)])
    for i, node in enumerate(segment.nodes):
        with around(node):
            args, kwargs = argument_values((node.args, node.kwargs), values)
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
            del args, kwargs
        for value in dying.get(i, ()):
            del values[value]
    return tuple(values[node] for node in segment.outputs)


def argument_values(argument: Any, values: dict[fx.Node, Any]) -> Any:
    """An FX argument with values for its nodes, in plain lists and tuples."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, list):
        return [argument_values(item, values) for item in argument]
    if isinstance(argument, tuple):
        return tuple(argument_values(item, values) for item in argument)
    if isinstance(argument, dict):
        return {name: argument_values(item, values) for name, item in argument.items()}
    return argument
