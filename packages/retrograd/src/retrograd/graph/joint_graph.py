"""The values that the stages of `retrograd.aot` exchange: `CaptureState`, `JointValues`, `Partition`.

All are frozen. In: ``aot.create_state``, ``aot.capture`` and ``aot.partition`` make them. Out: the later
stages read them. A state can be captured twice, and much later; a joint graph can be partitioned several
times.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from retrograd.graph.joint import Destination, JointSignature, PrimalKind
from retrograd.graph.lazy import LazyGraph


@dataclass(frozen=True, eq=False)
class Leaf:
    """One flat input.

    Attributes:
        name: a readable name (``args[0]``, ``layer.weight``).
        kind: argument, parameter, buffer or size; None for a constant, whose value the capture relies on.
        value: a fake tensor (or a wrapper subclass of fakes), a symbolic integer, or the constant itself.
        requires_grad, is_leaf: as for the real tensor.
        same_as: an earlier leaf that is the same tensor object; None if there is none.
    """

    name: str
    kind: PrimalKind | None
    value: Any
    requires_grad: bool = False
    is_leaf: bool = True
    same_as: int | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, and not the same object as an earlier leaf."""
        return isinstance(self.value, torch.Tensor) and self.same_as is None


@dataclass(frozen=True)
class MemberView:
    """The position of a leaf within the base of its group. Sizes, strides and offset count elements."""

    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_base: bool


@dataclass(frozen=True, eq=False)
class AliasGroup:
    """Leaves that share memory.

    Attributes:
        members: the position of each leaf within the base.
        base: the tensor of which all are views, as a separate leaf; None if autograd knows no such tensor.
    """

    members: tuple[MemberView, ...]
    base: Leaf | None


@dataclass(frozen=True, eq=False)
class CaptureState:
    """A function and its inputs, ready to be captured.

    Attributes:
        name: the function's name, for messages.
        call: takes the flat inputs and returns what the user's function returns.
        leaves: the flat inputs: parameters and buffers first, then arguments.
        aliases: groups of leaves that share memory.
        thread_modes: the thread modes under which the function is called.
        fake_mode: the mode of the fake values. Its shape environment collects the guards.
        decompositions: applied during tracing.
        free: makes a fake of a real tensor that the function reaches without receiving it as an argument.
        in_spec: the pytree of ``(args, kwargs)``, whose leaves are the last of `leaves`; None if unknown.
    """

    name: str
    call: Callable[[Sequence[Any]], Any]
    leaves: tuple[Leaf, ...]
    thread_modes: Any
    fake_mode: Any
    aliases: tuple[AliasGroup, ...] = ()
    decompositions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    free: Callable[[torch.Tensor], Any] | None = None
    in_spec: Any = None

    @property
    def is_symbolic(self) -> bool:
        """Whether any size is symbolic."""
        kinds = (torch.SymInt, torch.SymFloat)
        numbers = [
            number
            for leaf in self.leaves
            for number in (leaf.value.shape if isinstance(leaf.value, torch.Tensor) else (leaf.value,))
        ]
        return any(isinstance(number, kinds) for number in numbers)

    @property
    def uses_python_forms(self) -> bool:
        """Whether to trace with torch's Python implementations of operators.

        Symbolic sizes need them. A code generator gets them too, to receive the graphs that stock torch gives
        it: a dropout as one operator, for example.
        """
        return self.is_symbolic or bool(self.decompositions)


@dataclass(frozen=True)
class CaptureOptions:
    """How a function is captured; see ``aot.capture``."""

    single_region: bool = False
    split_at_leaf_grads: bool = False
    separate_sums: bool = False
    layouts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    autocast: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SizeValue:
    """A size that differs from call to call: the number of the `ForwardValue` that holds it."""

    value: int


@dataclass(frozen=True, eq=False)
class View:
    """How a tensor views its base. Sizes, strides and offset count elements; some of them are a `SizeValue`.

    Attributes:
        size, stride: of the view; unused if `replay` makes it.
        offset: relative to the offset of the base.
        differentiable: whether autograd sees through the view; if not, it is a view of the detached base.
        origin: why torch refuses in-place changes of the view (``CreationMeta``); None if it allows them.
        replay: makes the view of a base as the function made it; None to use sizes and strides.
        numbers: the numbers that `replay` asks for, in that order; empty if they are always the same.
        is_new_leaf: whether it requires grad although its base does not.
        is_detached: whether autograd does not treat it as a view, like the result of ``detach``.
    """

    size: tuple[int | SizeValue, ...] = ()
    stride: tuple[int | SizeValue, ...] = ()
    offset: int | SizeValue = 0
    differentiable: bool = True
    replay: Callable[[Any, Any], Any] | None = None
    numbers: tuple[int | SizeValue, ...] = ()
    origin: Any = None
    is_new_leaf: bool = False
    is_detached: bool = False


@dataclass(frozen=True)
class ConstantOutput:
    """An output that is not a tensor."""

    value: Any = field(compare=False)


@dataclass(frozen=True)
class ComputedOutput:
    """An output that the graph computes: the number of its `ForwardValue`."""

    value: int


@dataclass(frozen=True)
class SizeOutput:
    """An output that is a ``torch.Size``."""

    sizes: tuple[int | SizeValue, ...]


@dataclass(frozen=True)
class SameAs:
    """An output that is the same tensor object as a source.

    Sources are numbered: first the leaves of the state, then the tensors that the function reached by itself.
    """

    source: int


@dataclass(frozen=True)
class AliasOf:
    """An output that shares memory with a source (`SameAs.source`) or with a value of the graph.

    Attributes:
        view: how it views that memory.
        source: the number of the source; None if it views a value.
        value: the number of the value; None if it views a source.
        made: the number of the `ForwardValue` of the output itself, if that has a place in the order of the
            regions. Other aliases may be derived from it.
    """

    view: View
    source: int | None = None
    value: int | None = None
    made: int | None = None


OutputPlan = ConstantOutput | ComputedOutput | SizeOutput | SameAs | AliasOf


@dataclass(frozen=True, eq=False)
class ForwardValue:
    """A value that the forward computes.

    Attributes:
        wrapping: how to build a wrapper subclass from the graph's outputs (a
            ``runtime.subclass.SubclassSpec``).
        boundary: the boundary that takes its cotangent; None if it is not differentiable.
        is_visible: whether the user receives it. Otherwise it is the stand-in for a hidden boundary.
        requires_grad: whether it is a new leaf that requires grad.
        version: the version counter that it would have in eager.
        is_view: whether it is a view for autograd in eager.
    """

    wrapping: Any
    boundary: int | None = None
    is_visible: bool = True
    requires_grad: bool = False
    version: int = 0
    is_view: bool = False


@dataclass(frozen=True, eq=False)
class PrimalValue:
    """An input of the graph: a leaf of the state, the base of an alias group, or a tensor that the function
    reached by itself.

    Attributes:
        name: a readable name.
        wrapping: how to flatten a wrapper subclass.
        differentiable: whether it gets a gradient.
        is_leaf: whether the gradient goes to its ``.grad`` rather than on through its history.
        leaf: position among the state's leaves; None for other inputs.
        group: the alias group whose base it is; None for other inputs.
        found: the tensor itself, if the function reached it through a closure, a global or an attribute.
        fake: example value.
    """

    name: str
    wrapping: Any
    differentiable: bool
    is_leaf: bool
    fake: Any
    leaf: int | None = None
    group: int | None = None
    found: Any = None


@dataclass(frozen=True, eq=False)
class Update:
    """An in-place change of a primal.

    Attributes:
        primal: its number among the primals.
        value: number of the `ForwardValue` with the new elements; None if only the shape of the primal or of
            a view of it changes.
        view: its shape afterwards; None if that does not change.
        unseen: whether the change is hidden from autograd.
        version: by how much eager advances its version counter.
    """

    primal: int
    value: int | None
    view: View | None
    unseen: bool
    version: int = 1

    @property
    def uncounted(self) -> int:
        """By how much the version counter is behind eager's after we make this update."""
        return self.version - (self.value is not None) - (self.view is not None)


#: What the function receives for an input. An alias shares the input's memory; a copy may be mutated.
EnteredAs = Literal["itself", "alias", "copy"]


