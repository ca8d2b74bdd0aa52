"""Compile a graph in parts: each different one once.

In: an ATen graph, its example inputs, and a function that compiles one. Out: a `Division`; a boxed callable,
in straight-line Python: a value is let go before the call that reads it last, which then has the only
reference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import fx

from retrograd._torch.trace import places_of_symbols, symbols_in
from retrograd.events import counters
from retrograd.graph.emit import Boxed, Emitter, last_uses
from retrograd.repeats.divide import divided
from retrograd.repeats.outline import Outline, graph_of

#: a graph, its example inputs and how many results must have their traced strides.
ToCompile = tuple[fx.GraphModule, Sequence[Any], int | None]
CompilePart = Callable[[fx.GraphModule, Sequence[Any], int | None], Boxed]

#: ATen calls that an autograd node amounts to, forward or backward.
CALLS_PER_NODE = 3


class Division:
    """A graph, which stays as it is, and the parts in which it is compiled.

    Args:
        gm: a functional ATen graph that returns a tuple; ``meta["val"]`` of its nodes are example values.
        inputs: fakes of its inputs.
        least: calls that a part that repeats has at least; 0: the graph is not divided.
        visible: how many results, from the first, must have the strides that they were traced with; None:
            who compiles knows.
        copies: of a part that repeats, at least.

    Attributes:
        inputs: as given. is_symbolic: whether sizes of them are symbolic.
        graphs: what is to be compiled: each different part, or the whole, if nothing in it repeats itself.
    """

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], least: int, visible: int | None, copies: int = 2
    ) -> None:
        parts = divided(gm.graph, least, visible, copies) if least else []
        placeholders, places = gm.graph.find_nodes(op="placeholder"), places_of_symbols(inputs)
        self.is_symbolic = any(map(symbols_in, inputs))
        #: by part, symbols that no input of it has as a size: they are inputs of their own.
        missing = {part: sorted(_missing(part)) if self.is_symbolic else [] for part in parts}
        wanted = sorted({name for names in missing.values() for name in names})
        if not places.keys() >= set(wanted):  # nobody could read one that is a size of no input of the whole
            parts, wanted = [], []
        self._gm, self._parts, self._missing, self.inputs = gm, parts, missing, inputs
        #: by symbol, what it is read as: a placeholder, or its name; these are sizes of placeholders.
        self._sources: dict[str, Hashable] = {}
        self._sizes: list[tuple[str, fx.Node, int]] = []
        values: dict[str, Any] = {}
        for name in wanted:
            place, dim = places[name]
            self._sources[name] = placeholders[place] if dim is None else name
            values[name] = inputs[place] if dim is None else inputs[place].shape[dim]
            if dim is not None:
                self._sizes.append((name, placeholders[place], dim))
        self.graphs: dict[Hashable, ToCompile] = {} if parts else {None: (gm, inputs, visible)}
        for part in parts:
            if part.key not in self.graphs:
                sizes = [values[name] for name in missing[part]]
                examples = [*(node.meta["val"] for node in part.inputs), *sizes]
                self.graphs[part.key] = graph_of(gm, part, sizes), examples, part.pinned

    @property
    def is_divided(self) -> bool:
        """Whether it is compiled in several parts."""
        return bool(self._parts)

    def code(self, compile_part: CompilePart) -> Boxed:
        """What runs the graph, of what `compile_part` makes of each of `graphs`."""
        codes = {key: compile_part(*graph) for key, graph in self.graphs.items()}
        if not self._parts:
            return codes[None]
        steps = []
        for part in self._parts:
            reads = (*part.inputs, *(self._sources[name] for name in self._missing[part]))
            steps.append(_Step(codes[part.key], reads, part.outputs))
        counters["region_compiles"] += len(codes)
        counters["region_calls"] += len(steps)
        return _straight_line(self._gm, self._sizes, steps)


def _missing(part: Outline) -> frozenset[str]:
    values = [node.meta["val"] for node in part.inputs]
    used = frozenset[str]().union(*map(symbols_in, values))
    used = used.union(*(symbols_in(node.meta.get("val")) for node in part.calls))
    return used - places_of_symbols(values).keys()


class _Step(NamedTuple):
    """A call of `run`: it takes the values `reads` and gives those of `makes`."""

    run: Boxed
    reads: tuple[Hashable, ...]
    makes: tuple[fx.Node, ...]


def _straight_line(
    gm: fx.GraphModule, sizes: Sequence[tuple[str, fx.Node, int]], steps: Sequence[_Step]
) -> Boxed:
    """A callable of the inputs of `gm` as a list, which it empties, that reads `sizes`, makes `steps` in
    order and gives the results of `gm`."""
    emit = Emitter("run(args)")
    inputs, held = (gm.graph.find_nodes(op=op) for op in ("placeholder", "get_attr"))
    for node in held:
        emit.local[node] = emit.refer("held", operator.attrgetter(str(node.target))(gm))
    results: Any = gm.graph.output_node().args[0]
    kept = {*held, *(result for result in results if isinstance(result, fx.Node))}
    came = (*inputs, *(name for name, _, _ in sizes))
    reads = [(-1, came), *((i, (*step.reads, *step.makes)) for i, step in enumerate(steps))]
    last = last_uses((place, [value for value in values if value not in kept]) for place, values in reads)
    if inputs:
        emit.unpack(inputs, "args")
    emit.line("args.clear()")
    for name, tensor, dim in sizes:
        emit.line(f"{emit.name(name)} = {emit.name(tensor)}.size({dim})")
    emit.let_go(last.get(-1, ()))
    for i, step in enumerate(steps):
        emit.line(f"args = {emit.listed(step.reads)}")
        emit.let_go(value for value in last.get(i, ()) if value in step.reads)
        emit.unpack(step.makes, f"{emit.refer('call', step.run)}(args)")
    emit.line(f"return {emit.expression(list(results))}")
    return emit.function()
