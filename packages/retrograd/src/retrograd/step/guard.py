"""May a captured step be run in a call?

In: the `StepGraph`, and the flat arguments of the call. Out: the graph's inputs, or why not. What the step
reaches in Python is looked at elsewhere (`watch.Snapshot`); here it is tensors: their metadata, hooks,
gradients and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd._torch.guards import InputGuard, changed_sizes
from retrograd._torch.leaf_hooks import handles_made, hooks_of
from retrograd._torch.memory import groups_sharing_memory
from retrograd.step.plan import Argument, GradOf, Held, Number, StepGraph

__all__ = ["StepGuard", "gathered"]


class StepGuard:
    """What must hold.

    Args:
        step: the graph. values: the inputs that it was captured for.
    """

    def __init__(self, step: StepGraph, values: Sequence[Any]) -> None:
        self._step = step
        sources = list(enumerate(step.sources))
        self._arguments = [(i, s.place) for i, s in sources if isinstance(s, Argument)]
        self._given = [i for i, _ in self._arguments if isinstance(values[i], torch.Tensor)]
        self._kept = [
            i for i, s in sources if isinstance(s, Held) or (isinstance(s, GradOf) and i in step.used)
        ]
        self._fixed = frozenset(id(s.tensor) for _, s in sources if isinstance(s, Held))
        self._tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._inputs = InputGuard(values, range(len(values)), list(step.examples), step.shape_env)
        self._hooks = [hooks_of(values[i]) for i in self._tensors]
        self._handles = handles_made()
        self._pointers: list[int] | None = None
        self._storages: frozenset[int] = frozenset()

    def values(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The graph's inputs for a call; None if the graph is not for it."""
        values = gathered(self._step, leaves)
        if values is None or not self._inputs.check(values) or not self._are_hooks_same(values):
            return None
        return values if self._is_memory_apart(values) else None

    def why_not(self, leaves: Sequence[Any]) -> str:
        """Why `values` gives None."""
        values = gathered(self._step, leaves)
        if values is None:
            return "a gradient is there that was not, or lacks"
        if not self._inputs.check(values):
            return self._inputs.why_not(values)
        return (
            "hooks of a tensor have changed" if not self._are_hooks_same(values) else "tensors share memory"
        )

    def changed(self, leaves: Sequence[Any]) -> dict[int, frozenset[int]]:
        """By place of an argument, the dimensions that are not what they were."""
        values = gathered(self._step, leaves)
        if values is None:
            return {}
        changed = changed_sizes(self._inputs.args_metadata, values)
        return {place: changed[i] for i, place in self._arguments if i in changed}

    def _are_hooks_same(self, values: Sequence[Any]) -> bool:
        """Hooks that go are seen in their containers; only what is registered gives a tensor its first
        one."""
        now = handles_made()
        if now == self._handles:
            places = {i: n for n, i in enumerate(self._tensors)}
            return all(
                not values[i].requires_grad
                or (values[i].is_leaf and hooks_of(values[i]) == self._hooks[places[i]])
                for i in self._given
            )
        if any(hooks_of(values[i]) != known for i, known in zip(self._tensors, self._hooks, strict=True)):
            return False
        if any(values[i].requires_grad and not values[i].is_leaf for i in self._given):
            return False
        self._handles = now
        return True

    def _is_memory_apart(self, values: Sequence[Any]) -> bool:
        """No tensor that is written shares memory with another one; none is two inputs."""
        if any(id(values[i]) in self._fixed for i in self._given):
            return False
        pointers = [values[i].data_ptr() for i in self._kept]
        if pointers != self._pointers:
            if not self._is_apart({i: values[i] for i in self._tensors}):
                return False
            self._pointers = pointers
            self._storages = frozenset(values[i].untyped_storage()._cdata for i in self._kept)
            return True
        if any(values[i].untyped_storage()._cdata in self._storages for i in self._given):
            return self._is_apart({i: values[i] for i in self._tensors})
        return len(self._given) < 2 or self._is_apart({i: values[i] for i in self._given})

    def _is_apart(self, tensors: dict[int, torch.Tensor]) -> bool:
        groups = groups_sharing_memory(tensors)
        return not any(place in self._step.written for group in groups for place in group)


def gathered(step: StepGraph, leaves: Sequence[Any]) -> list[Any] | None:
    """The inputs of the graph; None if a gradient lacks, or is there that was not."""
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
            values[i] = _grad_of(values[source.source])
            if values[i] is None:
                return None
    if any(_grad_of(values[i]) is not None for i in step.lacking):
        return None
    return values


def _grad_of(tensor: Any) -> Any:
    return tensor.grad if isinstance(tensor, torch.Tensor) and tensor.is_leaf else None
