"""What eager's autograd would record while a function runs in grad mode, found on fake tensors.

In: a boxed function and its arguments, fakes that require grad where the real ones do. Out: `History`: which
outputs are differentiable and with respect to what, and what eager would have saved for their derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from retrograd._torch.tensor import storage_of
from retrograd.errors import Refusal
from retrograd.graph.emit import Boxed


@dataclass(frozen=True)
class Part:
    """Outputs that eager differentiates together: whoever frees one's saved tensors frees the others'.

    Attributes:
        outputs: in the order in which eager reaches them in a backward.
        inputs: arguments that require grad and on which they depend; of equal tensors the first.
        saved: arguments that eager saves, itself or a view of it.
    """

    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    saved: frozenset[int]


@dataclass(frozen=True)
class History:
    """What a call in grad mode leaves behind.

    Attributes:
        identical: outputs that are an argument, with its position.
        parts: in the order in which eager made their nodes.
        leaves: arguments whose gradients are wanted, in the reverse of the order in which eager's backward
            makes the last contribution to each.
    """

    identical: dict[int, int]
    parts: tuple[Part, ...]
    leaves: tuple[int, ...]


def history_of(fn: Boxed, fakes: Sequence[Any]) -> History:
    """Run `fn` on `fakes` in grad mode and read the autograd graph.

    Raises:
        Refusal: an output is a view of an argument, or of another output.
    """
    with torch.enable_grad(), saved_tensors_unseen():
        results = list(fn(list(fakes)))
    first = {id(fake): i for i, fake in reversed(list(enumerate(fakes))) if isinstance(fake, torch.Tensor)}
    identical = {o: first[id(result)] for o, result in enumerate(results) if id(result) in first}
    _refuse_shared_memory(fakes, results, identical)
    graph = _Graph({id(fakes[i]): i for i in first.values() if fakes[i].requires_grad})
    new = [
        o
        for o, result in enumerate(results)
        if o not in identical and isinstance(result, torch.Tensor) and result.requires_grad
    ]
    reached = {o: graph.below(results[o].grad_fn) for o in new}
    storages = {storage_of(fakes[i]): i for i in sorted(first.values(), reverse=True)}
    parts = [_part(group, results, reached, graph, storages, fakes) for group in _groups(new, reached, graph)]
    parts.sort(key=lambda part: max(results[o].grad_fn._sequence_nr() for o in part.outputs))
    return History(identical, tuple(parts), graph.leaves(reached.values()))


class _Graph:
    """The autograd graph above some leaves."""

    def __init__(self, leaves: dict[int, int]) -> None:
        self._leaves = leaves
        self._saved: dict[Any, tuple[torch.Tensor, ...]] = {}

    def below(self, root: Any) -> frozenset[Any]:
        """The nodes that a backward from `root` reaches."""
        seen, stack = {root}, [root]
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    stack.append(node)
        return frozenset(seen)

    def saved(self, node: Any) -> tuple[torch.Tensor, ...]:
        """The tensors that `node` saves."""
        if node not in self._saved:
            values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else [value])]
            self._saved[node] = tuple(v for v in flat if isinstance(v, torch.Tensor))
        return self._saved[node]

    def leaf(self, node: Any) -> int | None:
        """The argument into which `node` accumulates; None for other nodes."""
        variable = getattr(node, "variable", None)
        return None if variable is None else self._leaves.get(id(variable))

    def leaves(self, reached: Any) -> tuple[int, ...]:
        """The arguments, by the lowest sequence number among the nodes that contribute to each."""
        last: dict[int, int] = {}
        for node in frozenset[Any]().union(*reached):
            for below, _ in node.next_functions:
                leaf = None if below is None else self.leaf(below)
                if leaf is not None:
                    last[leaf] = min(last.get(leaf, node._sequence_nr()), node._sequence_nr())
        return tuple(sorted(last, key=last.__getitem__))


def _groups(outputs: list[int], reached: dict[int, frozenset[Any]], graph: _Graph) -> list[list[int]]:
    """Outputs that share a node that saves something, however indirectly."""
    groups: list[tuple[set[int], set[Any]]] = []
    for output in outputs:
        members, nodes = {output}, {node for node in reached[output] if graph.saved(node)}
        apart = []
        for group in groups:
            if group[1].isdisjoint(nodes):
                apart.append(group)
            else:
                members |= group[0]
                nodes |= group[1]
        groups = [*apart, (members, nodes)]
    return [sorted(members) for members, _ in groups]


def _part(
    outputs: list[int],
    results: Sequence[Any],
    reached: dict[int, frozenset[Any]],
    graph: _Graph,
    storages: dict[int, int],
    fakes: Sequence[Any],
) -> Part:
    nodes = frozenset[Any]().union(*(reached[o] for o in outputs))
    leaves = {leaf for node in nodes if (leaf := graph.leaf(node)) is not None}
    saved = {storage_of(tensor) for node in nodes for tensor in graph.saved(node)} & storages.keys()
    return Part(
        tuple(sorted(outputs, key=lambda o: (-results[o].grad_fn._sequence_nr(), results[o].output_nr))),
        tuple(sorted(leaves)),
        frozenset(
            i for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor) and storage_of(fake) in saved
        ),
    )


def _refuse_shared_memory(fakes: Sequence[Any], results: Sequence[Any], identical: dict[int, int]) -> None:
    owners = {
        storage_of(fake): f"argument {i}" for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)
    }
    for o, result in enumerate(results):
        if isinstance(result, torch.Tensor) and o not in identical:
            if owner := owners.get(storage_of(result)):
                raise Refusal("no-history", f"in grad mode, output {o} shares the memory of {owner}")
            owners[storage_of(result)] = f"output {o}"


@contextmanager
def saved_tensors_unseen() -> Iterator[None]:
    """Graphs made in this block are our own: the user's saved-tensor hooks do not see them."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield
