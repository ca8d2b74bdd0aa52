"""Run a captured step on real tensors.

In: a `StepGraph` with compiled code, and the flat arguments of a call. Out: what the step returns; parameters,
buffers, the states of optimizers and ``.grad`` are as the step leaves them eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd._torch import pytree
from retrograd._torch.ambient import undifferentiated
from retrograd._torch.guards import InputGuard, changed_sizes
from retrograd.step.plan import Argument, GradOf, Held, Number, Result, StepGraph
from retrograd.step.spent import spent

__all__ = ["CompiledStepGraph"]


class CompiledStepGraph:
    """A step that can be run.

    Args:
        step: the graph. code: runs it, boxed. values: the inputs that it was captured for.
    """

    def __init__(self, step: StepGraph, code: Callable[[list[Any]], Sequence[Any]], values: list[Any]) -> None:
        self._step = step
        self._code = undifferentiated(code)
        self._arguments = [(i, s.place) for i, s in enumerate(step.sources) if isinstance(s, Argument)]
        self._guard = InputGuard(values, range(len(values)), list(step.examples), step.shape_env)

    def values(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The graph's inputs for a call; None if the graph is not for this call."""
        values = self.gathered(leaves)
        if values is None or not self._guard.check(values):
            return None
        return values

    def gathered(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The graph's inputs, whatever they are like; None if gradients are there that were not, or lack."""
        values = gathered(self._step, leaves)
        if values is None:
            return None
        for i in self._step.lacking:
            if values[i].grad is not None:
                return None
        return values

    def why_not(self, leaves: Sequence[Any]) -> str:
        """Why `values` gives None."""
        values = self.gathered(leaves)
        return "a gradient is there that was not, or lacks" if values is None else self._guard.why_not(values)

    def changed(self, values: Sequence[Any]) -> dict[int, frozenset[int]]:
        """By place of an argument, the dimensions that are not what they were."""
        changed = changed_sizes(self._guard.args_metadata, values)
        return {place: changed[i] for i, place in self._arguments if i in changed}

    def compute(self, values: list[Any]) -> Sequence[Any]:
        """The outputs of the graph. If it raises, nothing has been written."""
        return self._code(values)

    def finish(self, tensors: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Leave gradients as the step does; what it returns."""
        step = self._step
        for grad in step.grads:
            owner = tensors[grad.source]
            if grad.output is not None:
                owner.grad = outputs[grad.output]
            else:
                owner.grad = None if grad.input is None else tensors[grad.input]
        return pytree.tree_unflatten([_value(r, tensors, outputs) for r in step.results], step.spec)


def gathered(step: StepGraph, leaves: Sequence[Any]) -> list[Any] | None:
    """The inputs of the graph; None if a gradient lacks."""
    values: list[Any] = []
    for source in step.sources:
        match source:
            case Held(tensor=tensor):
                values.append(tensor)
            case Argument(place=place):
                values.append(leaves[place])
            case Number(group=group, key=key):
                if type(group[key]) is not float:
                    return None
                values.append(group[key])
            case GradOf():
                values.append(None)
    for i, source in enumerate(step.sources):
        if isinstance(source, GradOf):
            owner = values[source.source]
            values[i] = owner.grad if isinstance(owner, torch.Tensor) else None
            if values[i] is None:
                return None
    return values


def _value(result: Result, tensors: Sequence[Any], outputs: Sequence[Any]) -> Any:
    if result.output is not None:
        return spent(outputs[result.output]) if result.is_spent else outputs[result.output]
    return result.constant if result.input is None else tensors[result.input]
