"""Compile a graph in parts: each different one once.

In: an ATen graph, its example inputs, and a function that compiles one. Out: a boxed callable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx

from retrograd._torch.trace import places_of_symbols, symbols_in
from retrograd.events import counters
from retrograd.repeats.divide import divided
from retrograd.repeats.outline import Outline, graph_of
from retrograd.repeats.straight_line import Border, Boxed, EmittedCall, Name, Size, straight_line

#: given a graph, its example inputs and how many results must have their traced strides.
CompilePart = Callable[[fx.GraphModule, Sequence[Any], int | None], Boxed]

#: ATen calls that an autograd node amounts to, forward or backward.
CALLS_PER_NODE = 3


def compile_in_regions(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    compile_part: CompilePart,
    least: int,
    visible: int | None,
    copies: int = 2,
) -> Boxed:
    """Compile `gm`, which stays as it is.

    Args:
        gm: a functional ATen graph that returns a tuple; ``meta["val"]`` of its nodes are example values.
        inputs: fakes of its inputs.
        compile_part: compiles the whole, if nothing in it repeats itself, or each different part of it.
        least: calls that a part that repeats has at least; 0: the graph is not divided.
        visible: how many results, from the first, must have the strides that they were traced with; None:
            `compile_part` knows.
        copies: of a part that repeats, at least.

    Raises:
        Exception: whatever `compile_part` raises.
    """
    parts = divided(gm.graph, least, visible, copies) if least else []
    symbols = _Symbols(gm, inputs, parts)
    if not parts or symbols.is_any_hidden:
        return compile_part(gm, inputs, visible)
    codes: dict[Hashable, Boxed] = {}
    steps = []
    for part in parts:
        missing = symbols.missing[part]
        if part.key not in codes:
            sizes = [symbols.values[name] for name in missing]
            examples = [*(node.meta["val"] for node in part.inputs), *sizes]
            codes[part.key] = compile_part(graph_of(gm, part, sizes), examples, part.pinned)
            counters["region_compiles"] += 1
        reads = (*map(_name, part.inputs), *(symbols.names[name] for name in missing))
        steps.append(EmittedCall(codes[part.key], reads, tuple(map(_name, part.outputs))))
    counters["region_calls"] += len(steps)
    placeholders = tuple(map(_name, gm.graph.find_nodes(op="placeholder")))
    results: Any = gm.graph.output_node().args[0]
    given = [_name(result) if isinstance(result, fx.Node) else result for result in results]
    held: dict[str, Any] = {_name(node): _held(gm, node) for node in gm.graph.find_nodes(op="get_attr")}
    return straight_line(Border(placeholders, symbols.read(), held, given), steps)


def _name(node: fx.Node) -> Name:
    """What the value is called in the code."""
    return Name(f"v_{node.name}")


def _held(gm: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(gm)


class _Symbols:
    """Symbols in the sizes of parts that no input of the part has as a size: they are inputs of their own.

    Attributes:
        missing: by part, their names.
        names, values: by symbol, the Python name that it has in the code, and the symbolic integer.
        is_any_hidden: whether one is a size of no input of the whole either, so that nobody could read it.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], parts: Sequence[Outline]) -> None:
        self._placeholders = gm.graph.find_nodes(op="placeholder")
        self._places = places_of_symbols(inputs)
        is_symbolic = any(map(symbols_in, inputs))
        self.missing = {part: sorted(_missing(part)) if is_symbolic else [] for part in parts}
        wanted = {name for names in self.missing.values() for name in names}
        self.is_any_hidden = not wanted <= self._places.keys()
        self.names: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self._sizes: list[Size] = []
        for name in sorted(wanted & self._places.keys()):
            place, dim = self._places[name]
            tensor = _name(self._placeholders[place])
            self.names[name] = tensor if dim is None else f"size_of_{name}"
            self.values[name] = inputs[place] if dim is None else inputs[place].shape[dim]
            if dim is not None:
                self._sizes.append(Size(self.names[name], tensor, dim))

    def read(self) -> Sequence[Size]:
        """Those that are read of tensors."""
        return self._sizes


def _missing(part: Outline) -> frozenset[str]:
    values = [node.meta["val"] for node in part.inputs]
    used = frozenset[str]().union(*map(symbols_in, values))
    used = used.union(*(symbols_in(node.meta.get("val")) for node in part.calls))
    return used - places_of_symbols(values).keys()
