"""Compiled code that is recorded, for each set of parameters that it is called with.

In: a boxed function, and the graphs that it was compiled from. Out: the same function; of some graphs it is
known beforehand that they are never recorded. Layers may share code: each set of parameters has recordings of
its own, which read the parameters where they are and are held at the same time. They go when a parameter
does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from retrograd._torch.cuda import CudaRecorder
from retrograd._torch.fx import aliased_inputs, written_inputs
from retrograd._torch.operators import custom_operators
from retrograd._torch.tensor import storage_of
from retrograd.cudagraphs.graphed_call import HELD, MUCH, NOT_NOW, GraphedCall, Values, has_failed
from retrograd.cudagraphs.program import Program
from retrograd.cudagraphs.refusals import recorded_without, tensors_in, values_of, why_not_recorded
from retrograd.errors import Reason
from retrograd.graph.emit import Boxed
from retrograd.report import process_report

#: sets of parameters that are remembered, the ones met last.
MOST_SETS = 256


#: given results of code that cannot be recorded, what is called in its place; None: it is called itself.
Instead = Callable[[Sequence[Any]], Boxed | None]


class GraphedFunction:
    """A function, recorded apart for each set of parameters among its inputs.

    Args:
        make: makes the call for one more set.
        instead: is called once, when a call cannot be recorded.
    """

    def __init__(self, make: Callable[[], GraphedCall], instead: Instead) -> None:
        self._make, self._instead = make, instead
        self._places: tuple[int, ...] | None = None
        #: by the addresses of the parameters, with what sees one of them go.
        self._calls: dict[tuple[int, ...], tuple[GraphedCall, list[weakref.ref[Any]]]] = {}
        self._refused: Boxed | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results; `inputs` is emptied."""
        if self._refused is not None:
            return self._refused(inputs)
        if self._places is None:
            self._places = tuple(i for i, value in enumerate(inputs) if isinstance(value, nn.Parameter))
        where = tuple([inputs[i].data_ptr() for i in self._places])
        known = self._calls.get(where)
        call = known[0] if known else self._new(where, [inputs[i] for i in self._places])
        results = call(inputs)
        if call.is_refused:  # and so will others be
            self._refused = self._instead(results) or call
        return results

    def _new(self, where: tuple[int, ...], parameters: Sequence[Any]) -> GraphedCall:
        while len(self._calls) >= MOST_SETS:
            self._calls.pop(next(iter(self._calls)), None)
        calls = weakref.WeakMethod(self._forget)

        def gone(_: object) -> None:
            if (forget := calls()) is not None:
                forget(where)

        watches = [weakref.ref(one, gone) for one in parameters]
        return self._calls.setdefault(where, (self._make(), watches))[0]

    def _forget(self, where: tuple[int, ...]) -> None:
        self._calls.pop(where, None)


_program = Program(CudaRecorder())


_UNKNOWN = Values()


def graphed(
    code: Boxed,
    *graphs: fx.Graph,
    values: Values = _UNKNOWN,
    tell: Callable[[Reason], None] | None = None,
    instead: Instead = lambda results: None,
) -> Boxed:
    """`code`, replayed where that is safe.

    Args:
        graphs: all that it was compiled from, with the fakes of their values.
        values: what is known of its inputs and results, besides what the graphs say.
        tell: told, once each, why a call is not replayed; by default the report is, with a warning of what
            concerns all calls.
        instead: as in `GraphedFunction`.

    Returns:
        `code` itself if it is never to be recorded, or does nothing on the device.
    """
    tell = tell or tell_report
    if (reason := why_not_recorded(graphs, _program.recorder.device_type)) is not None:
        tell(reason)
        return code
    if all(aliased_inputs(node) for graph in graphs for node in graph.nodes if node.op == "call_function"):
        return code  # views start no kernels
    values = replace(
        values,
        copyable=max(MUCH, 2 * _made_by(graphs)),
        written=written_inputs(graphs[0]),  # several have none
        custom=frozenset(name for graph in graphs for name in custom_operators(graph)),
    )
    device, tell = next(values_of(graphs)).device, functools.cache(tell)  # once each, for all parameters
    return GraphedFunction(lambda: GraphedCall(code, _program, device, values, tell), instead)


def calls_apart(graph: fx.Graph) -> Mapping[fx.Node, Reason]:
    """As `recorded_without`, for what is recorded in this process."""
    return recorded_without(graph, _program.recorder.device_type, has_failed)


def _made_by(graphs: Sequence[fx.Graph]) -> int:
    """The bytes of the graphs' results that show no input."""
    given, made = dict[int, int](), dict[int, int]()
    for graph in graphs:
        inputs, outputs = graph.find_nodes(op="placeholder"), graph.output_node().all_input_nodes
        for found, nodes in ((given, inputs), (made, outputs)):
            for value in tensors_in([node.meta.get("val") for node in nodes]):
                found[storage_of(value)] = value.nbytes
    return sum(size for storage, size in made.items() if storage not in given)


def tell_report(reason: Reason) -> None:
    """Tell the process's report why something is not recorded."""
    process_report.noted(reason, warn=reason.code not in (NOT_NOW, HELD))
