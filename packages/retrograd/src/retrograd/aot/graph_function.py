"""A graph that Dynamo made, compiled at once, with Dynamo's fakes and for Dynamo's guards.

In: the graph module, its inputs (fake as Dynamo traced them) and the user's choices. Out: `GraphFunction`,
called with real inputs that Dynamo's guards have let through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from retrograd._torch.ambient import is_foreign_mode_active
from retrograd._torch.dynamo_bridge import (
    GraphInput,
    fake_of_attribute,
    grad_mode_left,
    guard_no_other_overlap,
    guard_same,
    has_symbols,
    mode_of,
    traced_in,
    why_not_as_given,
)
from retrograd._torch.fakes import alias_of_fake
from retrograd._torch.interpret import run_graph
from retrograd._torch.memory import common_base, groups_sharing_memory
from retrograd._torch.saved_hooks import why_saved_hooks_matter
from retrograd.aot.capture import capture
from retrograd.aot.compile import compile as compile_partition
from retrograd.aot.function import AotConfig
from retrograd.aot.modules import ModuleState
from retrograd.aot.partition import partition
from retrograd.aot.report import reason_of, report
from retrograd.aot.run_forward import CompiledFunction
from retrograd.aot.state import state_of_flat
from retrograd.backends.registry import find_backend
from retrograd.errors import CaptureError, Reason, UnlikeTracedError
from retrograd.graph.capture_state import AliasGroup, CaptureState
from retrograd.graph.joint import PrimalKind
from retrograd.graph.partition import Partition

__all__ = ["GraphFunction", "state_of_graph"]


class GraphFunction:
    """The compiled form of one graph of Dynamo's.

    Args:
        gm: the graph.
        inputs: one per placeholder.
        mode: the fake mode that Dynamo compiles in.
        config: the choices; ``dynamic`` and ``recompile_limit`` are Dynamo's affair.

    Raises:
        CaptureError: an input is not fake, or is a fake of another mode.
        Exception: whatever capture and backends raise.
    """

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[GraphInput], mode: Any, config: AotConfig
    ) -> None:
        self._gm, self._config = gm, config
        self._mode = mode_of(inputs) or mode
        self._module = ModuleState.of(gm)
        self._offset = len(self._module.tensors)
        left = grad_mode_left(gm)
        self._grad_mode = None if left == torch.is_grad_enabled() else left
        self._inner = [i for i, item in enumerate(inputs) if _may_have_history(item)]
        self._layout: tuple[Any, ...] | None = None
        with traced_in(self._mode):
            self._state = state_of_graph(gm, inputs, self._module, self._mode, config)
            self._guard_duplicates(inputs)
            code = self._compiled(self._state)
        self._codes: dict[Any, Callable[[list[Any]], Any]] = {
            self._leafness([item.given for item in inputs]): code
        }
        self._guard_memory(inputs, code.partition)

    def __call__(self, *args: Any) -> Any:
        """Run the graph's code on real inputs."""
        if (reason := _why_eager()) is not None:
            report.fell_back(reason)
            return self._gm(*args)
        if self._layout is not None and self._layout != self._layout_of(args):
            report.fell_back(_MEMORY)
            return self._gm(*args)
        code = self._codes.get(self._leafness(args)) or self._recompiled(args)
        try:
            outputs = code([*self._module.current(), *args])
        except UnlikeTracedError as error:
            if self._config.strict:
                raise
            report.fell_back(error.reason)
            self._codes[self._leafness(args)] = lambda leaves: self._gm(*leaves[self._offset :])
            return self._gm(*args)
        if self._grad_mode is not None:
            torch.set_grad_enabled(self._grad_mode)
        return outputs

    def _guard_duplicates(self, inputs: Sequence[GraphInput]) -> None:
        for item, leaf in zip(inputs, self._state.leaves[self._offset :], strict=True):
            if leaf.same_as is not None and leaf.same_as >= self._offset:
                guard_same(inputs[leaf.same_as - self._offset], item)

    def _guard_memory(self, inputs: Sequence[GraphInput], parts: Partition) -> None:
        """What is changed in place must not begin to share memory, nor share it otherwise."""
        if not any(update.value is not None for update in parts.joint.updates):
            return
        if any(primal.group is not None for primal in parts.joint.primals):
            self._layout = self._layout_of([item.given for item in inputs])
            return
        primals = (parts.joint.primals[update.primal].leaf for update in parts.joint.updates)
        changed = {leaf - self._offset for leaf in primals if leaf is not None}
        guard_no_other_overlap([item for i, item in enumerate(inputs) if i in changed or not item.is_static])

    def _layout_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Which inputs share memory, and where each of these begins in it."""
        tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        groups = groups_sharing_memory(tensors)
        return tuple((group, tuple(int(tensors[i].storage_offset()) for i in group)) for group in groups)

    def _leafness(self, args: Sequence[Any]) -> tuple[bool, ...]:
        """Dynamo does not guard on whether an input has a history; eager's order depends on it."""
        return tuple([args[i].is_leaf for i in self._inner])

    def _recompiled(self, args: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        leaves = list(self._state.leaves)
        for i in self._inner:
            leaves[self._offset + i] = replace(leaves[self._offset + i], is_leaf=args[i].is_leaf)
        try:
            with traced_in(self._mode):
                code = self._compiled(replace(self._state, leaves=tuple(leaves)))
        except Exception as error:
            if self._config.strict:
                raise
            report.fell_back(reason_of(error, "dynamo"))
            return lambda values: self._gm(*values[self._offset :])
        self._codes[self._leafness(args)] = code
        return code

    def _compiled(self, state: CaptureState) -> CompiledFunction:
        config = self._config
        joint = capture(state, single_region=config.single_region)
        for change in config.passes:
            joint = joint.apply(change)
        parts = partition(joint, config.partitioner)
        # With symbolic sizes the backward is compiled now too: Dynamo installs only guards that are made now.
        lazy = not has_symbols(state.fake_mode)
        code = compile_partition(
            parts,
            config.backend,
            config.backward,
            lazy=lazy,
            cudagraphs=config.cudagraphs,
            regions=config.regions,
        ).code
        report.captured(parts)
        return code


def state_of_graph(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], module: ModuleState, mode: Any, config: AotConfig
) -> CaptureState:
    """The `CaptureState` of a graph of Dynamo's: tensors that the graph holds, then its inputs.

    Raises:
        CaptureError: an input is not fake, or is a fake of another mode, or Dynamo has changed it.
    """
    for item in inputs:
        if isinstance(item.value, torch.Tensor) and (what := why_not_as_given(item)):
            raise CaptureError(_changed(item, what))
    count = len(module.tensors)

    def call(values: Sequence[Any]) -> Any:
        # A switch of grad mode that the graph leaves behind is made after each call, not inside of a capture.
        with module.replaced(values[:count]), torch.set_grad_enabled(torch.is_grad_enabled()):
            return run_graph(gm, values[count:])

    attributes = [fake_of_attribute(mode, tensor) for tensor in module.tensors]
    state = state_of_flat(
        call,
        [*attributes, *(item.value for item in inputs)],
        name="the graph that Dynamo made",
        names=[*module.names, *(item.name for item in inputs)],
        kinds=[*module.kinds, *map(_kind, inputs)],
        decompositions=find_backend(config.backend).decompositions(),
        fake_mode=mode,
    )
    given = [*module.tensors, *(item.given for item in inputs)]
    leaves = tuple(
        replace(leaf, requires_grad=value.requires_grad, is_leaf=value.is_leaf)
        if isinstance(value, torch.Tensor)
        else leaf
        for leaf, value in zip(state.leaves, given, strict=True)
    )
    return replace(
        state,
        leaves=leaves,
        aliases=tuple(_as_given(group, given) for group in state.aliases),
        free=lambda tensor: alias_of_fake(fake_of_attribute(mode, tensor)),
    )


