"""May a compiled joint graph be used for these inputs?

In: the flat inputs that it was captured for, and the joint graph. Out: `CallGuard.fits`. Looks at what a
capture relies on: metadata of tensors and relations between sizes (torch's own guards), which tensors are
leaves, how wrapper subclasses are made up, and, if the function changes inputs, which of them share memory
and where each of these begins in it. The same holds for tensors that the function found by itself, which
stand behind the inputs.
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
    """What must hold for flat inputs; made by `for_joint` or `exact`.

    Attributes:
        inputs: metadata and relations between sizes.
        inner: of the tensors that require grad, which are leaves; others always are.
        wrappings: how the wrapper subclasses among them are made up.
        aliases: which share memory, and where each of these begins in it; None if that does not matter.
        found: the tensors that the function found by itself.
    """

    inputs: InputGuard
    inner: tuple[tuple[int, bool], ...]
    wrappings: tuple[tuple[int, Any], ...] = ()
    aliases: MemoryGuard | None = None
    found: tuple[Any, ...] = ()

    @staticmethod
    def for_joint(leaves: Sequence[Any], joint: JointValues) -> CallGuard:
        """For the inputs that `joint` was captured for, and all others that it is right for.

        Raises:
            Refusal: the function changes memory that an input and a tensor that it found share.
        """
        sources = [*leaves, *joint.found]
        if joint.updates and any(keys[-1] >= len(leaves) for keys, *_ in memory_layout(sources)):
            text = "it changes memory that an input shares with a tensor it closes over"
            raise not_representable(text)
        wrappings = tuple((i, layout_of(leaf)) for i, leaf in enumerate(sources) if is_wrapper(leaf))
        # Parameters and buffers stay where they are; other tensors come from anywhere.
        moving = [i for i, leaf in enumerate(sources) if not isinstance(leaf, torch.nn.Parameter)]
        memory = MemoryGuard(sources, moving) if joint.updates else None
        guard = guard_as_traced(leaves, joint)
        return CallGuard(guard, _inner(sources), wrappings, memory, tuple(joint.found))

    @staticmethod
    def exact(leaves: Sequence[Any]) -> CallGuard:
        """For inputs with the very same metadata."""
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return CallGuard(InputGuard(leaves, tensors, [leaves[i] for i in tensors], None), _inner(leaves))

    def why_not(self, values: Sequence[Any]) -> str:
        """What does not hold."""
        sources = [*values, *self.found]
        if not self.inputs.check(sources):
            return self.inputs.why_not(sources)
        return "other inputs are leaves, share memory, or are made up of other tensors"

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether all of it holds for `values`."""
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
    """A guard on metadata and relations between sizes, for all inputs that `joint` fits; it is checked with
    the tensors that the function found behind them."""
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


#: groups of places that share memory, each with the offsets of its members, and which of them are views of
#: one tensor, or are it.
AliasLayout = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]], ...]


def memory_layout(values: Sequence[Any]) -> AliasLayout:
    """Which of the tensors among `values` share memory, where each of these begins in it, and their base."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
    groups = {keys: [tensors[i] for i in keys] for keys in groups_sharing_memory(tensors)}
    return tuple((keys, _beginnings(group), _bases(group)) for keys, group in groups.items())


def _bases(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    base = common_base(tensors)
    return () if base is None else tuple(tensor is base for tensor in tensors)


def _beginnings(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Where each of the tensors begins in the memory that they share."""
    plain = not any(map(is_wrapper, tensors))
    if plain and any(storage_of(tensor) != storage_of(tensors[0]) for tensor in tensors):
        return tuple(tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors)
    return tuple(int(tensor.storage_offset()) for tensor in tensors)


class MemoryGuard:
    """Guards the sharing of memory. Tensors that lie where they lay in the last call are not looked at again.

    Args:
        values: the inputs that the code was made for.
        moving: places of the inputs that lie elsewhere in each call, such as a batch.
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
