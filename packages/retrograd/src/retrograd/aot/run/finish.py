"""The end of a call: inputs changed as the function changes them, outputs that share memory with them.

In: the inputs of a call and the values that the graph computed. Out: the function's flat outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd._torch.trace import copy_each, with_view_origin
from retrograd.aot.run.call_values import picker
from retrograd.graph.joint_graph import (
    AliasOf,
    ComputedOutput,
    ConstantOutput,
    JointValues,
    OutputPlan,
    SameAs,
    SizeOutput,
    SizeValue,
    Update,
    View,
)


class Finish:
    """What is left to do when the graph of `joint` has run: first `write`, as values come to be, then the
    outputs.

    Works on the frame of a call (see `frame`), in which values begin at `first` and primals at 0.
    """

    def __init__(self, joint: JointValues, first: int) -> None:
        self._joint, self._first = joint, first
        self._computed = (
            picker([first + plan.value for plan in joint.outputs if isinstance(plan, ComputedOutput)])
            if all(isinstance(plan, ComputedOutput) for plan in joint.outputs) and not joint.updates
            else None
        )
        self._new_leaves = [first + i for i, value in enumerate(joint.values) if value.requires_grad]
        self._written: dict[int, list[Update]] = {}
        for update in joint.updates:
            if update.value is not None:
                self._written.setdefault(update.value, []).append(update)
        unseen = [u for u in joint.updates if u.value is not None and joint.values[u.value].boundary is None]
        self._at_once = [u for u in unseen if u.view is None and not joint.primals[u.primal].wrapping.cls]

    def __call__(self, sources: Sequence[Any], frame: list[Any]) -> Sequence[Any]:
        """The outputs."""
        for value in self._new_leaves:
            frame[value].requires_grad_()
        if self._computed is not None:
            return self._computed(frame)
        return [self._output(plan, sources, frame) for plan in self._joint.outputs]

    def write_unseen(self, frame: list[Any]) -> None:
        """Make all changes that have no part in the autograd graph. Values that are written are the primals
        from then on."""
        if self._at_once:
            with torch.no_grad():
                copy_each(
                    [frame[u.primal] for u in self._at_once],
                    [frame[self._first + u.value] for u in self._at_once],  # type: ignore[operator]
                )
        for update in self._joint.updates:
            if update.value is None or self._joint.values[update.value].boundary is None:
                if update not in self._at_once:
                    self._apply(update, frame)
                if update.value is not None:
                    frame[self._first + update.value] = frame[update.primal]

    def writes(self, value: int) -> bool:
        """Whether `value` is written into a primal."""
        return value in self._written

    def write(self, value: int, frame: list[Any]) -> None:
        """Make the change that writes `value`, which has its history now."""
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
            case AliasOf(view, source, value):
                if source is not None:
                    return self._viewed(view, sources[source], frame)
                assert value is not None
                return self._viewed(view, frame[self._first + value], frame)

    def _viewed(self, view: View, base: torch.Tensor, frame: Sequence[Any]) -> torch.Tensor:
        """The view of a real tensor that the function made of the traced one."""
        made = self._view(view, base, frame)
        return made.requires_grad_() if view.is_new_leaf else made

    def _view(self, view: View, base: torch.Tensor, frame: Sequence[Any]) -> torch.Tensor:
        if view.origin is not None:
            return with_view_origin(lambda: self._strided(view, base, frame), view.origin)
        seen = base if view.differentiable or not base.requires_grad else base.detach()
        return self._strided(view, seen, frame)

    def _strided(self, view: View, base: torch.Tensor, frame: Sequence[Any]) -> torch.Tensor:
        if view.replay is not None:
            made: torch.Tensor = view.replay(base)
            return made
        size, stride, offset = self._geometry(view, frame)
        return base.as_strided(size, stride, base.storage_offset() + offset)

    def _geometry(self, view: View, frame: Sequence[Any]) -> tuple[list[int], list[int], int]:
        """Sizes, strides and offset in this call."""
        size, stride = ([self._number(n, frame) for n in numbers] for numbers in (view.size, view.stride))
        return size, stride, self._number(view.offset, frame)

    def _number(self, size: int | SizeValue, frame: Sequence[Any]) -> int:
        return frame[self._first + size.value] if isinstance(size, SizeValue) else size
