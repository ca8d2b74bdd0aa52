"""Make the inputs of a trace: the tensors with which we call the user's function.

In: a `CaptureState` and an `InputWrapping`. Out: an `Inputs`: the graph's primals, the functional tensors
made from them, and the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from retrograd.aot.modules import FlatCall
from retrograd.errors import Refusal, not_representable
from retrograd.graph.joint import InputRole, Primal, PrimalKind, primal_name
from retrograd.graph.joint_graph import CaptureState, EnteredAs, Leaf, PrimalValue
from retrograd.graph.operator_effects import errors_by_value
from retrograd.runtime.except_clauses import line_that_catches
from retrograd.runtime.subclass import PLAIN, SubclassSpec, built, layout_of, parts_of
from retrograd.runtime.tensor import is_dense
from retrograd.trace import (
    Abandoned,
    FirstRun,
    JointTracer,
    Watched,
    checkpoints_marked,
    mutations_of,
    to_functional,
)


@dataclass(frozen=True)
class InputWrapping:
    """What we do to inputs before the function sees them.

    Attributes:
        entered_as: what the function gets for an input that requires grad and is no leaf. A copy lets the
            function mutate it. An alias keeps autocast from caching its cast, as autocast does for leaves.
        based: the numbers of the alias groups whose members enter as views of a common base.
    """

    entered_as: EnteredAs = "itself"
    based: frozenset[int] = frozenset()

    def with_copies(self, state: CaptureState) -> InputWrapping:
        """The wrapping for another attempt after the function failed: it may mutate an input that is no leaf
        outside, but is one in the trace."""
        any_inner = any(leaf.is_tensor and leaf.requires_grad and not leaf.is_leaf for leaf in state.leaves)
        return replace(self, entered_as="copy") if any_inner else self

    def amended(self, state: CaptureState, changed: Collection[int | None]) -> InputWrapping:
        """The wrapping with a base for each alias group that has a member among the leaves `changed`."""
        based = set(self.based)
        for number, group in enumerate(state.aliases):
            if number not in based and any(member.leaf in changed for member in group.members):
                if group.base is None:
                    raise not_representable(
                        "it changes an input whose memory another one shares in a way unknown to autograd"
                    )
                based.add(number)
        return replace(self, based=frozenset(based))


def enter_as(what: EnteredAs, primal: PrimalValue, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the function gets for a primal: `tensor`, or a differentiable alias or copy of it."""
    if what == "itself" or primal.is_leaf or not primal.differentiable:
        return tensor
    with torch.enable_grad():
        return tensor.clone() if what == "copy" else torch.ops.aten.alias.default(tensor)


def new_input(
    tracer: JointTracer,
    wrapping: SubclassSpec,
    parts: Sequence[torch.Tensor],
    name_of: Callable[[int, int], str],
) -> torch.Tensor:
    """Add graph inputs like the fake tensors in `parts`, and wrap them in a functional tensor as `wrapping`
    says. `name_of` names an input, from its number and how many inputs there are."""
    inputs = [tracer.placeholder(name_of(i, wrapping.count), part) for i, part in enumerate(parts)]
    return to_functional(built(wrapping, iter(inputs)))


