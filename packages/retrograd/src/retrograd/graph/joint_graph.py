"""A function on its way through the stages: `CaptureState`, `JointValues`, `Partition`. All are frozen.

In: made by ``aot.create_state``, ``aot.capture`` and ``aot.partition``. Out: each is read by the stages that
follow. A state can be captured twice, and much later; a joint graph can be partitioned several times.
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
        name: ``args[0]``, ``layer.weight``.
        kind: what it is to the user; None for a constant, which the capture relies on.
        value: a fake tensor (or a wrapper subclass of fakes), a symbolic integer, or the constant itself.
        requires_grad, is_leaf: of the tensor that was given.
        same_as: an earlier leaf that is the very same tensor; else None.
    """

    name: str
    kind: PrimalKind | None
    value: Any
    requires_grad: bool = False
    is_leaf: bool = True
    same_as: int | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, given here for the first time."""
        return isinstance(self.value, torch.Tensor) and self.same_as is None


@dataclass(frozen=True)
class MemberView:
    """Where a leaf lies in the base of its group; sizes and strides in elements."""

    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_base: bool


@dataclass(frozen=True, eq=False)
class AliasGroup:
    """Leaves that share memory.

    Attributes:
        members: where each lies in the base.
        base: the tensor of which all are views, as a leaf of its own; None if there is none that autograd
            knows.
    """

    members: tuple[MemberView, ...]
    base: Leaf | None


@dataclass(frozen=True, eq=False)
class CaptureState:
    """A function and its inputs, ready to be captured.

    Attributes:
        name: of the function, for messages.
        call: the function of its flat inputs; returns what the user's function returns.
        leaves: the flat inputs: parameters and buffers first, then arguments.
        aliases: groups of leaves that share memory.
        thread_modes: the thread's modes under which it is called.
        fake_mode: of the fake values; its shape environment gets the guards.
        decompositions: applied while tracing.
        free: makes a fake of a real tensor that the function uses without being given it.
        in_spec: the pytree of ``(args, kwargs)``, whose leaves are the last of `leaves`; None if not known.
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
        """Whether some sizes are symbolic."""
        kinds = (torch.SymInt, torch.SymFloat)
        numbers = [
            number
            for leaf in self.leaves
            for number in (leaf.value.shape if isinstance(leaf.value, torch.Tensor) else (leaf.value,))
        ]
        return any(isinstance(number, kinds) for number in numbers)

    @property
    def uses_python_forms(self) -> bool:
        """Whether it is traced with torch's Python forms of operators: symbolic sizes need them, and a code
        generator is given what stock gives it, such as a dropout in one piece."""
        return self.is_symbolic or bool(self.decompositions)

    @property
    def tensors(self) -> list[int]:
        """Positions of the tensors among the leaves, each given once."""
        return [i for i, leaf in enumerate(self.leaves) if leaf.is_tensor]


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
    """A size that differs from call to call: the number of a `ForwardValue`."""

    value: int


@dataclass(frozen=True, eq=False)
class View:
    """How a tensor looks at the memory of its base; sizes and strides in elements, some of them `SizeValue`.

    Attributes:
        size, stride: of the view, if it is not made by `replay`.
        offset: relative to that of the base.
        differentiable: whether autograd sees through it; if not, it is one of the base's detached form.
        origin: what torch says about a view of which in-place changes are refused (``CreationMeta``); None if
            it is none.
        replay: makes the view of a base as the function made it; None to go by sizes and strides.
        numbers: with which `replay` makes it, in the order in which it asks for them; none if they are always
            the same.
        is_new_leaf: whether it requires grad though its base does not.
        is_detached: whether autograd does not call it a view, as what ``detach`` gives.
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
    """An output that is no tensor."""

    value: Any = field(compare=False)


@dataclass(frozen=True)
class ComputedOutput:
    """An output that the graph computes: the number of a `ForwardValue`."""

    value: int


@dataclass(frozen=True)
class SizeOutput:
    """An output that is the ``torch.Size`` of something."""

    sizes: tuple[int | SizeValue, ...]


@dataclass(frozen=True)
class SameAs:
    """An output that is the very tensor of a source: a leaf of the state by number, or after them those that
    the function found."""

    source: int


@dataclass(frozen=True)
class AliasOf:
    """An output that shares memory with a source (`SameAs.source`) or with a value of the graph.

    Attributes:
        made: the number of the value that it is, if it has a place in the order of the regions; others may be
            reached by way of it.
    """

    view: View
    source: int | None = None
    value: int | None = None
    made: int | None = None


OutputPlan = ConstantOutput | ComputedOutput | SizeOutput | SameAs | AliasOf


@dataclass(frozen=True, eq=False)
class ForwardValue:
    """A value that the forward half computes.

    Attributes:
        wrapping: how a wrapper subclass is built of the graph's outputs (a
        ``runtime.subclass.SubclassSpec``). boundary: where its cotangent goes in; None if it is not
        differentiable. is_visible: whether the user gets it; else it stands for a hidden boundary.
        requires_grad: whether it is a new leaf that requires grad. version: how often eager would have
        changed it in place, as its version counter says.
    """

    wrapping: Any
    boundary: int | None = None
    is_visible: bool = True
    requires_grad: bool = False
    version: int = 0


@dataclass(frozen=True, eq=False)
class PrimalValue:
    """An input of the graph: a leaf of the state, the base of an alias group, or a tensor that the function
    found.

    Attributes:
        name: for people.
        wrapping: how it is taken apart.
        differentiable: whether it gets a gradient.
        is_leaf: whether the gradient goes to its ``.grad``, rather than on through its history.
        leaf: position among the state's leaves; None for others.
        group: the alias group whose base it is; None for others.
        found: the tensor itself, if the function found it (in a closure, a global, an attribute).
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
    """What a call does to a primal in place.

    Attributes:
        primal: which one, by its number among the primals.
        value: number of the `ForwardValue` with the new elements; None if only its shape changes, or that of
            a view of it.
        view: the shape it has afterwards; None if that stays.
        unseen: whether autograd does not see the change.
        version: how often eager changes it in place, as its version counter says.
    """

    primal: int
    value: int | None
    view: View | None
    unseen: bool
    version: int = 1

    @property
    def uncounted(self) -> int:
        """How many changes of eager's are missing in the version counter after this one."""
        return self.version - (self.value is not None) - (self.view is not None)