def _as_given(group: AliasGroup, given: Sequence[Any]) -> AliasGroup:
    """The group with the history of its base as it is, not as it was when Dynamo had traced the graph."""
    base = common_base([given[member.leaf] for member in group.members])
    if base is None or group.base is None:
        return replace(group, base=None)
    return replace(group, base=replace(group.base, requires_grad=base.requires_grad, is_leaf=base.is_leaf))


def _kind(item: GraphInput) -> PrimalKind:
    if item.is_parameter:
        return PrimalKind.PARAMETER
    return PrimalKind.BUFFER if item.is_static else PrimalKind.ARGUMENT


def _may_have_history(item: GraphInput) -> bool:
    return isinstance(item.given, torch.Tensor) and item.given.requires_grad and not item.is_parameter


def _why_eager() -> Reason | None:
    if is_foreign_mode_active():
        return _MODE
    if (why := why_saved_hooks_matter()) is not None:
        return Reason("saved-tensor-hooks", why, "dynamo", way_out="call it outside of the hooks")
    return None


def _changed(item: GraphInput, what: str) -> Reason:
    return Reason(
        "input-changed-in-trace",
        f"Dynamo's own trace changed {what} of {item.name}",
        "dynamo",
        node=item.name,
        way_out="change the shape of an input outside of the compiled function",
    )


_MODE = Reason("dispatch-mode", "a dispatch mode or functorch transform is active", "dynamo")
_MEMORY = Reason(
    "memory-shared-otherwise",
    "the inputs, of which some are changed in place, share memory otherwise than when this was compiled",
    "dynamo",
    way_out="give the function inputs that do not share memory",
)