@dataclass(frozen=True, eq=False)
class JointValues:
    """The result of a capture.

    Attributes:
        state: what was captured.
        gm: the joint graph; ``gm.meta["signature"]`` is `signature`.
        signature: the meaning of its placeholders and outputs.
        primals: indexed by `Primal.index` in the signature.
        values: indexed by `Output.index` in the signature.
        updates: in-place changes to make after the call.
        outputs: one plan per flat output of the function.
        out_spec: the pytree of the outputs.
        gradients: how to build the gradient of each destination of each region; no entry if it is undefined.
        by_dtype: leaves whose gradient was cast from another dtype, or summed, so that it would differ if the
            leaf asked for a ``grad_dtype`` other than its own dtype.
        shared: leaves whose gradient shares memory with a value that the backward reads or with another
            gradient.
        entered_as: what the function received in place of inputs that require grad and are not leaves.
        options: the options of the capture.
        offsets_matter: whether the function reads the storage offsets of its inputs.
        reenters: whether it has reentrant checkpoints. Here their gradients are part of the graph. Eager
            computes them in a nested backward, which some requests forbid and others do not reach.
    """

    state: CaptureState
    gm: fx.GraphModule
    signature: JointSignature
    primals: tuple[PrimalValue, ...]
    values: tuple[ForwardValue, ...]
    updates: tuple[Update, ...]
    outputs: tuple[OutputPlan, ...]
    out_spec: Any
    gradients: Mapping[tuple[int, Destination], Any] = field(default_factory=dict)
    by_dtype: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    entered_as: EnteredAs = "itself"
    options: CaptureOptions = field(default_factory=CaptureOptions)
    offsets_matter: bool = False
    reenters: bool = False

    @property
    def found(self) -> list[Any]:
        """The tensors that the function reached by itself."""
        return [primal.found for primal in self.primals if primal.found is not None]


class SavedKind(enum.Enum):
    """The origin of a saved value."""

    PRIMAL = "primal"
    OUTPUT = "output"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True, eq=False)
class Saved:
    """A value that is saved for the backward.

    Attributes:
        name: of its node in the joint graph.
        kind: where it is found after the forward.
        place: for `PRIMAL`, the number of the placeholder; for `OUTPUT` and `INTERMEDIATE`, of the output of
            the forward graph. An intermediate is an additional output.
        value: fake tensor, or symbolic number.
        by_eager: whether eager saves it too, so that the user must not modify it before the backward.
        is_view: whether it shares memory with an input, an output or another saved value.
        reread: whether eager reads it in a checkpoint, as it is then: the user may modify it until the
            backward.
    """

    name: str
    kind: SavedKind
    place: int
    value: Any
    by_eager: bool
    is_view: bool = False
    reread: bool = False

    @property
    def is_unchecked(self) -> bool:
        """Whether it is held without its version: a number, or what a checkpoint reads."""
        return self.is_number or self.reread

    @property
    def is_number(self) -> bool:
        """Whether it is a number rather than a tensor."""
        return not isinstance(self.value, torch.Tensor)

    @property
    def bytes(self) -> int:
        """Memory that lives only because of the save. Symbolic sizes count with their values at capture."""
        if self.is_number or self.is_view or self.kind is not SavedKind.INTERMEDIATE:
            return 0
        count = self.value.numel()
        if isinstance(count, torch.SymInt):  # the hint, because ``int(count)`` would specialise it
            count = count.node.hint or 0
        return int(count) * self.value.element_size()


@dataclass(frozen=True, eq=False)
class RegionBackward:
    """The backward of one region.

    Attributes:
        graph: takes the saved values, then the cotangents of the region's roots; returns its gradients in the
            order of the signature.
        saved: positions of its saved values among the partition's.
        checked: primals and outputs that eager saves for the region and we do not. Like eager, the backward
            raises if one of them was modified.
    """

    graph: LazyGraph
    saved: tuple[int, ...]
    checked: tuple[Saved, ...] = ()

    @property
    def gm(self) -> fx.GraphModule:
        """The graph, read if necessary."""
        return self.graph.gm


@dataclass(frozen=True, eq=False)
class Partition:
    """Forward and backward graphs of a joint graph.

    Attributes:
        joint: the joint graph that was divided.
        ahead: takes the primals; returns the forward outputs of the signature, then the saved intermediates,
            each in separate memory where that matters.
        saved: the saved values.
        backwards: one per region.
        overwritten: primals that the forward writes, and on whose earlier elements no gradient depends.
        written_ahead: primals that `ahead` itself writes. It returns None in place of their new values.
        released: primals that we need not hold to re-run a call.
    """

    joint: JointValues
    ahead: LazyGraph
    saved: tuple[Saved, ...]
    backwards: tuple[RegionBackward, ...]
    overwritten: frozenset[int] = frozenset()
    written_ahead: frozenset[int] = frozenset()
    released: frozenset[int] = frozenset()

    @property
    def forward(self) -> fx.GraphModule:
        """The forward graph, read if necessary."""
        return self.ahead.gm

    @property
    def graphs(self) -> list[LazyGraph]:
        """The forward graph, then those of the regions."""
        return [self.ahead, *(backward.graph for backward in self.backwards)]

    @property
    def saved_bytes(self) -> int:
        """Activation memory in bytes: saved between forward and backward, without inputs and outputs."""
        return sum(saved.bytes for saved in self.saved)
