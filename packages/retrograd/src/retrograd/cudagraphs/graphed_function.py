"""Records compiled code separately for each set of parameters, and of sizes, that it is called with.

In: a boxed function, and the graphs from which it was compiled. Out: the same function, unless its graphs
show that it cannot be recorded. Layers may share code, so each set of parameters has its own recordings. They
read the parameters at their addresses, and several sets are held at a time. We drop a set's recordings when
one of its parameters is freed. For code with symbolic sizes, we record each set of sizes that repeats.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from retrograd.cudagraphs.graphed_call import HELD, NOT_NOW, GraphedCall, Values, has_failed
from retrograd.cudagraphs.program import Program
from retrograd.cudagraphs.refusals import (
    recorded_without,
    refusal,
    values_of,
    why_not_recorded,
)
from retrograd.errors import Reason
from retrograd.graph.aliases import aliased_inputs
from retrograd.graph.emit import Boxed
from retrograd.graph.fx import written_inputs
from retrograd.graph.operator_effects import custom_operators
from retrograd.policy import MOST_SETS, MOST_SIZES, MUCH
from retrograd.report import process_report
from retrograd.runtime.cuda import CudaRecorder
from retrograd.runtime.tensor import storage_of, tensors_in
from retrograd.trace import bytes_of, places_of_symbols

#: called with the results of code that cannot be recorded; returns its replacement, or None if there is none.
Instead = Callable[[Sequence[Any]], Boxed | None]


class GraphedFunction:
    """A function that is recorded separately for each set of parameters and sizes among its inputs.

    Args:
        code: the function.
        make: makes the `GraphedCall` for one more set; ``kin=`` is equal for sets that differ in sizes only.
        instead: called once, if a call cannot be recorded.
        inputs: example values of its inputs.
        tell: called with the reason if calls with some sizes are not recorded.
    """

    def __init__(
        self,
        code: Boxed,
        make: Callable[..., GraphedCall],
        instead: Instead,
        inputs: Sequence[Any],
        tell: Callable[[Reason], None],
    ) -> None:
        self._code, self._make, self._instead = code, make, instead
        self._tell = tell
        #: where to read the sizes that differ between calls: the index of an input, and a dimension of it, or
        #: None if the input is the number itself.
        self._sizes = tuple(places_of_symbols(inputs).values())
        self._places: tuple[int, ...] | None = None
        #: by parameter addresses and sizes: the call, and weak references that see a parameter being freed.
        self._calls: dict[tuple[Any, ...], tuple[GraphedCall, list[weakref.ref[Any]]]] = {}
        self._refused: Boxed | None = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Call the function. `inputs` is emptied."""
        if self._refused is not None:
            return self._refused(inputs)
        if self._places is None:
            self._places = tuple(i for i, value in enumerate(inputs) if isinstance(value, nn.Parameter))
        where: tuple[Any, ...] = tuple([inputs[i].data_ptr() for i in self._places])
        where += tuple([inputs[i] if dim is None else inputs[i].size(dim) for i, dim in self._sizes])
        known = self._calls.get(where) or self._new(where, inputs)
        if known is None:
            return self._code(inputs)
        call = known[0]
        results = call(inputs)
        if call.is_refused:  # other sets will be refused too
            self._refused = self._instead(results) or call
        return results

    def _new(
        self, where: tuple[Any, ...], inputs: Sequence[Any]
    ) -> tuple[GraphedCall, list[weakref.ref[Any]]] | None:
        """The call for one more set; None if too many sets of sizes are recorded."""
        assert self._places is not None
        parameters = [inputs[i] for i in self._places]
        if self._sizes and not self._has_room(where[: len(parameters)]):
            self._tell(_SIZES)
            return None
        while len(self._calls) >= MOST_SETS:
            self._calls.pop(next(iter(self._calls)), None)
        own = weakref.ref(self)

        def gone(_: object) -> None:
            if (known := own()) is not None:
                known._calls.pop(where, None)

        watches = [weakref.ref(one, gone) for one in parameters]
        kin = (id(self), *where[: len(parameters)]) if self._sizes else None
        return self._calls.setdefault(where, (self._make(kin=kin), watches))

    def _has_room(self, parameters: tuple[int, ...]) -> bool:
        """Whether one more set of sizes fits. The oldest set without a recording makes room."""
        like = [where for where in self._calls if where[: len(parameters)] == parameters]
        if len(like) >= MOST_SIZES:
            idle = next((where for where in like if not self._calls[where][0].is_recorded), None)
            if idle is None:
                return False
            self._calls.pop(idle, None)
        return True


_program = Program(CudaRecorder())


_UNKNOWN = Values()


def graphed(
    code: Boxed,
    *graphs: fx.Graph,
    values: Values = _UNKNOWN,
    tell: Callable[[Reason], None] | None = None,
    instead: Instead = lambda results: None,
) -> Boxed:
    """`code`, replayed when that is safe.

    Args:
        code: a boxed function.
        graphs: all graphs from which it was compiled, with their fake values.
        values: what we know about its inputs and results, besides what the graphs say.
        tell: called once with each reason why a call is not replayed. By default we tell the report, and warn
            if the reason concerns all calls.
        instead: as in `GraphedFunction`.

    Returns:
        `code` itself if it must never be recorded, or does nothing on the device.
    """
    tell = tell or tell_report
    if (reason := why_not_recorded(graphs, _program.recorder.device_type)) is not None:
        tell(reason)
        return code
    if all(aliased_inputs(node) for graph in graphs for node in graph.nodes if node.op == "call_function"):
        return code  # views start no kernels
    values = replace(
        values,
        copyable=int(max(MUCH, 2 * _made_by(graphs))),
        written=written_inputs(graphs[0]),  # if there are several graphs, none writes to an input
        custom=frozenset(name for graph in graphs for name in custom_operators(graph)),
    )
    device, tell = next(values_of(graphs)).device, functools.cache(tell)  # one report for all parameters
    make = functools.partial(GraphedCall, code, _program, device, values, tell)
    inputs = [node.meta.get("val") for node in graphs[0].find_nodes(op="placeholder")]
    return GraphedFunction(code, make, instead, inputs, tell)


def unrecordable_calls(graph: fx.Graph) -> Mapping[fx.Node, Reason]:
    """Like `recorded_without`, for the recordings of this process."""
    return recorded_without(graph, _program.recorder.device_type, has_failed)


def _made_by(graphs: Sequence[fx.Graph]) -> float:
    """The bytes of the graphs' results, without those that alias an input."""
    given, made = dict[int, float](), dict[int, float]()
    for graph in graphs:
        inputs, outputs = graph.find_nodes(op="placeholder"), graph.output_node().all_input_nodes
        for found, nodes in ((given, inputs), (made, outputs)):
            for value in tensors_in([node.meta.get("val") for node in nodes]):
                found[storage_of(value)] = bytes_of(value)
    return sum(size for storage, size in made.items() if storage not in given)


_SIZES = refusal(
    "cuda-graphs-sizes",
    f"calls of {MOST_SIZES} other sizes are recorded already",
    "pad inputs to fewer sizes; results are the same",
)


def tell_report(reason: Reason) -> None:
    """Tell the process's report why something is not recorded."""
    process_report.recorded(reason, warn=reason.code not in (NOT_NOW, HELD))
