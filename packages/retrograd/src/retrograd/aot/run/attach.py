"""Attaches autograd nodes to the results of a compiled function.

In: a frame (see `aot.run.call`), and the order in which eager would run the regions and accumulate into
leaves. Out: the frame, whose values now have a history of one `RegionNode` per region. The engine runs
these nodes, and hands on gradients, in eager's order.

We create a region's node after the nodes of the regions that take gradients from it, so its sequence number
is lower. If only one region reaches a leaf, and the leaf's gradient comes right after that region, the leaf
takes its *turn* among the leaves of the region (see `engine.leaf_order`). Every other leaf whose gradient
must wait gets a *barrier*: an extra alias node, whose sequence number makes the engine reach the leaf at the
right time.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from retrograd.aot.run.region import RegionCode
from retrograd.aot.run.value_table import Epilogue, FrameLayout, Picker, picker
from retrograd.engine import (
    OrderedLeaves,
    entry_of,
    hooks_may_see_order,
    last_turn,
    order_is_visible,
    take_turns,
)
from retrograd.graph.joint import BackwardStep, Destination
from retrograd.graph.joint_graph import AliasOf, JointValues, Partition

#: leaves take turns if this many of them would otherwise need barriers; with fewer, turns do not pay.
FEWEST_TURNS = 6


class RegionNode(OrderedLeaves):
    """The autograd node of one region.

    Its context holds the saved tensors, ``replay_record`` (what we need to run the region in eager mode),
    ``carried`` (values for a later backward, see `aot.run.pruned`), ``results``, ``leaves`` (those that take
    turns) and ``numbers``. The record and the values are released with the saved tensors; ``numbers`` is not.
    It holds saved values that are not tensors, or all saved values if eager's nodes free nothing.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - all that a context holds
        ctx: Any,
        backward: Callable[..., Sequence[Any]],
        saved: tuple[torch.Tensor, ...],
        numbers: tuple[Any, ...],
        replay_record: Any,
        values: tuple[torch.Tensor, ...],
        turns: tuple[int, ...],
        leaves: tuple[torch.Tensor, ...],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Save what the backward needs, and return the values."""
        ctx.run, ctx.numbers, ctx.replay_record = backward, numbers, replay_record
        ctx.turns, ctx.leaves = turns, leaves
        ctx.meeting = ctx.carried = None
        ctx.results = [weakref.ref(value) for value in values]
        ctx.materialize_grads = False
        ctx.to_save = saved
        return values

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the region on the context and the cotangents. Returns a gradient for each input."""
        gradients = ctx.run(ctx, cotangents)
        if ctx.turns and order_is_visible(ctx.leaves):
            take_turns(ctx)
        return None, None, None, None, None, None, None, *gradients


#: called like ``RegionNode.apply``: with the arguments of `RegionNode.forward` after the context.
attach = entry_of(RegionNode)


Frame = list[Any]


class Attaching:
    """Attaches the nodes of one function. Called with a frame and the call's replay record."""

    def __init__(
        self, partition: Partition, regions: Sequence[RegionCode], layout: FrameLayout, finish: Epilogue
    ) -> None:
        self._layout, self._finish = layout, finish
        #: indices of the barriers in the frame, by region and destination; by primal if all share one.
        self._barriers: dict[Any, int] = {}
        self._steps: list[Callable[[Frame, Any], None]] = []
        order = Order(partition.joint)
        self._turns = order.turns
        for step in order.steps[::-1]:
            if step.is_leaf:
                for key in _barriers_of(partition.joint, step.index):
                    self._barriers[key] = layout.end + len(self._barriers)
                    if step.index in order.last:
                        add = partial(_add_last_turn, step.index, picker(order.last[step.index]))
                    else:
                        # a tensor class may not support aliases, but every parameter can be detached
                        is_node = partition.joint.primals[step.index].wrapping.cls is not None
                        add = partial(_add_barrier, step.index, is_node)
                    self._steps.append(add)
            else:
                self._steps.append(self._region(partition, step.index, regions[step.index]))

    def __call__(self, frame: Frame, replay_record: Any) -> None:
        """Attach all regions."""
        for step in self._steps:
            step(frame, replay_record)

    def _region(self, partition: Partition, number: int, code: RegionCode) -> Callable[[Frame, Any], None]:
        signature = partition.joint.signature
        region = signature.regions[number]
        value_of = [boundary.value for boundary in signature.boundaries]
        first = self._layout.values
        saved = [partition.saved[i] for i in partition.backwards[number].saved]
        held = [s for s in saved if s.is_unchecked or code.frees_nothing]
        tensors = [] if code.frees_nothing else [s for s in saved if not s.is_unchecked]
        checked = partition.backwards[number].checked
        versioned = *tensors, *checked
        wrappers = dict.fromkeys(w for s in versioned for w in self._layout.wrapper_of(s, partition.joint))
        take_tensors = picker([*map(self._layout.place_of, versioned), *wrappers])
        take_numbers = picker([self._layout.place_of(s) for s in held])
        roots = [first + value_of[root] for root in region.roots]
        take_roots = picker(roots)
        take_inputs = picker(
            [
                first + value_of[there.index] if there.is_boundary else self._place_of(number, there)
                for there in region.destinations
            ]
        )
        written = [value_of[root] for root in region.roots if self._finish.writes(value_of[root])]
        views = [self._view(partition.joint, number, value_of[root]) for root in region.roots]
        made = [view for view in views if view is not None]
        code_runs = len(made) < len(views)
        turns = self._turns.get(number, ())
        take_leaves = picker([region.destinations[turn].index for turn in turns])

        def attach_region(frame: Frame, replay_record: Any) -> None:
            if code_runs:
                attach_code(frame, replay_record)
            for make in made:
                make(frame)

        def attach_code(frame: Frame, replay_record: Any) -> None:
            fresh = tuple([value.detach() if value._is_view() else value for value in take_roots(frame)])
            numbers = take_numbers(frame)
            if code.frees_nothing:  # a result that holds itself is a reference cycle
                numbers = tuple([n.detach() if isinstance(n, torch.Tensor) else n for n in numbers])
            tensors, leaves, inputs = take_tensors(frame), take_leaves(frame), take_inputs(frame)
            attached = attach(code, tensors, numbers, replay_record, fresh, turns, leaves, *inputs)
            for place, value in zip(roots, attached, strict=True):
                frame[place] = value
            for root in written:
                self._finish.write(root, frame)

        return attach_region if made else attach_code

    def _view(self, joint: JointValues, region: int, value: int) -> Callable[[Frame], None] | None:
        """A function that makes the view for `value` from a real tensor with its history. None if `value` is
        not a view."""
        plan = next((p for p in joint.outputs if isinstance(p, AliasOf) and p.made == value), None)
        if plan is None:
            return None
        finish, view, place = self._finish, plan.view, self._layout.values + value
        if plan.value is not None:
            base = self._layout.values + plan.value
        else:
            base = next(i for i, primal in enumerate(joint.primals) if primal.leaf == plan.source)
            for there in joint.signature.regions[region].destinations[::-1]:
                if there.index == base and not there.is_boundary:
                    base = self._place_of(region, there)
                    break

        def make_view(frame: Frame) -> None:
            frame[place] = finish.viewed(view, frame[base], frame)

        return make_view

    def _place_of(self, region: int, there: Destination) -> int:
        """The index of the primal, or of its barrier."""
        return self._barriers.get((region, there), self._barriers.get(there.index, there.index))


