"""fired: which graph passes of a compiler did something.

In: nothing. Out: a Counter of passes, while the context is open: every pass that torch runs under a
`GraphTransformObserver` (all of Inductor's) and that left the graph otherwise than it found it. Programs that
make many passes fire test more of a compiler; a generator is steered by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.passes.graph_transform_observer import GraphTransformObserver


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts until the block ends. Not for two threads at once."""
    counts: Counter[str] = Counter()
    enter, leave = GraphTransformObserver.__enter__, GraphTransformObserver.__exit__
    before: dict[int, int] = {}

    def entered(self: GraphTransformObserver) -> GraphTransformObserver:
        before[id(self)] = _form(self.gm)
        return enter(self)

    def left(self: GraphTransformObserver, *error: Any) -> None:
        if before.pop(id(self), None) not in (None, _form(self.gm)):
            counts[self.passname] += 1
        leave(self, *error)

    GraphTransformObserver.__enter__, GraphTransformObserver.__exit__ = entered, left  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        GraphTransformObserver.__enter__, GraphTransformObserver.__exit__ = enter, leave  # type: ignore[method-assign]


def _form(module: Any) -> int:
    """The graph's operators and edges as one number."""
    nodes = module.graph.nodes
    return hash(tuple((node.op, str(node.target), tuple(map(str, node.all_input_nodes))) for node in nodes))
