"""Trace a segment to ATen under fake tensors. No Dynamo, no AOTAutograd.

In: a boxed function, the values that it is called with, and which sizes are to be symbolic. Out: a `Traced`
graph that mutates nothing, its fake inputs and the shape environment with the guards that tracing left there;
in grad mode also the `History` that eager's autograd would record: which outputs are differentiable and with
respect to what, and what eager would have saved for their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from retrograd._torch.fx import is_mutating, is_random
from retrograd._torch.state import autocast_off
from retrograd._torch.tensor import storage_of
from retrograd._torch.trace.fakes import fake_of, is_fake, new_fake_mode, symbolic_integer, why_not_fakeable
from retrograd._torch.trace.graph_tracer import Decompositions, make_graph, quiet_fakes, saved_tensors_unseen
from retrograd.errors import Refusal
from retrograd.graph.emit import Boxed
from retrograd.graph.reach import reached


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
        return frozenset(reached([root], lambda node: [n for n, _ in node.next_functions if n is not None]))

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


@dataclass(frozen=True)
class Traced:
    """A traced segment.

    Attributes:
        gm: the functional ATen graph; returns a tuple of the outputs that are not None.
        example_inputs: fake tensors and symbolic integers, one per value of `fed`.
        fed: positions of the arguments that the graph takes.
        given: for each output of the segment, its position in the graph's result, or None.
        shape_env: has the guards; None when every size is static.
        history: what eager's autograd would record; None outside of grad mode.
    """

    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    shape_env: ShapeEnv | None
    history: History | None = None


def is_batched(value: Any) -> bool:
    """Whether the value is a tensor of torch's older vmap, which ``is_grads_batched`` uses."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def trace(
    fn: Boxed,
    args: Sequence[Any],
    symbolic: Mapping[int, frozenset[int]] | None,
    decompositions: Decompositions,
) -> Traced:
    """Trace `fn`, in grad mode if that is on.

    Args:
        fn: runs the segment on a list of values.
        args: the values; None for undefined gradients.
        symbolic: for each argument, which dimensions are symbolic (dimension 0 of an int is its value);
            None to make every size static.
        decompositions: applied while tracing.
    """
    if reason := next(filter(None, map(_why_not_traceable, args)), None):
        raise Refusal("not-traceable", reason)
    mode = new_fake_mode(symbolic is not None)
    fakes = _fakes(mode, args, symbolic or {})
    fed = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, (torch.Tensor, torch.SymInt)))
    given: list[int | None] = []

    def flat(*inputs: Any) -> tuple[Any, ...]:
        results = _called(fn, args, fed, inputs)
        present = [result for result in results if result is not None]
        count = iter(range(len(present)))
        given[:] = [None if result is None else next(count) for result in results]
        return tuple(present)

    example_inputs = tuple(fakes[i] for i in fed)
    with enable_python_dispatcher(), quiet_fakes():
        history = history_of(fn, fakes) if torch.is_grad_enabled() else None
    gm = _functional_graph(flat, example_inputs, decompositions)
    if history is not None and (drawn := next(filter(is_random, gm.graph.nodes), None)):
        raise Refusal(
            "not-traceable", f"{drawn.target} draws random numbers, which its derivative would draw anew"
        )
    return Traced(gm, example_inputs, fed, tuple(given), mode.shape_env, history)


def arguments_read(fn: Boxed, args: Sequence[Any]) -> frozenset[int]:
    """Positions of the tensors whose values `fn`, differentiated or not, reads."""
    fakes = _fakes(new_fake_mode(False), args, {})
    fed = [i for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)]

    def flat(*inputs: Any) -> tuple[Any, ...]:
        return tuple(result for result in _called(fn, args, fed, inputs) if result is not None)

    read: set[int] = set()
    for grad_mode in (False, True):
        with torch.set_grad_enabled(grad_mode):
            gm = _graph(flat, [fakes[i] for i in fed], {})
        read.update(
            i for i, node in zip(fed, gm.graph.find_nodes(op="placeholder"), strict=True) if node.users
        )
    return frozenset(read)


def decomposed(
    gm: fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode, table: Decompositions
) -> fx.GraphModule:
    """`gm` traced again with decompositions."""
    with torch.no_grad(), autocast_off(), fake_mode:
        return _graph(gm, inputs, table)


def _why_not_traceable(value: Any) -> str | None:
    """Why a segment with this input has to be interpreted; None if it can be traced."""
    if isinstance(value, torch.Tensor):
        return "tensor subclass FakeTensor" if is_fake(value) else why_not_fakeable(value)
    return None if value is None or isinstance(value, (int, float)) else f"{type(value).__name__} argument"


def _called(fn: Boxed, args: Sequence[Any], fed: Sequence[int], inputs: Sequence[Any]) -> Sequence[Any]:
    """What `fn` gives for `args`, with `inputs` in the places `fed`."""
    values = dict(zip(fed, inputs, strict=True))
    return fn([values.get(i, value) for i, value in enumerate(args)])


def _functional_graph(
    fn: Callable[..., Any], inputs: Sequence[Any], decompositions: Decompositions
) -> fx.GraphModule:
    """Trace as it is; if the graph mutates, functionalise the graph. (Not the function: functionalisation
    would hide from it which of its arguments require grad, and would meet tensor subclasses.)"""
    gm = _graph(fn, inputs, decompositions)
    if any(map(is_mutating, gm.graph.nodes)):
        with torch.no_grad():
            mutating = gm
            functional = torch.func.functionalize(lambda *args: mutating(*args), remove="mutations")
            gm = _graph(functional, inputs, decompositions)
    if left := next(filter(is_mutating, gm.graph.nodes), None):
        raise Refusal("not-traceable", f"{left.target} changes one of the segment's inputs in place")
    return gm


def _graph(fn: Callable[..., Any], inputs: Sequence[Any], decompositions: Decompositions) -> fx.GraphModule:
    def body(tracer: Any) -> Sequence[Any]:
        for i, value in enumerate(inputs):
            tracer.placeholder(f"arg{i}_1", value)
        results: Sequence[Any] = fn(*inputs)
        return results

    gm = make_graph(body, decompositions)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _fakes(mode: FakeTensorMode, values: Sequence[Any], symbolic: Mapping[int, frozenset[int]]) -> list[Any]:
    """One fake per value; the same tensor twice gives the same fake; None and static numbers stay."""
    seen: dict[int, Any] = {}

    def fake(index: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                made = fake_of(mode, value, f"t{index}", symbolic.get(index, ()))
                # Some formulas ask their saved tensors (linalg.solve: which gradients are wanted).
                seen[id(value)] = made.requires_grad_(value.requires_grad)
            return seen[id(value)]
        if type(value) is int and symbolic.get(index):
            return symbolic_integer(mode, value, f"t{index}")
        return value

    return [fake(index, value) for index, value in enumerate(values)]
