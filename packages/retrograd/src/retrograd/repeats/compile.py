"""Compile a graph in parts: each different one once.

In: an ATen graph, its example inputs, and a function that compiles one. Out: a `Division`; a boxed callable,
in straight-line Python: a value is let go before the call that reads it last, which then has the only
reference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from retrograd.events import counters
from retrograd.graph.emit import Boxed, Emitter, last_uses
from retrograd.repeats.divide import cut_at, divided
from retrograd.repeats.outline import Outline, graph_of
from retrograd.trace import places_of_symbols, symbols_in

#: a graph, its example inputs and how many results must have their traced strides.
ToCompile = tuple[fx.GraphModule, Sequence[Any], int | None]
CompilePart = Callable[[fx.GraphModule, Sequence[Any], int | None], Boxed]


class Step(NamedTuple):
    """A call of the code of part `key`: it takes the values `reads` and gives those of `makes`, by name."""

    key: Hashable
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Division:
    """A graph in the parts in which it is compiled.

    Attributes:
        inputs: fakes of its inputs. names: their names.
        graphs: what is to be compiled: each different part, or the whole, if nothing in it repeats itself.
        steps: the parts in order; none, if it is not divided.
        results: names of what it returns, or constants.
        sizes: names of symbolic sizes that parts take, each with an input and the dimension of which it is.
        held: what the graph holds, by name.
        is_symbolic: whether sizes of inputs are symbolic.
    """

    inputs: Sequence[Any]
    names: tuple[str, ...]
    graphs: Mapping[Hashable, ToCompile]
    steps: tuple[Step, ...] = ()
    results: tuple[Any, ...] = ()
    sizes: tuple[tuple[str, str, int], ...] = ()
    held: Mapping[str, Any] = field(default_factory=dict)
    is_symbolic: bool = False

    def code(self, compile_part: CompilePart) -> Boxed:
        """What runs the graph, of what `compile_part` makes of each of `graphs`."""
        codes = {key: compile_part(*graph) for key, graph in self.graphs.items()}
        if not self.steps:
            return codes[None]
        counters["region_compiles"] += len(codes)
        counters["region_calls"] += len(self.steps)
        return self.joined([codes[step.key] for step in self.steps])

    def joined(self, codes: Sequence[Boxed]) -> Boxed:
        """A callable of the inputs as a list, which it empties, of one for each of `steps`."""
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
    """The parts of a graph, which stays as it is.

    Args:
        gm: a functional ATen graph that returns a tuple; ``meta["val"]`` of its nodes are example values.
        inputs: fakes of its inputs.
        least: calls that a part that repeats has at least; 0: the graph is not divided.
        visible: how many results, from the first, must have the strides that they were traced with; None:
            who compiles knows.
        copies: of a part that repeats, at least.
    """
    return _division(gm, inputs, visible, divided(gm.graph, least, visible, copies) if least else [])


def divide_at(
    gm: fx.GraphModule, inputs: Sequence[Any], visible: int | None, separate: Collection[fx.Node]
) -> Division:
    """`gm` cut before and behind each of the calls `separate`; else as `divide`."""
    return _division(gm, inputs, visible, cut_at(gm.graph, visible, separate))


def _division(
    gm: fx.GraphModule, inputs: Sequence[Any], visible: int | None, parts: Sequence[Outline]
) -> Division:
    names = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
    places, is_symbolic = places_of_symbols(inputs), any(map(symbols_in, inputs))
    #: by part, symbols that no input of it has as a size: they are inputs of their own.
    missing = {part: sorted(_missing(part)) if is_symbolic else [] for part in parts}
    wanted = sorted({name for symbols in missing.values() for name in symbols})
    if not parts or not places.keys() >= set(wanted):  # else nobody could read a size
        return Division(inputs, names, {None: (gm, inputs, visible)}, is_symbolic=is_symbolic)
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
        inputs,
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
