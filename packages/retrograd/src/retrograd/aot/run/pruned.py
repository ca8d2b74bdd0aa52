"""Computes only the gradients that a backward requests.

In: the backward graph of a region, and which of its gradients are requested. Out: *pruned* graphs, without
the calls that only other gradients need.

``autograd.grad`` and ``backward(inputs=...)`` request some of the gradients. The zero-bubble schedules of
torch's pipelines make two such requests after one forward: first the inputs' gradients, with a retained
graph, later the weights' gradients, for the same cotangents. In eager nothing is computed twice, because
torch stores the cotangents of eager's nodes in between. A region is a single node, so we store them:

- The graph that runs first also returns *carried* values: those that it computes and other gradients need.
  They depend on a cotangent, or a checkpoint recomputes them. Any other value that both graphs read is
  recomputed, as the partition has chosen: storing it would take more memory than eager does.
- A `CarriedValues` on the node's context holds them. A later graph reads them if its cotangents are the same
  tensors, unchanged, and so is what a checkpoint reads. Otherwise it computes everything itself. The second
  half of torch's pipelines also reads them if a cotangent has changed. In eager it starts from gradients that
  the first half has stored, so the new elements only count where eager stores the cotangent itself.
- Carried values are dropped when they are read, when the autograd graph is released, and when a cotangent is
  freed. If nothing reads them, as in a program that computes a Jacobian row by row, we soon stop returning
  them.

A graph with effects is never pruned. A graph with collectives carries nothing, because all ranks must start
the same collectives.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from retrograd.aot.extraction import copied_call, extract, is_backward, is_recomputed, needed_between
from retrograd.engine import AsSaved, checkpoint_is_valid, versions_of, will_run
from retrograd.graph.aliases import memory_owners
from retrograd.graph.fx import (
    arguments_of,
    depends_on_data,
    has_effect,
    is_collective,
    is_operator_overload,
    lazy_graph,
)
from retrograd.graph.joint import output_values
from retrograd.graph.joint_graph import Partition
from retrograd.graph.lazy import LazyGraph
from retrograd.graph.reach import bits_reaching, reached
from retrograd.policy import MOST_UNREAD
from retrograd.process import cached_property
from retrograd.runtime.subclass import is_wrapper

#: the module whose hooks store cotangents in the first half of a split backward.
_PIPELINES = "torch.distributed.pipelining._backward"

#: for each gradient of a region, whether it is requested.
Requested = tuple[bool, ...]


def requested(ctx: Any) -> Requested | None:
    """Which gradients the running backward requests from the node `ctx`; None if it requests all."""
    if checkpoint_is_valid():  # the same condition: the backward goes to all leaves
        return None
    wanted = tuple(will_run(ctx))
    return None if all(wanted) else wanted


class PrunedGraphs:
    """The pruned graphs of one backward graph.

    Args:
        graph: the complete graph.
        saved: the number of its inputs before the cotangents.
        counts: for each gradient, its number of outputs; 0 if it is always undefined.
    """

    def __init__(self, graph: LazyGraph, saved: int, counts: Sequence[int]) -> None:
        self._graph, self._saved, self._counts = graph, saved, counts
        self._carried: dict[Requested, list[fx.Node]] = {}
        #: how often in a row nothing read what the graph for these gradients carried.
        self.unread = Counter[Requested]()

    @cached_property
    def can_be_pruned(self) -> bool:
        """Whether we may leave out calls whose values are not needed."""
        graph = self._graph.gm.graph
        is_known = sum(self._counts) == len(output_values(graph))  # a subclass's sizes may be outputs too
        return is_known and not any(has_effect(node) or depends_on_data(node) for node in graph.nodes)

    @cached_property
    def _can_carry(self) -> bool:
        return not any(map(is_collective, self._graph.gm.graph.nodes))

    def carried(self, first: Requested) -> Sequence[str]:
        """The names of the values that the graph for `first` should return for the other gradients."""
        if not self._can_carry or self.unread[first] >= MOST_UNREAD:
            return ()
        if first not in self._carried:
            self._carried[first] = self._find_carried(first)
        return [node.name for node in self._carried[first]]

    def _find_carried(self, first: Requested) -> list[fx.Node]:
        graph = self._graph.gm.graph
        inputs = graph.find_nodes(op="placeholder")
        computed = needed_between(inputs, self._outputs(first))
        computed |= {result for call in computed if not _has_mask(call) for result in _results_of(call)}
        depends = bits_reaching(graph, dict.fromkeys(inputs[self._saved :], 1))
        owners = memory_owners(graph.nodes)

        def is_carried(node: fx.Node) -> bool:
            if node not in computed or owners[node] != {node}:
                return False
            is_worth_it = bool(depends[node]) or is_recomputed(node)
            return is_worth_it and isinstance(node.meta.get("val"), torch.Tensor)

        def computed_from(node: fx.Node) -> list[fx.Node]:
            return [] if is_carried(node) else node.all_input_nodes

        others = self._outputs(tuple(not wanted for wanted in first))
        read = reached((value for value in others if isinstance(value, fx.Node)), computed_from)
        return [node for node in graph.nodes if node in read and is_carried(node)]

    def pruned(self, wanted: Requested, given: Sequence[str], returned: Sequence[str]) -> LazyGraph:
        """The graph that computes the gradients `wanted`.

        Args:
            wanted: the gradients.
            given: names of carried values, which become inputs after those of the complete graph.
            returned: names of carried values, which become results after the gradients.
        """
        gm, values = self._graph.gm, {node.name: node for node in self._graph.gm.graph.nodes}
        inputs, gradients = gm.graph.find_nodes(op="placeholder"), self._outputs(wanted)
        known, own = ([values[name] for name in names] for names in (given, returned))
        made = extract(gm, [*inputs, *known], [*gradients, *own], "backward_pruned")
        _narrow_masks(made.graph)
        owners = memory_owners(gm.graph.nodes)
        taken = {owner for value in gradients if isinstance(value, fx.Node) for owner in owners[value]}
        results = list(output_values(made.graph))
        for place, node in enumerate(own, len(gradients)):
            if not taken.isdisjoint(owners[node]):  # the user may change a gradient in place
                results[place] = copied_call(results[place])
        made.graph.output_node().args = (tuple(results),)
        made.recompile()
        return lazy_graph(made, [*self._graph.summary.inputs, *(node.meta["val"] for node in known)])

    def checked(self, wanted: Requested) -> set[str]:
        """The names of the inputs that eager reads or checks for the gradients `wanted`. A node of eager's
        that runs checks all that it has saved, also what only its other gradients need."""
        run = {n.meta.get("seq_nr") for n in needed_between((), self._outputs(wanted)) if is_backward(n)}
        nodes = [n for n in self._graph.gm.graph.nodes if is_backward(n) and n.meta.get("seq_nr") in run]
        return {node.name for node in needed_between((), nodes)}

    def _outputs(self, wanted: Requested) -> list[Any]:
        """The outputs of the complete graph that make up these gradients."""
        flags = [flag for flag, count in zip(wanted, self._counts, strict=True) for _ in range(count)]
        outputs = output_values(self._graph.gm.graph)
        return [value for value, flag in zip(outputs, flags, strict=True) if flag]


Cotangents = Sequence[torch.Tensor | None]


class CarriedValues:
    """The carried values of one call, which a later backward of the same node may read.

    Args:
        graphs, wanted: the graph that returns them.
        names: of the values.
        ctx: the node's context. If a tensor that it holds without a version check has changed, the values are
            not used.
        cotangents: those of the first backward. If one has changed, the values are not used, except by
            the second half of a split backward.

    Attributes:
        values: one sequence with all of them. Empty before the graph has run, and when they are no longer
            needed.
    """

    def __init__(
        self, graphs: PrunedGraphs, wanted: Requested, names: Sequence[str], ctx: Any, cotangents: Cotangents
    ) -> None:
        self.names, self.values, self._is_read = tuple(names), list[Any](), False
        self._graphs, self._wanted, self._is_split = graphs, wanted, _is_split(ctx)
        forget = partial(_clear, self.values)  # a method would make a reference cycle
        tensors, self._versions = self._now(ctx, cotangents)
        self._tensors = [None if tensor is None else weakref.ref(tensor, forget) for tensor in tensors]

    def _now(self, ctx: Any, cotangents: Cotangents) -> tuple[Cotangents, Sequence[int | None] | None]:
        """The tensors that must be the same ones later, and the versions that must be the same."""
        tensors = [*cotangents] if self._is_split else _with_inner(cotangents)
        read = _with_inner([value for value in ctx.numbers if isinstance(value, torch.Tensor)])
        return tensors, _versions(read if self._is_split else [*tensors, *read])

    def __del__(self) -> None:
        if not self._is_read:
            self._graphs.unread[self._wanted] += 1

    def take(
        self, graphs: PrunedGraphs, wanted: Requested, ctx: Any, cotangents: Cotangents
    ) -> Sequence[Any] | None:
        """The values, if the gradients `wanted` for these cotangents can be computed from them; else None."""
        before = [None if tensor is None else tensor() for tensor in self._tensors]
        tensors, versions = self._now(ctx, cotangents)
        if (
            graphs is not self._graphs
            or any(map(operator.and_, wanted, self._wanted))
            or len(before) != len(tensors)
            or any(map(operator.is_not, before, tensors))
            or versions is None
            or versions != self._versions
        ):
            return None
        try:
            values: Sequence[Any] = self.values.pop()  # all of them at once: two threads may run backwards
        except IndexError:
            return None
        self._is_read = True
        graphs.unread[self._wanted] = 0
        return values


def _clear(values: list[Any], cotangent: Any) -> None:
    values.clear()


def _with_inner(values: Cotangents) -> Cotangents:
    """The tensors, and after them those inside subclasses, at every level: each has its own version."""
    found: list[Any] = [*values]
    for value in found:  # grows while it is read
        if is_wrapper(value):
            inner = (getattr(value, name) for name in value.__tensor_flatten__()[0])
            found += [part for part in inner if isinstance(part, torch.Tensor)]
    return found


def _versions(values: Cotangents) -> Sequence[int | None] | None:
    """The versions of the tensors. None if one has no version, so that a change would go unnoticed."""
    versions = versions_of([value for value in values if value is not None])
    return None if None in versions else versions


def _is_split(ctx: Any) -> bool:
    """Whether torch's pipelines run the first half of a backward, and a hook stores the cotangents of the
    node `ctx`. They detach the results that lead to the node, so that only the second half reaches it."""
    handle = ctx.register_prehook(_clear)  # never called: only a handle shows a node's hooks
    hooks = handle.hooks_dict_ref() or {}
    handle.remove()
    return any(getattr(hook, "__module__", "") == _PIPELINES for hook in hooks.values())


class SavedTensors:
    """Reads what the calls of one region have saved.

    Args:
        partition: the partition.
        number: of the region.
        counts: as in `PrunedGraphs`.
    """

    def __init__(self, partition: Partition, number: int, counts: Sequence[int]) -> None:
        self._partition, self._number, self._counts = partition, number, counts
        self._unread: dict[Requested, list[int]] = {}

    def __call__(self, ctx: Any, wanted: Requested | None) -> Sequence[torch.Tensor]:
        """The saved tensors. Primals that eager does not check for the gradients `wanted` may have changed.

        Raises:
            RuntimeError: they were released, or one was changed in place.
        """
        try:
            return ctx.saved_tensors
        except RuntimeError:
            if wanted is None or ctx.replay_record is None:
                raise
        if wanted not in self._unread:
            self._unread[wanted] = self._find_unread(wanted)
        call, unread = ctx.replay_record, self._unread[wanted]
        with AsSaved([call.primals[n] for n in unread], [call.versions[n] for n in unread]):
            return ctx.saved_tensors

    def _find_unread(self, wanted: Requested) -> list[int]:
        """The primals whose memory only saved tensors share that the request does not read."""
        joint, backward = self._partition.joint, self._partition.backwards[self._number]
        owners = {node.name: found for node, found in memory_owners(joint.gm.graph.nodes).items()}
        read = PrunedGraphs(backward.graph, len(backward.saved), self._counts).checked(wanted)
        kept: dict[bool, set[fx.Node]] = {True: set(), False: set()}
        for i in backward.saved:
            name = self._partition.saved[i].name
            kept[name in read] |= owners.get(name, set())
        inputs = zip(joint.gm.graph.find_nodes(op="placeholder"), joint.signature.primals, strict=False)
        return [role.index for node, role in inputs if node in kept[False] - kept[True]]


def _results_of(call: fx.Node) -> list[fx.Node]:
    """The nodes that read single results of a call with several."""
    return [user for user in call.users if user.target is operator.getitem and user.args[0] is call]


def _has_mask(call: fx.Node) -> bool:
    return _mask_place(call) is not None


def _mask_place(call: fx.Node) -> int | None:
    """The position of the argument that says which results the call computes. None if it has no such
    argument, or if not all its users read single results."""
    if not is_operator_overload(call.target) or len(_results_of(call)) < len(call.users):
        return None
    names = [*arguments_of(call)]
    place = names.index("output_mask") if "output_mask" in names else len(call.args)
    return place if place < len(call.args) else None


def _narrow_masks(graph: fx.Graph) -> None:
    """Make each call of `graph` compute only the results that something reads, as eager does."""
    for call in graph.nodes:
        place = _mask_place(call)
        if place is not None:
            read = {result.args[1] for result in _results_of(call)}
            call.update_arg(place, [flag and i in read for i, flag in enumerate(call.args[place])])
            values = enumerate(call.meta["val"])
            call.meta["val"] = tuple([value if i in read else None for i, value in values])
