"""Run a captured step on real tensors.

In: a `StepGraph` with compiled code, and the graph's inputs. Out: what the step returns; parameters, buffers,
the states of optimizers and ``.grad`` are as the step leaves them eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retrograd._torch import pytree
from retrograd._torch.ambient import undifferentiated
from retrograd.step.guard import StepGuard
from retrograd.step.plan import GradOf, Result, StepGraph
from retrograd.step.spent import spent

__all__ = ["CompiledStepGraph"]


class CompiledStepGraph:
    """A step that can be run.

    Args:
        step: the graph. code: runs it, boxed; takes the inputs that are `used`. guard: when it may be run.
    """

    def __init__(self, step: StepGraph, code: Callable[[list[Any]], Sequence[Any]], guard: StepGuard) -> None:
        self._step, self.guard = step, guard
        self._code = undifferentiated(code)
        self._used = sorted(step.used)
        replaced = {grad.source for grad in step.grads if grad.input is None}
        self._dropped = [
            (i, source.source)
            for i, source in enumerate(step.sources)
            if isinstance(source, GradOf) and i not in step.used and source.source in replaced
        ]

    def compute(self, values: list[Any]) -> Sequence[Any]:
        """The outputs of the graph. If it raises, only gradients are gone that the step drops unread.

        Args:
            values: the inputs, of which those are let go here that nobody needs afterwards.
        """
        for place, owner in self._dropped:
            values[owner].grad = values[place] = None
        return self._code([values[i] for i in self._used])

    def finish(self, tensors: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Leave gradients as the step does; what it returns."""
        for grad in self._step.grads:
            if grad.output is not None:
                tensors[grad.source].grad = outputs[grad.output]
            else:
                tensors[grad.source].grad = None if grad.input is None else tensors[grad.input]
        results = [_value(result, tensors, outputs) for result in self._step.results]
        return pytree.tree_unflatten(results, self._step.spec)


def _value(result: Result, tensors: Sequence[Any], outputs: Sequence[Any]) -> Any:
    if result.output is not None:
        return spent(outputs[result.output]) if result.is_spent else outputs[result.output]
    return result.constant if result.input is None else tensors[result.input]