#: an alias of an input has the same memory, a copy may be changed.
EnteredAs = Literal["itself", "alias", "copy"]


@dataclass(frozen=True, eq=False)
class JointValues:
    """All that was found out by capturing.

    Attributes:
        state: what was captured.
        gm: the joint graph; ``gm.meta["signature"]`` is `signature`.
        signature: what its placeholders and outputs mean.
        primals: by number, what `Primal.index` in the signature refers to.
        values: by number, what `Output.index` refers to.
        updates: changes in place, to be made after the call.
        outputs: one plan per flat output of the function.
        out_spec: the pytree of the outputs.
        gradients: how the gradient of each destination of each region is built; absent where it is undefined.
        by_dtype: leaves whose dtype decides what gradient they get: one of another dtype was cast, or several
            were added. A leaf may ask for another dtype than its own.
        shared: leaves whose gradient lies in memory that the backward reads elsewhere, or gives to others.
        entered_as: what the function was given in place of inputs that require grad and are no leaves.
        options: of the capture.
        offsets_matter: whether the function reads where its inputs begin in their memory.
        reenters: whether it has reentrant checkpoints. Their gradients are part of the graph here; eager
            makes them by another backward, which some requests forbid, and others do not reach.
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
        """The tensors that the function found by itself."""
        return [primal.found for primal in self.primals if primal.found is not None]


class SavedKind(enum.Enum):
    """Where a saved value comes from when the forward has run."""

    PRIMAL = "primal"
    OUTPUT = "output"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True, eq=False)
class Saved:
    """A value that the forward keeps for the backward.

    Attributes:
        name: of its node in the joint graph.
        kind: `PRIMAL`: the placeholder number `place`; `OUTPUT`: the forward output number `place`;
            `INTERMEDIATE`: an additional output of the forward graph, also numbered `place`.
        value: fake tensor, or symbolic number.
        by_eager: whether eager keeps it too, so that it must not change in between.
        is_view: whether its memory is that of an input, an output, or another saved value.
    """

    name: str
    kind: SavedKind
    place: int
    value: Any
    by_eager: bool
    is_view: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it is no tensor."""
        return not isinstance(self.value, torch.Tensor)

    @property
    def bytes(self) -> int:
        """Memory that lives only because it is saved; sizes that are symbolic count as at capture."""
        if self.is_number or self.is_view or self.kind is not SavedKind.INTERMEDIATE:
            return 0
        count = self.value.numel()
        if isinstance(count, torch.SymInt):  # not asked for its value, which would make it a constant
            count = count.node.hint or 0
        return int(count) * self.value.element_size()


@dataclass(frozen=True, eq=False)
class RegionBackward:
    """The backward of one region.

    Attributes:
        graph: takes the saved values, then the cotangents of the region's roots; gives its gradients, in the
            order of the signature.
        saved: which of the partition's saved values it takes.
        checked: primals and outputs that eager keeps for it and that are not saved as they are: like eager,
            the backward refuses to run if they have changed.
    """

    graph: LazyGraph
    saved: tuple[int, ...]
    checked: tuple[Saved, ...] = ()

    @property
    def gm(self) -> fx.GraphModule:
        """The graph itself."""
        return self.graph.gm


@dataclass(frozen=True, eq=False)
class Partition:
    """Forward and backward of a joint graph.

    Attributes:
        joint: what was divided.
        ahead: takes the primals; gives the forward outputs of the signature, then the saved intermediates,
            each in memory of its own where that matters.
        saved: what is kept.
        backwards: one per region.
        overwritten: primals that the forward writes, and whose elements before that no gradient depends on.
        written_ahead: primals that `ahead` writes by itself; it gives None in place of their new values.
        released: primals that a call need not hold to be run again.
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
        """The forward graph itself."""
        return self.ahead.gm

    @property
    def graphs(self) -> list[LazyGraph]:
        """That of the forward, then those of the regions."""
        return [self.ahead, *(backward.graph for backward in self.backwards)]

    @property
    def saved_bytes(self) -> int:
        """Activation memory in bytes: what lives between forward and backward and belongs to neither inputs
        nor outputs."""
        return sum(saved.bytes for saved in self.saved)
