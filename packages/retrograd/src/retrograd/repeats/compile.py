"""Compiles a graph in parts, each distinct part once.

In: an ATen graph, its example inputs, and a function that compiles a graph. Out: a `Division`, and from it a
boxed callable in straight-line Python. It drops its reference to a value before the call that reads it last,
so that this call holds the only reference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from retrograd.events import counters
from retrograd.graph.emit import Boxed, Emitter, last_uses
from retrograd.repeats.divide import divided
from retrograd.repeats.outline import Outline, graph_of
from retrograd.trace import places_of_symbols, symbols_in

#: a graph, its example inputs, and how many of its first results must have their traced strides.
ToCompile = tuple[fx.GraphModule, Sequence[Any], int | None]
CompilePart = Callable[[fx.GraphModule, Sequence[Any], int | None], Boxed]


class Step(NamedTuple):
    """One call of the code of part `key`, with the names of its inputs `reads` and its results `makes`."""

    key: Hashable
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Division:
    """A graph, divided into parts that are compiled separately.

    Attributes:
        names: names of its inputs.
        graphs: the graphs to compile: each distinct part, or the whole graph if nothing in it repeats.
        steps: calls of the parts, in order. Empty if the graph is not divided.
        results: names of the values that it returns, or constants.
        sizes: symbolic sizes that parts take: a name, an input, and the dimension of the input to read.
        held: the values of the graph's ``get_attr`` nodes, by name.
        is_symbolic: whether sizes of inputs are symbolic.
    """

    names: tuple[str, ...]
    graphs: Mapping[Hashable, ToCompile]
    steps: tuple[Step, ...] = ()
    results: tuple[Any, ...] = ()
    sizes: tuple[tuple[str, str, int], ...] = ()
    held: Mapping[str, Any] = field(default_factory=dict)
    is_symbolic: bool = False

    def code(self, compile_part: CompilePart) -> Boxed:
        """Code that runs the graph. We call `compile_part` on each of `graphs`."""
        codes = {key: compile_part(*graph) for key, graph in self.graphs.items()}
        if not self.steps:
            return codes[None]
        counters["region_compiles"] += len(codes)
        counters["region_calls"] += len(self.steps)
        return self.joined([codes[step.key] for step in self.steps])

    def joined(self, codes: Sequence[Boxed]) -> Boxed:
        """Code that runs `codes`, one for each of `steps`. It takes the inputs as a list, and empties it."""
        emit = Emitter("run(args)")
        for name, value in self.held.items():
            emit.local[name] = emit.refer("held", value)
        kept = {*self.held, *(result for result in self.results if isinstance(result, str))}
        came = (*self.names, *(name for name, _, _ in self.sizes))
        reads = [(-1, came), *((i, (*step.reads, *step.makes)) for i, step in enumerate(self.steps))]
        last = last_uses((place, [value for value in values if value not in kept]) for place, values in reads)
        if self.names:
            emit.unpack(self.names, "args")
        emit.line("args.clear()")
        for name, tensor, dim in self.sizes:
            emit.line(f"{emit.name(name)} = {emit.name(tensor)}.size({dim})")
        emit.let_go(last.get(-1, ()))
        for i, step in enumerate(self.steps):
            emit.line(f"args = {emit.listed(step.reads)}")
            emit.let_go(value for value in last.get(i, ()) if value in step.reads)
            emit.unpack(step.makes, f"{emit.refer('call', codes[i])}(args)")
        results = (emit.name(one) if isinstance(one, str) else emit.expression(one) for one in self.results)
        emit.line(f"return [{', '.join(results)}]")
        return emit.function()


def divide(
    gm: fx.GraphModule, inputs: Sequence[Any], least: int, visible: int | None, copies: int = 2
) -> Division:
    """The parts of a graph. The graph is not changed.

    Args:
        gm: a functional ATen graph that returns a tuple; ``meta["val"]`` of its nodes are example values.
        inputs: fakes of its inputs.
        least: the smallest number of calls in a part that repeats. With 0, the graph is not divided.
        visible: how many of the first results must have their traced strides. None leaves it to the compiler.
        copies: the smallest number of copies of a part that repeats.
    """
    return division_of(gm, inputs, visible, divided(gm.graph, least, visible, copies) if least else [])


def division_of(
    gm: fx.GraphModule, inputs: Sequence[Any], visible: int | None, parts: Sequence[Outline]
) -> Division:
    """`gm` in these `parts`; not divided if there are none. Otherwise like `divide`."""
    names = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
    places, is_symbolic = places_of_symbols(inputs), any(map(symbols_in, inputs))
    #: by part, symbols that are not a size of any of its inputs. They become extra inputs.
    missing = {part: sorted(_missing(part)) if is_symbolic else [] for part in parts}
    wanted = sorted({name for symbols in missing.values() for name in symbols})
    if not parts or not places.keys() >= set(wanted):  # or some size could not be read from an input
        return Division(names, {None: (gm, inputs, visible)}, is_symbolic=is_symbolic)
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    sizes = []
    for symbol in wanted:
        place, dim = places[symbol]
        sources[symbol] = names[place] if dim is None else f"size {symbol}"
        values[symbol] = inputs[place] if dim is None else inputs[place].shape[dim]
        if dim is not None:
            sizes.append((sources[symbol], names[place], dim))
    graphs: dict[Hashable, ToCompile] = {}
    steps = []
    for part in parts:
        if part.key not in graphs:
            own = [values[symbol] for symbol in missing[part]]
            examples = [*(node.meta["val"] for node in part.inputs), *own]
            graphs[part.key] = graph_of(gm, part, own), examples, part.pinned
        reads = (*_names(part.inputs), *(sources[symbol] for symbol in missing[part]))
        steps.append(Step(part.key, reads, _names(part.outputs)))
    results: Any = gm.graph.output_node().args[0]
    return Division(
        names,
        graphs,
        tuple(steps),
        tuple(one.name if isinstance(one, fx.Node) else one for one in results),
        tuple(sizes),
        {node.name: operator.attrgetter(str(node.target))(gm) for node in gm.graph.find_nodes(op="get_attr")},
        is_symbolic,
    )


def _names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _missing(part: Outline) -> frozenset[str]:
    values = [node.meta["val"] for node in part.inputs]
    used = frozenset[str]().union(*map(symbols_in, values))
    used = used.union(*(symbols_in(node.meta.get("val")) for node in part.calls))
    return used - places_of_symbols(values).keys()
