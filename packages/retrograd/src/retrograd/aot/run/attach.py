"""Give the values of a call eager's history.

In: the frame of a call (see `call`). Out: the same frame, where differentiable values have a ``grad_fn``: a
`RegionNode`, whose backward runs the region's compiled graph.

A region's node is applied after those of the regions that take gradients from it, so that its sequence number
is lower. A leaf whose gradient must wait for its turn gets a *barrier*: an alias, made at its place in the
order, through which the engine passes when the turn has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd._torch.autograd import entry_of
from retrograd.aot.run.frame import Finish, Layout, picker
from retrograd.aot.run.region import RegionCode
from retrograd.graph.joint import BackwardStep, Destination
from retrograd.graph.joint_graph import JointValues, Partition


class RegionNode(torch.autograd.Function):
    """One node for one region. Its context keeps, besides the saved tensors, ``numbers`` (saved values that
    are not tensors) and ``again`` (what is needed to run the region as eager would). They are released
    together."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[..., Sequence[Any]],
        saved: tuple[torch.Tensor, ...],
        numbers: tuple[Any, ...],
        again: Any,
        values: tuple[torch.Tensor, ...],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Save, and hand out the values."""
        ctx.run, ctx.numbers, ctx.again = backward, numbers, again
        ctx.materialize_grads = False
        ctx.to_save = saved
        return values

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the region, which gets the context and the cotangents, and gives a gradient for each input."""
        return None, None, None, None, None, *ctx.run(ctx, cotangents)


#: called like ``RegionNode.apply``: with `RegionNode.forward`'s arguments after the context.
attach = entry_of(RegionNode)


Frame = list[Any]


class Attaching:
    """How the nodes of one function are attached, called with a frame and what is needed to run the call
    again.

    Args:
        partition: the function.
        regions: the code of each region.
        layout: of frames.
        finish: writes values into inputs as soon as they have their history.
    """

    def __init__(
        self, partition: Partition, regions: Sequence[RegionCode], layout: Layout, finish: Finish
    ) -> None:
        self._layout, self._finish = layout, finish
        #: places of the barriers, by region and destination, or by primal if all share one.
        self._barriers: dict[Any, int] = {}
        self._steps: list[Callable[[Frame, Any], None]] = []
        for step in steps_of(partition.joint)[::-1]:
            if step.is_leaf:
                for key in _barriers_of(partition.joint, step.index):
                    self._barriers[key] = layout.end + len(self._barriers)
                    self._steps.append(_barrier(step.index))
            else:
                self._steps.append(self._region(partition, step.index, regions[step.index]))

    def __call__(self, frame: Frame, again: Any) -> None:
        """Attach all regions."""
        for step in self._steps:
            step(frame, again)

    def _region(self, partition: Partition, number: int, code: RegionCode) -> Callable[[Frame, Any], None]:
        signature = partition.joint.signature
        region = signature.regions[number]
        value_of = [boundary.value for boundary in signature.boundaries]
        first = self._layout.values
        saved = [partition.saved[i] for i in partition.backwards[number].saved]
        tensors = [s for s in saved if not s.is_number]
        checked = partition.backwards[number].checked
        take_tensors = picker([self._layout.place_of(s) for s in (*tensors, *checked)])
        take_numbers = picker([self._layout.place_of(s) for s in saved if s.is_number])
        roots = [first + value_of[root] for root in region.roots]
        take_roots = picker(roots)
        take_inputs = picker(
            [
                first + value_of[there.index]
                if there.is_boundary
                else self._barriers.get((number, there), self._barriers.get(there.index, there.index))
                for there in region.destinations
            ]
        )
        written = [value_of[root] for root in region.roots if self._finish.writes(value_of[root])]

        def attach_region(frame: Frame, again: Any) -> None:
            fresh = tuple([value.detach() if value._is_view() else value for value in take_roots(frame)])
            attached = attach(
                code, take_tensors(frame), take_numbers(frame), again, fresh, *take_inputs(frame)
            )
            for place, value in zip(roots, attached, strict=True):
                frame[place] = value
            for root in written:
                self._finish.write(root, frame)

        return attach_region


def _barriers_of(joint: JointValues, primal: int) -> list[Any]:
    """What each barrier of a leaf is for; the one that runs last comes first. A barrier adds up what arrives
    at it, so contributions that must stay apart have one barrier each."""
    if not joint.sums_apart:
        return [primal]
    regions = enumerate(joint.signature.regions)
    keys = [(number, there) for number, region in regions for there in region.destinations]
    return [key for key in keys if key[1].index == primal and not key[1].is_boundary][::-1]


def _barrier(primal: int) -> Callable[[Frame, Any], None]:
    def make_barrier(frame: Frame, again: Any) -> None:
        frame.append(frame[primal][...])

    return make_barrier


def steps_of(joint: JointValues) -> list[BackwardStep]:
    """What to make: regions, and barriers of leaves whose gradients have to wait for their turn, in eager's
    order.

    The engine hands gradients to leaves before anything else, in the order of the region's inputs. That is
    certain of two of them only: leaves are equal in its heap, and a heap keeps no order among more. So one
    needs no barrier if it is the first after the only region that makes its gradient, or the second and a
    later input.
    """
    signature = joint.signature
    made_by = Counter(
        there.index for region in signature.regions for there in region.destinations if not there.is_boundary
    )
    steps: list[BackwardStep] = []
    inputs: tuple[Destination, ...] = ()
    #: since the last region, places of leaves without a barrier; None after one with a barrier.
    free: list[int] | None = []
    for step in signature.order:
        leaf = Destination(step.index)
        if not step.is_leaf:
            steps.append(step)
            inputs, free = signature.regions[step.index].destinations, []
        elif joint.primals[step.index].is_leaf:
            is_own = leaf in inputs and made_by[step.index] == 1
            if (
                is_own
                and free is not None
                and (not free or (len(free) == 1 and inputs.index(leaf) > free[0]))
            ):
                free.append(inputs.index(leaf))
            else:
                steps.append(step)
                free = None
    return steps