def _barriers_of(joint: JointValues, primal: int) -> list[Any]:
    """The keys of a leaf's barriers; the barrier that runs last comes first. A barrier sums its gradients, so
    contributions that must not be summed early have one barrier each."""
    if not joint.options.separate_sums:
        return [primal]
    regions = enumerate(joint.signature.regions)
    keys = [(number, there) for number, region in regions for there in region.destinations]
    return [key for key in keys if key[1].index == primal and not key[1].is_boundary][::-1]


def _add_barrier(primal: int, is_node: bool, frame: Frame, replay_record: Any) -> None:
    frame.append(last_turn(frame[primal]) if is_node else frame[primal][...])


def _add_last_turn(primal: int, take_leaves: Picker, frame: Frame, replay_record: Any) -> None:
    is_visible = hooks_may_see_order(take_leaves(frame))
    frame.append(last_turn(frame[primal]) if is_visible else frame[primal])


class Order:
    """How we enforce eager's order for a captured function.

    The engine hands gradients to leaves before it runs other nodes. It follows the order of the region's
    inputs, but only for two leaves: they compare equal in its heap, and a heap is not stable for more. So a
    leaf needs no barrier if it takes its turn, or if it is the first leaf after the only region that makes
    its gradient, or the second leaf, and a later input than the first.

    Attributes:
        steps: the regions and leaf barriers to create, in eager's order.
        turns: by region, the indices among its destinations of the leaves that take turns, in order.
        last: by leaf with the last turn of a region, the leaves of that region that take turns. It has a
            barrier too, if hooks may see their order.
    """

    def __init__(self, joint: JointValues) -> None:
        signature = joint.signature
        made_by = Counter(
            there.index
            for region in signature.regions
            for there in region.destinations
            if not there.is_boundary
        )
        self.steps: list[BackwardStep] = []
        self.turns: dict[int, tuple[int, ...]] = {}
        self.last: dict[int, list[int]] = {}
        order = [step for step in signature.order if not step.is_leaf or joint.primals[step.index].is_leaf]
        while order:
            region, *order = order
            leaves = list(takewhile(lambda step: step.is_leaf, order))
            order = order[len(leaves) :]
            self.steps.append(region)
            if region.is_leaf:  # no region comes before it
                continue
            inputs = signature.regions[region.index].destinations
            places = {there.index: i for i, there in enumerate(inputs) if not there.is_boundary}
            own: list[int] = []
            for leaf in leaves:
                if leaf.index not in places or made_by[leaf.index] > 1:
                    break
                own.append(places[leaf.index])
            certain = 2 if own[:2] == sorted(own[:2]) else 1
            if len(own) - certain >= FEWEST_TURNS:
                self.turns[region.index] = tuple(own)
                certain = len(own) - 1
                self.last[inputs[own[-1]].index] = [inputs[place].index for place in own]
            self.steps += leaves[min(certain, len(own)) :]
