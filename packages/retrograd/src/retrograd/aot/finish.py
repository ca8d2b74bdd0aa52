"""The end of a call: inputs changed as the function changes them, outputs that share memory with them.

In: the inputs of a call and the values that the graph computed. Out: the function's flat outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd._torch.memory import with_view_origin
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

__all__ = ["Finish"]


class Finish:
    """What is left to do when the graph of `joint` has run: first `write`, as values come to be, then the outputs."""

    def __init__(self, joint: JointValues) -> None:
        self._joint = joint
        self._computed = (
            tuple(plan.value for plan in joint.outputs if isinstance(plan, ComputedOutput))
            if all(isinstance(plan, ComputedOutput) for plan in joint.outputs) and not joint.updates
            else None
        )
        self._new_leaves = [i for i, value in enumerate(joint.values) if value.requires_grad]
        self._written: dict[int, list[Update]] = {}
        for update in joint.updates:
            if update.value is not None:
                self._written.setdefault(update.value, []).append(update)
        unseen = [u for u in joint.updates if u.value is not None and joint.values[u.value].junction is None]
        self._at_once = [u for u in unseen if u.view is None and not joint.primals[u.primal].wrapping.cls]

    def __call__(self, sources: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The outputs."""
        for value in self._new_leaves:
            values[value].requires_grad_()
        if self._computed is not None:
            return [values[i] for i in self._computed]
        return [self._output(plan, sources, values) for plan in self._joint.outputs]

    def write_unseen(self, primals: Sequence[Any], values: list[Any]) -> None:
        """Make all changes that have no part in the autograd graph. Values that are written are the primals from then
        on."""
        if self._at_once:
            with torch.no_grad():
                torch._foreach_copy_(
                    [primals[u.primal] for u in self._at_once],
                    [values[u.value] for u in self._at_once],  # type: ignore[index]
                )
        for update in self._joint.updates:
            if update.value is None or self._joint.values[update.value].junction is None:
                if update not in self._at_once:
                    _apply(update, primals[update.primal], values)
                if update.value is not None:
                    values[update.value] = primals[update.primal]

    def write(self, value: int, primals: Sequence[Any], values: list[Any]) -> None:
        """Make the change that writes `value`, which has its history now."""
        for update in self._written.get(value, ()):
            _apply(update, primals[update.primal], values)
            values[value] = primals[update.primal]

    def _output(self, plan: OutputPlan, sources: Sequence[Any], values: Sequence[Any]) -> Any:
        match plan:
            case ComputedOutput(value):
                return values[value]
            case ConstantOutput(constant):
                return constant
            case SizeOutput(sizes):
                return torch.Size([_number(size, values) for size in sizes])
            case SameAs(source):
                return sources[source]
            case AliasOf(view, source, value):
                return _viewed(view, values[value] if source is None else sources[source], values)


def _apply(update: Update, primal: torch.Tensor, values: Sequence[Any]) -> None:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not update.unseen):
        if update.view is not None:
            size, stride, offset = _geometry(update.view, values)
            primal.as_strided_(size, stride, primal.storage_offset() + offset)
        if update.value is not None:
            primal.copy_(values[update.value])


def _viewed(view: View, base: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    """The view of a real tensor that the function made of the traced one."""
    if view.origin is not None:
        return with_view_origin(lambda: _strided(view, base, values), view.origin)
    return _strided(
        view, base if view.differentiable or not base.requires_grad else base.detach(), values
    )


def _strided(view: View, base: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    if view.replay is not None:
        made: torch.Tensor = view.replay(base)
        return made
    size, stride, offset = _geometry(view, values)
    return base.as_strided(size, stride, base.storage_offset() + offset)


def _geometry(view: View, values: Sequence[Any]) -> tuple[list[int], list[int], int]:
    """Sizes, strides and offset in this call."""
    size, stride = ([_number(n, values) for n in numbers] for numbers in (view.size, view.stride))
    return size, stride, _number(view.offset, values)


def _number(size: int | SizeValue, values: Sequence[Any]) -> int:
    return values[size.value] if isinstance(size, SizeValue) else size
