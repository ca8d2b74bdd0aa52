"""First stage: a function and its inputs become a `CaptureState`.

In: a function or module, its arguments, and which sizes are dynamic. Out: a `CaptureState` with fake inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from retrograd.aot.modules import FlatCall, ModuleState
from retrograd.config import checked
from retrograd.errors import CaptureError, Reason, name_of
from retrograd.graph.joint import PrimalKind
from retrograd.graph.joint_graph import AliasGroup, CaptureState, Leaf, MemberView
from retrograd.runtime import pytree
from retrograd.runtime.modes import ThreadModes
from retrograd.runtime.subclass import TRACED, is_wrapper
from retrograd.runtime.tensor import common_base, groups_sharing_memory, inner_tensors, is_lazy
from retrograd.trace import (
    alias_of_fake,
    fake_mode_of,
    fake_of,
    is_fake,
    new_fake_mode,
    why_not_fakeable,
)

#: the dynamic sizes. ``True``: all; ``None`` or ``False``: none; a mapping: by number of the flat input, the
#: dynamic dimensions.
Dynamic = bool | None | Mapping[int, frozenset[int]]

HOOKS = Reason(
    "module-hooks",
    "a module that is given, or one inside it, has hooks, which a capture would call only once",
    "aot.create_state",
    way_out="retrograd.compile, which calls them; or give a module without hooks",
)


@checked(
    fn_or_module=(callable, "a function or a module"),
    args=(
        lambda args: isinstance(args, Sequence) and not isinstance(args, str),
        "a tuple of the arguments: (x,) for one tensor x",
    ),
    kwargs=(lambda kwargs: kwargs is None or isinstance(kwargs, Mapping), "None, or arguments by name"),
    dynamic=(lambda it: it is None or isinstance(it, (bool, Mapping)), "None, True, False, or a mapping"),
)
def create_state(
    fn_or_module: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    fake_mode: Any = None,
) -> CaptureState:
    """Prepare to capture `fn_or_module` on inputs like these.

    Args:
        fn_or_module: called as ``fn_or_module(*args, **kwargs)``. Parameters and buffers of a module are
            inputs.
        args, kwargs: pytrees of tensors and constants.
        dynamic: ``True``: all sizes except 0 and 1 are symbolic. A mapping from the number of a flat input to
            dimensions: those sizes are symbolic. Otherwise all sizes are static.
        decompositions: a decomposition for each operator, as for ``make_fx``.
        fake_mode: the mode of inputs that are fake already; its shape environment records the guards.

    Raises:
        CaptureError: a graph cannot represent an input, or an input is fake without `fake_mode` or real with
            it; or a module has hooks.
    """
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    state = ModuleState(*(m for m in (fn_or_module, *flat) if isinstance(m, nn.Module)))
    if state.has_hooks():
        raise CaptureError(HOOKS)
    call, leaves = FlatCall(fn_or_module, state, spec), [*state.tensors, *flat]
    return state_of_flat(
        call,
        leaves,
        name=name_of(fn_or_module),
        names=call.names(leaves),
        kinds=call.kinds(leaves),
        dynamic=dynamic,
        decompositions=decompositions or {},
        fake_mode=fake_mode,
        in_spec=spec,
    )


def state_of_flat(  # noqa: PLR0913 - the fields of a `CaptureState`
    call: Callable[[Sequence[Any]], Any],
    leaves: Sequence[Any],
    *,
    name: str,
    names: Sequence[str],
    kinds: Sequence[PrimalKind],
    dynamic: Dynamic = None,
    decompositions: Mapping[Any, Callable[..., Any]],
    fake_mode: Any = None,
    in_spec: Any = None,
) -> CaptureState:
    """`create_state` for a function of flat inputs with names and kinds. `in_spec`: as in `CaptureState`."""
    fakes = _Fakes(name, fake_mode, dynamic)
    made = tuple(
        fakes.leaf(i, value, leaf_name, kind)
        for i, (value, leaf_name, kind) in enumerate(zip(leaves, names, kinds, strict=True))
    )
    return CaptureState(
        name=name,
        call=call,
        leaves=made,
        thread_modes=ThreadModes.now(),
        fake_mode=fakes.mode,
        aliases=tuple(fakes.groups(made, leaves)),
        decompositions=decompositions,
        free=fakes.free,
        in_spec=in_spec,
    )


class _Fakes:
    """Makes the fake leaves for the inputs of one function."""

    def __init__(self, function: str, given: Any, dynamic: Dynamic) -> None:
        self.function, self.given, self.dynamic = function, given, dynamic
        self.mode = given or new_fake_mode(bool(dynamic))
        self._first: dict[int, int] = {}

    def leaf(self, index: int, value: Any, name: str, kind: PrimalKind) -> Leaf:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return Leaf(name, PrimalKind.SIZE, value)
        if not isinstance(value, torch.Tensor):
            return Leaf(name, None, value)
        first = self._first.setdefault(id(value), index)
        fake = self._fake(value, name, self._dims(index, value))
        same_as = None if first == index else first
        return Leaf(name, kind, fake, value.requires_grad, value.is_leaf, same_as)

    def _dims(self, index: int, value: torch.Tensor) -> frozenset[int]:
        if isinstance(self.dynamic, Mapping):
            return self.dynamic.get(index, frozenset())
        return frozenset(range(value.dim())) if self.dynamic else frozenset()

    def _fake(self, value: torch.Tensor, name: str, dims: frozenset[int]) -> Any:
        why = why_not_fakeable(value)
        if why is None and any(map(is_lazy, inner_tensors(value))):
            why = "lazily conjugated or negated tensor"
        if why is None and type(value) not in TRACED and not is_wrapper(value):
            why = f"{type(value).__name__}, whose Python code a trace does not call"
        if why:
            self._refuse("input", name, f"is a {why}", "keep it eager")
        if is_fake(value):
            if fake_mode_of(value) is not self.given:
                self._refuse("fake-input", name, "is fake, but not of the given fake mode", "pass fake_mode=")
            return alias_of_fake(value)
        if self.given is not None:
            self._refuse(
                "real-input", name, "is real, though a fake mode was given", "make it fake in that mode"
            )
        return fake_of(self.mode, value, name, dims)

    def _refuse(self, code: str, name: str, found: str, way_out: str) -> None:
        raise CaptureError.because(
            code, f"input {name} of {self.function} {found}", "aot.create_state", node=name, way_out=way_out
        )

    def free(self, value: torch.Tensor) -> Any:
        """A fake of a tensor that the function closes over."""
        return self._fake(value, "free tensor", frozenset())

    def groups(self, leaves: Sequence[Leaf], values: Sequence[Any]) -> list[AliasGroup]:
        """The groups of leaves that share memory."""
        tensors = {i: values[i] for i, leaf in enumerate(leaves) if leaf.is_tensor}
        return [self._group(keys, [tensors[i] for i in keys]) for keys in groups_sharing_memory(tensors)]

    def _group(self, keys: Sequence[int], tensors: Sequence[torch.Tensor]) -> AliasGroup:
        with self.mode if any(map(is_fake, tensors)) else nullcontext():
            base = common_base(tensors)
            if base is not None and any(t.requires_grad and not base.requires_grad for t in tensors):
                base = None  # a view of this base was made a leaf
        members = tuple(
            MemberView(
                key,
                tuple(tensor.shape),
                tuple(tensor.stride()),
                int(tensor.storage_offset()) - (int(base.storage_offset()) if base is not None else 0),
                tensor is base,
            )
            for key, tensor in zip(keys, tensors, strict=True)
        )
        if base is None:
            return AliasGroup(members, None)
        fake = self._fake(base, "base", frozenset())
        leaf = Leaf("base of shared memory", PrimalKind.ARGUMENT, fake, base.requires_grad, base.is_leaf)
        return AliasGroup(members, leaf)
