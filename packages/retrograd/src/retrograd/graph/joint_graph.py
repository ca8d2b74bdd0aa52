"""A captured function: its joint graph, and what the graph leaves to be done around it.

In: made by ``aot.capture``. Out: read by all later stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from retrograd.graph.capture_state import CaptureState
from retrograd.graph.joint import Destination, JointSignature


@dataclass(frozen=True)
class SizeValue:
    """A size that differs from call to call: the number of a `ForwardValue`."""

    value: int


@dataclass(frozen=True, eq=False)
class View:
    """How a tensor looks at the memory of its base; sizes and strides in elements, some of them `SizeValue`.

    Attributes:
        size, stride: of the view.
        offset: relative to that of the base.
        differentiable: whether autograd sees through it; if not, it is a detached alias.
        origin: what torch says about a view of which in-place changes are refused (``CreationMeta``); None if
            it is none.
        replay: makes the view of a base as the function made it; None to go by sizes and strides.
        is_new_leaf: whether it requires grad though its base does not.
    """

    size: tuple[int | SizeValue, ...]
    stride: tuple[int | SizeValue, ...]
    offset: int | SizeValue
    differentiable: bool
    replay: Callable[[Any], Any] | None = None
    origin: Any = None
    is_new_leaf: bool = False


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
    """An output that shares memory with a source (`SameAs.source`) or with a value of the graph."""

    view: View
    source: int | None = None
    value: int | None = None


OutputPlan = ConstantOutput | ComputedOutput | SizeOutput | SameAs | AliasOf


@dataclass(frozen=True, eq=False)
class ForwardValue:
    """A value that the forward half computes.

    Attributes:
        wrapping: how a wrapper subclass is built of the graph's outputs (a ``_torch.subclass.Layout``).
        boundary: where its cotangent goes in; None if it is not differentiable.
        is_visible: whether the user gets it; else it stands for a hidden boundary.
        requires_grad: whether it is a new leaf that requires grad.
    """

    wrapping: Any
    boundary: int | None = None
    is_visible: bool = True
    requires_grad: bool = False


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
        value: number of the `ForwardValue` with the new elements; None if only its shape changes.
        view: the shape it has afterwards; None if that stays.
        unseen: whether autograd does not see the change.
    """

    primal: int
    value: int | None
    view: View | None
    unseen: bool


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
        undefined_matters: regions in which a cotangent that is undefined is not the same as zeros.
        hooked_leaves: primals after whose gradients regions end, so that these become visible one by one.
        is_single_region: whether the outputs are differentiated together, not in eager's structure.
        sums_apart: whether a region hands over several contributions to one gradient one by one.
        offsets_matter: whether the function reads where its inputs begin in their memory.
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
    undefined_matters: frozenset[int] = frozenset()
    is_single_region: bool = False
    sums_apart: bool = False
    hooked_leaves: frozenset[int] = frozenset()
    offsets_matter: bool = False

    @property
    def found(self) -> list[Any]:
        """The tensors that the function found by itself."""
        return [primal.found for primal in self.primals if primal.found is not None]