@dataclass
class Inputs:
    """The inputs of one trace.

    Attributes:
        state: the function and its fake inputs.
        plan: how inputs are wrapped.
        tracer: records the graph.
        first: follows the function's run and may finish it eagerly; None if it must not.
        primals: the inputs of the graph, in order.
        roles: the role of each placeholder.
        leaves: by number of a tensor primal, the functional tensor at which its autograd graph begins.
        entered: by primal, the tensor that the function can mutate; None for a number.
        histories: by primal, the ``grad_fn`` with which it entered.
        entries: what the function sees, by source: first the leaves of the state, then captured closure
            tensors.
        bared: tensors whose ``.data`` the function took.
        strided: as in `ClosureTensors`.
        reads_offsets: whether the function depends on where tensors begin in their memory.
        reenters: whether the function has differentiated reentrant checkpoints.
        shown: by identity of a real tensor that the function gets, its entry.
    """

    state: CaptureState
    plan: InputWrapping
    tracer: JointTracer
    first: FirstRun | None = None
    primals: list[PrimalValue] = field(default_factory=list)
    roles: list[InputRole] = field(default_factory=list)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    entered: list[Any] = field(default_factory=list)
    histories: dict[int, Any] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)
    bared: list[Any] = field(default_factory=list)
    strided: list[Any] = field(default_factory=list)
    reads_offsets: bool = False
    reenters: bool = False
    shown: dict[int, Any] = field(default_factory=dict)

    def look_at(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check one call that the function makes.

        Raises:
            Refusal: the function catches an error that `operator` raises only when it runs on real data.
        """
        errors = errors_by_value(operator, args, kwargs)
        if errors and (line := line_that_catches(Inputs.call.__code__, errors)):
            text = f"{line} catches errors of {operator}, which raises only when it runs"
            raise Refusal("error-caught", text)

    def call(self, is_exact: bool) -> Any:
        """Run the function, or retrace the calls of its first run. `is_exact` as in `ClosureTensors`.

        Raises:
            Exception: the trace cannot go on, or the function raised it.
        """
        first, seen = self.first, self._seen()
        is_retrace = first is not None and first.can_be_retraced
        watched = Watched(self.found, None if is_retrace else first, is_exact)
        try:
            with (
                self.state.thread_modes.restored(),
                watched,
                checkpoints_marked(self.entered, first) as checkpoints,
            ):
                result = self._run(seen, is_retrace)
                keeps_modes = torch.is_grad_enabled() == self.state.thread_modes.grad
            if first is None or not first.is_eager:
                self._refuse_switches(watched, keeps_modes)
        except Abandoned as abandoned:
            raise abandoned.error from abandoned.error.__cause__
        finally:
            if first is not None:
                first.leave()
        if watched.stopped is not None:
            raise watched.stopped
        self.bared, self.strided, self.reads_offsets = watched.bared, watched.strided, watched.reads_offsets
        self.reenters = checkpoints.reenter
        return result

    def _run(self, seen: Sequence[Any], is_retrace: bool) -> Any:
        """Run the function itself, or its recorded calls."""
        if self.first is None or not isinstance(self.state.call, FlatCall):
            return self.state.call(seen)
        if is_retrace:
            return self.first.retrace(seen)
        self.first.begin(seen, self.tracer, self.plan.with_copies(self.state) != self.plan)
        return self.state.call(seen, self.first)

    def _refuse_switches(self, watched: Watched, keeps_modes: bool) -> None:
        """Refuse a function that leaves grad mode, or the state of a random generator, changed."""
        try:
            self.tracer.refuse_other_numbers()
            if not keeps_modes:
                raise not_representable("it leaves grad mode switched")
        except Refusal as refusal:
            watched.stop(refusal)

    def _seen(self) -> list[Any]:
        """The arguments for the function. Some are real tensors, because the function may ask for more than a
        trace knows, such as their class, attributes or identity. We trace a real tensor once the function
        calls torch with it."""
        entries = self.entries[: len(self.state.leaves)]
        if isinstance(self.state.call, FlatCall):
            if self.first is None and self.state.call.shows_arguments:
                raise not_representable("it may ask for the class of an argument, which is not at hand")
            real = self.state.call.shown(() if self.first is None else self.first.leaves)
            for place, tensor in real.items():
                self.shown[id(tensor)], entries[place] = entries[place], tensor
        return entries

    def as_traced(self, value: Any) -> Any:
        """The traced tensor for an output, which may be a real tensor that the function got."""
        return self.shown.get(id(value), value)

    def with_aliases(self, plan: InputWrapping) -> InputWrapping:
        """The wrapping `plan`, with aliases if autocast has cached the cast of an input that is no leaf."""
        kept = self.tracer.inputs_with_kept_cast()
        inner = (primal_name(i) for i, p in enumerate(self.primals) if p.differentiable and not p.is_leaf)
        is_enough = plan.entered_as == "copy" or kept.isdisjoint(inner)
        return plan if is_enough else replace(plan, entered_as="alias")

    def mutations(self, outputs: Sequence[Any]) -> list[Any]:
        """The mutation counts and shapes of all inputs and outputs so far."""
        seen = (*self.entered, *outputs)
        return [mutations_of(value) for value in seen if isinstance(value, torch.Tensor)]

    def enter(self) -> None:
        """Make the inputs. Call this inside the mode in which the function runs."""
        based = {
            member.leaf: (group, member)
            for number, group in enumerate(self.state.aliases)
            if number in self.plan.based
            for member in group.members
        }
        bases: dict[int, Any] = {}
        for index, leaf in enumerate(self.state.leaves):
            if leaf.same_as is not None:
                self.entries.append(self.entries[leaf.same_as])
            elif leaf.kind is None:
                self.entries.append(leaf.value)
            elif not leaf.is_tensor:
                self.entries.append(self._number(index, leaf))
            elif index in based:
                group, member = based[index]
                if id(group) not in bases:
                    assert group.base is not None
                    if not is_dense(group.base.value):  # We take views of a copy, which would have no gaps.
                        raise not_representable("it changes inputs that share memory with gaps")
                    bases[id(group)] = self._tensor(group.base, group=self.state.aliases.index(group))
                base = bases[id(group)]
                with torch.enable_grad():
                    view = base.as_strided(member.size, member.stride, member.offset)
                self.entries.append(base if member.is_base else view)
            else:
                self.entries.append(self._tensor(leaf, leaf=index))

    def _number(self, index: int, leaf: Leaf) -> Any:
        self.roles.append(Primal(len(self.primals), leaf.name, PrimalKind.SIZE))
        self.primals.append(PrimalValue(leaf.name, PLAIN, False, True, leaf.value, leaf=index))
        self.entered.append(None)
        return self.tracer.placeholder(primal_name(len(self.primals) - 1), leaf.value)

    def _tensor(self, given: Leaf, **where: Any) -> Any:
        """Make a primal for a leaf, and return the tensor that the function sees."""
        wrapping: SubclassSpec = layout_of(given.value)
        number = len(self.primals)
        differentiable = given.requires_grad
        self.primals.append(
            PrimalValue(given.name, wrapping, differentiable, given.is_leaf, given.value, **where)
        )
        kind = given.kind or PrimalKind.ARGUMENT
        self.roles += [Primal(number, given.name, kind, part) for part in range(wrapping.count)]
        made = new_input(self.tracer, wrapping, parts_of(given.value, wrapping), partial(primal_name, number))
        if differentiable:
            made.requires_grad_(True)
        if given.kind is PrimalKind.PARAMETER and wrapping.cls is None:
            made._is_param = True
        entered = enter_as(self.plan.entered_as, self.primals[number], made)
        self.entered.append(entered)
        self.leaves[number], self.histories[number] = made, entered.grad_fn
        return entered

    def found(self, tensor: torch.Tensor) -> Any:
        """The traced tensor for a real tensor; a closure tensor becomes a new primal."""
        if id(tensor) in self.shown:
            return self.shown[id(tensor)]
        for number, primal in enumerate(self.primals):
            if primal.found is tensor:
                return self.entered[number]
        assert self.state.free is not None
        fake = self.state.free(tensor)
        leaf = Leaf(
            "tensor found by the function", PrimalKind.ARGUMENT, fake, tensor.requires_grad, tensor.is_leaf
        )
        entered = self._tensor(leaf, found=tensor)
        self.entries.append(entered)
        return entered
