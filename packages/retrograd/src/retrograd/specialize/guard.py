"""Decides whether a compiled joint graph may be used for these inputs.

In: the flat inputs of a capture, and its joint graph. Out: `CallGuard.fits`. It checks everything that a
capture relies on: metadata of tensors and relations between sizes (torch's own guards), which tensors are
leaves, and the structure of wrapper subclasses. If the function mutates inputs, it also checks which inputs
share memory, and at which offsets. It checks the tensors that the function closes over in the same way; they
follow the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrograd.errors import not_representable
from retrograd.graph.joint_graph import JointValues
from retrograd.runtime.subclass import fits, is_wrapper, layout_of
from retrograd.runtime.tensor import addresses_are, common_base, groups_sharing_memory, is_foreign, storage_of
from retrograd.trace import InputGuard


@dataclass(frozen=True, eq=False)
class CallGuard:
    """Conditions on flat inputs, made by `for_joint` or `exact`.

    Attributes:
        inputs: metadata and relations between sizes.
        inner: by index of a tensor that requires grad, whether it is a leaf. Other tensors always are.
        wrappings: the structure of each wrapper subclass.
        aliases: which inputs share memory, and at which offsets; None if that does not matter.
        found: the tensors that the function closes over.
    """

    inputs: InputGuard
    inner: tuple[tuple[int, bool], ...]
    wrappings: tuple[tuple[int, Any], ...] = ()
    aliases: MemoryGuard | None = None
    found: tuple[Any, ...] = ()

    @staticmethod
    def for_joint(leaves: Sequence[Any], joint: JointValues) -> CallGuard:
        """A guard for the inputs of the capture of `joint`, and for all others for which `joint` is right.

        Raises:
            Refusal: the function mutates memory that an input shares with a tensor that it closes over.
        """
        sources = [*leaves, *joint.found]
        if joint.updates and any(keys[-1] >= len(leaves) for keys, *_ in memory_layout(sources)):
            text = "it changes memory that an input shares with a tensor it closes over"
            raise not_representable(text)
        wrappings = tuple((i, layout_of(leaf)) for i, leaf in enumerate(sources) if is_wrapper(leaf))
        # Parameters keep their addresses; other tensors may move from call to call.
        moving = [i for i, leaf in enumerate(sources) if not isinstance(leaf, torch.nn.Parameter)]
        memory = MemoryGuard(sources, moving) if joint.updates else None
        guard = guard_as_traced(leaves, joint)
        return CallGuard(guard, _inner(sources), wrappings, memory, tuple(joint.found))

    @staticmethod
    def exact(leaves: Sequence[Any]) -> CallGuard:
        """A guard for inputs with exactly the same metadata."""
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return CallGuard(InputGuard(leaves, tensors, [leaves[i] for i in tensors], None), _inner(leaves))

    def why_not(self, values: Sequence[Any]) -> str:
        """The condition that fails, as text."""
        sources = [*values, *self.found]
        if not self.inputs.check(sources):
            return self.inputs.why_not(sources)
        return "other inputs are leaves, share memory, or are made up of other tensors"

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether all conditions hold for `values`."""
        if self.found:
            values = [*values, *self.found]
        if not self.inputs.check(values):
            return False
        for i, is_leaf in self.inner:
            if values[i].is_leaf is not is_leaf:
                return False
        return (not self.wrappings or all(fits(wrapping, values[i]) for i, wrapping in self.wrappings)) and (
            self.aliases is None or self.aliases.fits(values)
        )


def guard_as_traced(leaves: Sequence[Any], joint: JointValues) -> InputGuard:
    """A guard on metadata and relations between sizes, for all inputs that `joint` fits. Check it with the
    inputs, followed by the tensors that the function closes over."""
    state = joint.state
    fakes = {
        i: leaf.value
        for i, leaf in enumerate(state.leaves)
        if isinstance(leaf.value, torch.Tensor) and not is_wrapper(leaf.value)
    }
    sources, env = [*leaves, *joint.found], state.fake_mode.shape_env
    return InputGuard(sources, list(fakes), list(fakes.values()), env, joint.offsets_matter)


def _inner(leaves: Sequence[Any]) -> tuple[tuple[int, bool], ...]:
    return tuple(
        (i, leaf.is_leaf)
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    )


#: groups of indices of tensors that share memory, each with the offsets of its members; and, if all members
#: have one base, which of them are that base.
AliasLayout = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]], ...]


def memory_layout(values: Sequence[Any]) -> AliasLayout:
    """Which tensors among `values` share memory, at which offsets, and which of them are their base."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
    groups = {keys: [tensors[i] for i in keys] for keys in groups_sharing_memory(tensors)}
    return tuple((keys, _beginnings(group), _bases(group)) for keys, group in groups.items())


def _bases(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    base = common_base(tensors)
    return () if base is None else tuple(tensor is base for tensor in tensors)


def _beginnings(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The offset of each tensor in the memory that they share."""
    plain = not any(map(is_wrapper, tensors))
    if plain and any(storage_of(tensor) != storage_of(tensors[0]) for tensor in tensors):
        return tuple(tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors)
    return tuple(int(tensor.storage_offset()) for tensor in tensors)


class MemoryGuard:
    """Guards which inputs share memory. Tensors whose address is the same as in the last call are not checked
    again.

    Args:
        values: the inputs for which the code was made.
        moving: indices of inputs whose address changes from call to call, such as a batch.
    """

    def __init__(self, values: Sequence[Any], moving: Sequence[int]) -> None:
        self._layout = memory_layout(values)
        plain = [i for i, value in enumerate(values) if _is_plain(value)]
        self._moving = [i for i in moving if i in plain]
        self._fixed = [i for i in plain if i not in moving]
        self._is_simple = (
            not self._layout
            and len(plain) == sum(isinstance(v, torch.Tensor) for v in values)
            and not any(is_foreign(values[i]) for i in plain)
        )
        self._addresses: list[int] = []
        self._storages: frozenset[int] = frozenset()

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether `values` share memory in the same way."""
        if self._addresses and self._is_simple and addresses_are(list(values), self._addresses, self._fixed):
            moving = [values[i] for i in self._moving if values[i].numel()]
            if not any(map(is_foreign, moving)):
                found = [storage_of(value) for value in moving]
                return len(set(found)) == len(found) and self._storages.isdisjoint(found)
        if memory_layout(values) != self._layout:
            return False
        self._addresses = [v.data_ptr() if _is_plain(v) else 0 for v in values]
        self._storages = frozenset(storage_of(values[i]) for i in self._fixed)
        return True


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
