"""Compiles a graph from Dynamo at once, with Dynamo's fake tensors and guards.

In: the graph module, its inputs (fake, as Dynamo traced them) and the user's settings. Out: a
`GraphFunction`. Callers pass real inputs that have passed Dynamo's guards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from retrograd.aot.compiler import run_stages
from retrograd.aot.modules import ModuleState
from retrograd.aot.repeated import GraphCall
from retrograd.aot.run.call import CompiledFunction
from retrograd.aot.state import state_of_flat
from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.dynamo.frames import (
    GraphInput,
    fake_of_attribute,
    grad_mode_left,
    guard_same,
    traced_in,
    why_ended,
    why_not_as_given,
)
from retrograd.errors import CaptureError, Reason
from retrograd.graph.joint import PrimalKind
from retrograd.graph.joint_graph import AliasGroup, CaptureState, MemberView
from retrograd.process import restored_on_error
from retrograd.report import Report, reason_of
from retrograd.runtime.kernels import kernel_choices
from retrograd.runtime.modes import torch_functions_off
from retrograd.runtime.tensor import common_base, groups_sharing_memory, is_foreign
from retrograd.specialize.callable import Specialized, Variant
from retrograd.specialize.guard import MemoryGuard
from retrograd.trace import alias_of_fake, draws_repeated, forget_real_tensors, mode_among


class GraphFunction:
    """The compiled form of one graph from Dynamo.

    Args:
        gm: the graph.
        inputs: one for each placeholder.
        mode: the fake mode that Dynamo compiles in.
        config: the settings. Dynamo handles ``dynamic`` and ``recompile_limit``.
        report: receives what was compiled and what ran eagerly.

    Raises:
        CaptureError: an input is not fake, or belongs to another fake mode.
        Exception: whatever capture and backends raise.
    """

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[GraphInput], mode: Any, config: Config, report: Report
    ) -> None:
        self._gm, self._config, self._report, self._has_run = gm, config, report, False
        self._mode = mode_among(item.value for item in inputs) or mode
        self._module = ModuleState(gm)
        self._offset = len(self._module.tensors)
        left = grad_mode_left(gm)
        self._grad_mode = None if left == torch.is_grad_enabled() else left
        self._inner = [i for i, item in enumerate(inputs) if _may_have_history(item)]
        with traced_in(self._mode):
            self._state = state_of_graph(gm, inputs, self._module, self._mode, config)
            for item, leaf in zip(inputs, self._state.leaves[self._offset :], strict=True):
                if leaf.same_as is not None and leaf.same_as >= self._offset:
                    guard_same(inputs[leaf.same_as - self._offset], item)
            code = self._compiled(self._state)
        # If the graph changes an input in place, the inputs must share memory as they did in the trace.
        # Dynamo does not guard that: its ``StorageOverlap`` compares only offsets.
        moving = [i for i, item in enumerate(inputs) if not item.is_static]
        writes = any(update.value is not None for update in code.partition.joint.updates)
        given = [item.given for item in inputs]
        self._memory = MemoryGuard(given, moving) if writes else None
        # Dynamo does not guard storage offsets either.
        tensors = [(i, value) for i, value in enumerate(given) if isinstance(value, torch.Tensor)]
        matter = code.partition.joint.offsets_matter
        self._offsets = [(i, value.storage_offset()) for i, value in tensors] if matter else []
        self._specialized = Specialized("a graph of Dynamo's", "dynamo", config, report, self._recompiled)
        self._specialized.add(self._key(given), Variant(None, code))

    def __call__(self, *args: Any) -> Any:
        """Run the graph's code on real inputs."""
        if not self._has_run:  # Dynamo may have made fakes until now
            self._has_run = True
            forget_real_tensors(self._mode)
        eagerly = functools.partial(as_it_is, self._gm, *args)
        if (now := self._specialized.why_not_now(has_seen_functions=True)) is not None:
            return self._specialized.run_eagerly(now, eagerly)
        if self._memory is not None and not self._memory.fits(args):
            return self._specialized.run_eagerly(_MEMORY, eagerly)
        if any(args[i].storage_offset() != offset for i, offset in self._offsets):
            return self._specialized.run_eagerly(_OFFSETS, eagerly)
        leaves = [*self._module.current(), *args]
        outputs = self._specialized(self._key(args), leaves, eagerly)
        if self._grad_mode is not None:
            torch.set_grad_enabled(self._grad_mode)
        return outputs

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What the code depends on and Dynamo does not guard: which inputs are leaves, as eager's order
        depends on it; and the choice of kernels."""
        return tuple([args[i].is_leaf for i in self._inner]), kernel_choices()

    def _recompiled(self, key: Any, leaves: Sequence[Any], known: Sequence[Variant]) -> Variant:
        """Compile the graph for another choice of leaves among its inputs, or of kernels."""
        described = list(self._state.leaves)
        for i in self._inner:
            place = self._offset + i
            described[place] = replace(described[place], is_leaf=leaves[place].is_leaf)
        try:
            with traced_in(self._mode):
                modes = self._state.thread_modes._replace(kernels=kernel_choices())
                state = replace(self._state, leaves=tuple(described), thread_modes=modes)
                return Variant(None, self._compiled(state))
        except Exception as error:
            if self._config.strict:
                raise
            return Variant(None, None, reason_of(error, "dynamo"))

    def _compiled(self, state: CaptureState) -> CompiledFunction:
        # Code that is compiled later cannot add guards, because Dynamo installs its guards now.
        lazy = state.fake_mode.shape_env is None or not state.fake_mode.shape_env.var_to_range
        ended_by = why_ended(self._gm)
        stages = functools.partial(run_stages, lazy=lazy, ended_by=ended_by, graph=self._gm)
        return restored_on_error(stages, state, self._config, self._report)  # as in `as_it_is`


def as_it_is(gm: fx.GraphModule, *args: Any) -> Any:
    """Run the graph itself. Function modes and tensor classes are off, because Dynamo has traced their
    effect. Global module hooks do not see the graph, which is not one of the user's modules. If a call in it
    raises, we restore the modes that the graph has switched, because it has no ``with`` blocks that would."""
    # generate the code now: else the first call goes through ``__call__``, which prints errors
    assert gm.code
    with torch_functions_off(), draws_repeated():
        return restored_on_error(gm.forward, *args)


def state_of_graph(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], module: ModuleState, mode: Any, config: Config
) -> CaptureState:
    """The `CaptureState` of a graph from Dynamo: first the tensors that the graph holds, then its inputs.

    Raises:
        CaptureError: an input is not fake, or belongs to another fake mode, or Dynamo has changed it.
    """
    for item in inputs:
        if isinstance(item.value, torch.Tensor) and (what := why_not_as_given(item)):
            raise CaptureError.because(
                "input-changed-in-trace",
                f"Dynamo's own trace changed {what} of {item.name}",
                "dynamo",
                node=item.name,
                way_out="change the shape of an input outside of the compiled function",
            )
    attributes = [fake_of_attribute(mode, tensor) for tensor in module.tensors]
    state = state_of_flat(
        GraphCall(gm, module),
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
        aliases=(*(_as_given(group, given) for group in state.aliases), *_unseen_groups(state, given)),
        free=lambda tensor: alias_of_fake(fake_of_attribute(mode, tensor)),
    )


def _as_given(group: AliasGroup, given: Sequence[Any]) -> AliasGroup:
    """The group with the true history of its base. Dynamo's trace may have changed the history of the
    fake."""
    base = common_base([given[member.leaf] for member in group.members])
    if base is None or group.base is None:
        return replace(group, base=None)
    return replace(group, base=replace(group.base, requires_grad=base.requires_grad, is_leaf=base.is_leaf))


def _unseen_groups(state: CaptureState, given: Sequence[Any]) -> Iterator[AliasGroup]:
    """Inputs that share memory that torch did not allocate: their fakes do not share it."""
    tensors = {i: value for i, value in enumerate(given) if isinstance(value, torch.Tensor)}
    seen = {tuple(member.leaf for member in group.members) for group in state.aliases}
    for group in groups_sharing_memory(tensors):
        if group not in seen and any(is_foreign(tensors[i]) for i in group):
            views = [MemberView(i, tensors[i].shape, tensors[i].stride(), 0, False) for i in group]
            yield AliasGroup(tuple(views), None)


def _kind(item: GraphInput) -> PrimalKind:
    if item.is_parameter:
        return PrimalKind.PARAMETER
    return PrimalKind.BUFFER if item.is_static else PrimalKind.ARGUMENT


def _may_have_history(item: GraphInput) -> bool:
    return isinstance(item.given, torch.Tensor) and item.given.requires_grad and not item.is_parameter


_MEMORY = Reason(
    "memory-shared-otherwise",
    "the inputs, of which some are changed in place, share memory otherwise than when this was compiled",
    "dynamo",
    way_out="give the function inputs that do not share memory",
)
_OFFSETS = Reason(
    "begins-elsewhere",
    "an input begins elsewhere in its memory than when this was compiled, and the function depends on that",
    "dynamo",
    way_out="slices instead of as_strided with an offset",
)
