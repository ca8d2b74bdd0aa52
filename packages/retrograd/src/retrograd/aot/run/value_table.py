"""The values of one call: their indices, and the epilogue that turns them into outputs.

In: a partition. Out: `FrameLayout`, the indices in the call's one list of values, its *frame*; pickers,
functions that take values from a frame at indices decided before the first call; and `Epilogue`, which
mutates inputs as the function does and returns the function's flat outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter, not_
from typing import Any

import torch

from retrograd.graph.joint_graph import (
    AliasOf,
    ComputedOutput,
    ConstantOutput,
    JointValues,
    OutputPlan,
    Partition,
    SameAs,
    Saved,
    SavedKind,
    SizeOutput,
    SizeValue,
    Update,
    View,
)
from retrograd.runtime import pytree
from retrograd.runtime.subclass import PLAIN
from retrograd.runtime.tensor import by_dtype, copy_each, set_versions, with_view_origin

Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


class FrameLayout:
    """Where each kind of value begins in a frame of `partition`. Primals come first.

    Attributes:
        is_plain: True if there are no wrapper subclasses. Primals are then their own parts.
        is_separate: True if values are stored separately from the graph's results. This is so if there are
            wrapper subclasses, or if values are written into primals and replaced by them.
        parts: the graph's inputs.
        results: the graph's results.
        values: forward values of the joint graph. They get their history during the call.
        end: one past the last value.
        plain_values: by index among the results, the value that the result is.
    """

    def __init__(self, partition: Partition) -> None:
        joint = partition.joint
        wrappings = [primal.wrapping for primal in joint.primals] + [value.wrapping for value in joint.values]
        self.is_plain = all(wrapping is PLAIN for wrapping in wrappings)
        forward: Sequence[Any] = joint.signature.outputs[: joint.signature.forward_count]
        kept = sum(saved.kind is SavedKind.INTERMEDIATE for saved in partition.saved)
        self.parts = 0 if self.is_plain else len(joint.primals)
        self.results = self.parts + sum(primal.wrapping.count for primal in joint.primals)
        self.is_separate = bool(joint.updates) or not self.is_plain
        behind = self.results + len(forward) + kept
        self.values = behind if self.is_separate else self.results
        self.end = behind + len(joint.values) if self.is_separate else behind
        plain = (place for place, role in enumerate(forward) if joint.values[role.index].wrapping is PLAIN)
        self.plain_values: dict[int, int] = {place: forward[place].index for place in plain}

    def place_of(self, saved: Saved) -> int:
        """The index of a saved value. If eager saves it too, we save its current state: it may have been
        written into a primal, and have its history."""
        if saved.kind is SavedKind.PRIMAL:
            return self.parts + saved.place
        if saved.by_eager and saved.place in self.plain_values:
            return self.values + self.plain_values[saved.place]
        return self.results + saved.place

    def wrapper_of(self, saved: Saved, joint: JointValues) -> tuple[int, ...]:
        """The index of the wrapper subclass whose part is saved, if eager saves it too. The wrapper counts
        in-place changes; its parts do not."""
        if self.is_plain or not saved.by_eager or saved.kind is SavedKind.INTERMEDIATE:
            return ()
        if saved.kind is SavedKind.PRIMAL:
            number = joint.signature.inputs[saved.place].index  # type: ignore[union-attr]
            return (number,) if joint.primals[number].wrapping is not PLAIN else ()
        value: Any = joint.signature.outputs[saved.place]
        return (self.values + value.index,) if saved.place not in self.plain_values else ()


def picker(places: Sequence[int]) -> Picker:
    """A function that takes the values at `places` from a frame."""
    if not places:
        return lambda frame: ()
    if len(places) == 1:
        place = places[0]
        return lambda frame: (frame[place],)
    return itemgetter(*places)


def rebuilder(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """A ``tree_unflatten`` for `spec`. It does not walk the tree of one tensor, or a flat tuple or list."""
    if spec.is_leaf():
        return lambda values: values[0]
    if spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        made: Callable[[Sequence[Any]], Any] = spec.type
        return made
    return lambda values: pytree.tree_unflatten(values, spec)


class Epilogue:
    """What a call does after the graph of `joint` has run: `write` values into inputs once they have their
    history, then return the outputs.

    Works on the call's frame, in which primals begin at 0 and values at `first`. The graph has already
    written the primals in `written`.
    """

    def __init__(self, joint: JointValues, first: int, written: Collection[int] = ()) -> None:
        self._first = first
        self._computed = (
            picker([first + plan.value for plan in joint.outputs if isinstance(plan, ComputedOutput)])
            if all(isinstance(plan, ComputedOutput) for plan in joint.outputs) and not joint.updates
            else None
        )
        plans = list({id(plan): plan for plan in joint.outputs}.values())
        self._plans = plans
        self._places = [next(i for i, one in enumerate(plans) if one is plan) for plan in joint.outputs]
        self._new_leaves = [first + i for i, value in enumerate(joint.values) if value.requires_grad]
        self._written: dict[int, list[Update]] = {}
        for update in joint.updates:
            if update.value is not None:
                self._written.setdefault(update.value, []).append(update)
        values, primals = joint.values, joint.primals
        unseen = [u for u in joint.updates if u.value is None or values[u.value].boundary is None]
        left = [u for u in unseen if u.primal not in written]
        copies = [u.value is not None and u.view is None and not primals[u.primal].wrapping.cls for u in left]
        self._at_once = list(compress(left, copies))
        self._one_by_one = list(compress(left, map(not_, copies)))
        #: indices of values that the primals replace, and of these primals.
        self._rebound = [(first + u.value, u.primal) for u in unseen if u.value is not None]
        grouped = by_dtype([joint.primals[u.primal].fake for u in self._at_once])
        #: for each batched copy, the indices of its targets and of its sources.
        self._grouped = [
            (
                picker([self._at_once[i].primal for i in group]),
                picker([first + self._at_once[i].value for i in group]),  # type: ignore[operator]
            )
            for group in grouped
        ]
        self._uncounted = [(u.primal, u.uncounted) for u in self._at_once if u.uncounted]
        updated = {update.value for update in joint.updates}
        #: fresh values that eager changes in place: their indices, and how often.
        self._changed_fresh = [
            (first + i, value.version)
            for i, value in enumerate(joint.values)
            if value.version and value.is_visible and i not in updated
        ]
        self.begins = bool(joint.updates or self._changed_fresh)

    def __call__(self, sources: Sequence[Any], frame: list[Any]) -> Sequence[Any]:
        """The flat outputs."""
        for value in self._new_leaves:
            frame[value].requires_grad_()
        if self._computed is not None:
            return self._computed(frame)
        outputs = [self._output(plan, sources, frame) for plan in self._plans]
        return outputs if len(outputs) == len(self._places) else [outputs[i] for i in self._places]

    def begin(self, frame: list[Any]) -> None:
        """Make all changes that autograd does not see. The primals then replace the written values in the
        frame. Version counters of fresh values are set to eager's."""
        if self._changed_fresh:
            set_versions([frame[i] for i, _ in self._changed_fresh], [n for _, n in self._changed_fresh])
        if self._at_once:
            with torch.no_grad():
                for targets, sources in self._grouped:
                    copy_each(targets(frame), sources(frame))
            if self._uncounted:
                changed = [frame[place] for place, _ in self._uncounted]
                more = [by for _, by in self._uncounted]
                set_versions(changed, [t._version + by for t, by in zip(changed, more, strict=True)])
        for update in self._one_by_one:
            self._apply(update, frame)
        for value, primal in self._rebound:
            frame[value] = frame[primal]

    def writes(self, value: int) -> bool:
        """Whether `value` is written into a primal."""
        return value in self._written

    def write(self, value: int, frame: list[Any]) -> None:
        """Write `value`, which has its history now, into its primals."""
        for update in self._written[value]:
            self._apply(update, frame)
            frame[self._first + value] = frame[update.primal]

    def _apply(self, update: Update, frame: list[Any]) -> None:
        primal: torch.Tensor = frame[update.primal]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not update.unseen):
            if update.view is not None:
                size, stride, offset = self._geometry(update.view, frame)
                primal.as_strided_(size, stride, primal.storage_offset() + offset)
            if update.value is not None:
                primal.copy_(frame[self._first + update.value])
        if update.uncounted:
            set_versions([primal], [primal._version + update.uncounted])

    def _output(self, plan: OutputPlan, sources: Sequence[Any], frame: Sequence[Any]) -> Any:
        match plan:
            case ComputedOutput(value):
                return frame[self._first + value]
            case ConstantOutput(constant):
                return constant
            case SizeOutput(sizes):
                return torch.Size([self._number(size, frame) for size in sizes])
            case SameAs(source):
                return sources[source]
            case AliasOf(view, source, value, made):
                if made is not None:
                    return frame[self._first + made]
                if source is not None:
                    return self.viewed(view, sources[source], frame)
                assert value is not None
                return self.viewed(view, frame[self._first + value], frame)

    def viewed(self, view: View, base: torch.Tensor, frame: Sequence[Any]) -> torch.Tensor:
        """The view of `base` that the function made of the traced tensor."""
        seen = base if view.differentiable or not base.requires_grad else base.detach()
        make = partial(self._strided, view, seen, frame)
        made = make() if view.origin is None else with_view_origin(make, view.origin)
        made = made.detach() if view.is_detached else made
        return made.requires_grad_() if view.is_new_leaf else made

    def _strided(self, view: View, base: torch.Tensor, frame: Sequence[Any]) -> torch.Tensor:
        if view.replay is not None:
            numbers = iter([self._number(number, frame) for number in view.numbers])
            made: torch.Tensor = view.replay(base, (lambda _: next(numbers)) if view.numbers else None)
            return made
        size, stride, offset = self._geometry(view, frame)
        return base.as_strided(size, stride, base.storage_offset() + offset)

    def _geometry(self, view: View, frame: Sequence[Any]) -> tuple[list[int], list[int], int]:
        """The view's sizes, strides and offset in this call."""
        size, stride = ([self._number(n, frame) for n in numbers] for numbers in (view.size, view.stride))
        return size, stride, self._number(view.offset, frame)

    def _number(self, size: int | SizeValue, frame: Sequence[Any]) -> int:
        return frame[self._first + size.value] if isinstance(size, SizeValue) else size
