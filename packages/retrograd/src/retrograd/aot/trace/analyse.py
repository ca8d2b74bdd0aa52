"""Analyse a traced function's side effects: in-place mutations, and outputs that share memory.

In: the inputs of a trace after the function ran, and its flat outputs. Out: an `Analysis`: the values that
the graph must compute, the mutations to apply after a call, and a plan for every output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from retrograd.engine import edge_of, leads_to, nodes_below, passes_through_function, versions_of
from retrograd.errors import not_representable
from retrograd.graph.joint_graph import (
    AliasOf,
    ComputedOutput,
    ConstantOutput,
    ForwardValue,
    OutputPlan,
    PrimalValue,
    SameAs,
    SizeOutput,
    SizeValue,
    Update,
    View,
)
from retrograd.runtime.subclass import ATOMS, is_wrapper, layout_of, parts_of
from retrograd.runtime.tensor import is_dense, lies_within, shares_elements, view_origin
from retrograd.trace import Changes, calls_between, is_traced, lost_layout, plain, storage_key

if TYPE_CHECKING:
    from retrograd.aot.trace.enter import Inputs


@dataclass(frozen=True, eq=False)
class TracedValue:
    """A traced value that the forward computes.

    Attributes:
        value: a functional tensor or a number.
        is_visible: whether the user gets the value.
        is_seen: whether autograd sees the value; False for a mutation made without autograd.
        view: set if the value only stands for this view, which the call makes instead of the graph.
    """

    value: Any
    is_visible: bool = True
    is_seen: bool = True
    view: torch.Tensor | None = None

    def parts(self) -> list[Any]:
        """The plain tensors and numbers that the graph returns for this value."""
        bare = plain(self.value)
        return parts_of(bare, layout_of(bare))

    @property
    def is_new_leaf(self) -> bool:
        """Whether the value is a leaf that the function created."""
        value = self.value
        return (
            isinstance(value, torch.Tensor) and self.is_seen and value.requires_grad and value.grad_fn is None
        )

    def described(self, boundary: int | None) -> ForwardValue:
        """The metadata that later stages need; `boundary` is where the value's cotangent enters."""
        wrapping, version = layout_of(plain(self.value)), _version(self.value)
        is_view = isinstance(self.value, torch.Tensor) and self.value._is_view()
        return ForwardValue(wrapping, boundary, self.is_visible, self.is_new_leaf, version, is_view)


class Analysis:
    """What a function computes, mutates and returns.

    Args:
        inputs: the inputs after the function ran.
        results: the function's flat outputs.

    Attributes:
        values: the values that the graph must compute.
        updates: the mutations to apply after a call.
        outputs: a plan for each output.

    Raises:
        Refusal: the function did something that a compiled call cannot reproduce.
    """

    def __init__(self, inputs: Inputs, results: Sequence[Any]) -> None:
        self._inputs = inputs
        self.values: list[TracedValue] = []
        self.updates = tuple(self._updates())
        self.outputs = tuple(self._plans(results))

    def add(self, value: TracedValue) -> int:
        """Add a value and return its number; a tensor that was added before keeps its number."""
        for number, known in enumerate(self.values):
            if known.value is value.value and isinstance(value.value, torch.Tensor):
                return number
        self.values.append(value)
        return len(self.values) - 1

    def _size(self, size: int | torch.SymInt) -> int | SizeValue:
        if isinstance(size, torch.SymInt):
            return SizeValue(self.add(TracedValue(size, is_visible=False)))
        return int(size)

    def _updates(self) -> Iterator[Update]:
        inputs = self._inputs
        for number, (primal, tensor) in enumerate(zip(inputs.primals, inputs.entered, strict=True)):
            if tensor is None:
                continue
            _refuse_state_changes(primal, inputs.leaves[number])
            changes = Changes(tensor)
            members = inputs.state.aliases[primal.group].members if primal.group is not None else ()
            sharing = [inputs.entries[member.leaf] for member in members]
            if any(Changes(member).shape for member in sharing):
                raise not_representable("it changes the shape of an input whose memory another one shares")
            # An ``out=`` argument of another shape is resized, which no counter shows.
            now = plain(tensor).shape if changes.elements else tensor.shape
            if changes.memory or [*map(str, now)] != [*map(str, tensor.shape)]:
                raise not_representable(f"it gives {primal.name} other memory (set_, or a resize)")
            version = max(map(_version, [tensor, *sharing]))
            is_as_it_was = tensor.grad_fn is inputs.histories[number]
            # The version may also count a changed shape of a view of this input.
            is_counted = version and (is_as_it_was or not primal.differentiable)
            if not changes.elements and not changes.shape and not is_counted:
                continue
            if changes.elements and shares_elements(primal.fake):
                raise not_representable(f"it changes {primal.name}, an expanded tensor")
            if any(bared is tensor for bared in inputs.bared):
                raise not_representable(
                    f"it may change {primal.name} through .data, which no version counter shows"
                )
            if changes.elements and _is_strided_outside(tensor, primal.fake, inputs.strided):
                raise not_representable(
                    f"it changes {primal.name}, and asks by as_strided for what is beside it"
                )
            unseen = is_as_it_was and changes.is_unseen
            if changes.shape and (primal.wrapping.cls is not None or primal.differentiable):
                raise not_representable(
                    f"it changes the shape of {primal.name}, which is differentiable or a subclass"
                )
            view = self._view(tensor, primal.fake, True) if changes.shape else None
            value = self.add(TracedValue(tensor, False, not unseen)) if changes.elements else None
            yield Update(number, value, view, unseen, version)

    def _view(self, tensor: torch.Tensor, base: torch.Tensor, differentiable: bool) -> View:
        """An ``as_strided`` view."""
        offset = tensor.storage_offset() - base.storage_offset()
        if type(offset) is not int and tensor.is_complex():
            # The graph computes the offset from intermediate views, and torch copies lazily conjugated ones.
            raise not_representable(
                "it returns a part of complex memory whose place depends on symbolic sizes"
            )
        return View(
            tuple(self._size(size) for size in tensor.shape),
            tuple(self._size(stride) for stride in tensor.stride()),
            self._size(offset),
            differentiable,
            origin=view_origin(tensor),
            is_new_leaf=_is_new_leaf(tensor),
            is_detached=not tensor._is_view(),
        )

    def _replayed(self, tensor: torch.Tensor, base: torch.Tensor) -> View | None:
        """A view that torch replays as the function made it. None if torch cannot: it does not know of later
        in-place changes of the shape."""
        numbers: list[Any] = []
        if not tensor._is_view() or tensor._base is not base:
            return None
        with torch.no_grad():
            replica = tensor._view_func_unsafe(base, lambda number: (numbers.append(number), number)[1])  # type: ignore[func-returns-value]
        if [*map(str, (*replica.shape, *replica.stride()))] != [*map(str, (*tensor.shape, *tensor.stride()))]:
            return None
        varying = numbers if any(type(number) is not int for number in numbers) else ()
        return View(
            differentiable=tensor.requires_grad,
            replay=tensor._view_func_unsafe,
            numbers=tuple(self._size(number) for number in varying),
            origin=view_origin(tensor),
            is_new_leaf=_is_new_leaf(tensor),
        )

    def _plans(self, results: Sequence[Any]) -> Iterator[OutputPlan]:
        self._sources: dict[tuple[int, ...], list[int]] = {}
        for source, entry in enumerate(self._inputs.entries):
            if isinstance(entry, torch.Tensor):
                self._sources.setdefault(storage_key(entry), []).append(source)
        self._sharing: dict[tuple[int, ...], dict[int, Any]] = {}
        for output in results:
            if isinstance(output, torch.Tensor) and is_traced(output):
                self._sharing.setdefault(storage_key(output), {})[id(output)] = output
        # A tensor that is returned twice has one plan, so that the caller gets one tensor twice.
        outputs = {id(output): output for output in results}
        plans = {key: self._plan(output) for key, output in outputs.items()}
        views = [outputs[key] for key, plan in plans.items() if self._has_place(outputs[key], plan)]
        above = {id(view): [other for other in views if _passes_by(view, other)] for view in views}
        for view in sorted(views, key=lambda view: len(above[id(view)])):
            nearest = max(above[id(view)], key=lambda other: len(above[id(other)]), default=None)
            plans[id(view)] = self._placed(view, plans, nearest)
        yield from (plans[id(output)] for output in results)

    def _has_place(self, output: Any, plan: OutputPlan) -> bool:
        """Whether `output` is a view with a ``grad_fn`` whose base is differentiable and not mutated. The
        gradients of other outputs may then flow through this view."""
        if not isinstance(plan, AliasOf) or output.grad_fn is None or is_wrapper(output):
            return False
        if plan.source is None:
            return plan.view.differentiable
        numbers = [number for number, primal in enumerate(self._inputs.primals) if primal.leaf == plan.source]
        changed = [update.primal for update in self.updates]
        return any(self._inputs.primals[n].differentiable and n not in changed for n in numbers)

    def _placed(
        self, output: torch.Tensor, plans: Mapping[int, OutputPlan], above: torch.Tensor | None
    ) -> OutputPlan:
        """The plan for a view with its own place in the autograd graph. If it was made from another returned
        view, `above` is the nearest such view, and the plan is a view of that one."""
        made = self.add(TracedValue(stand_in(output), is_visible=False, view=output))
        plan, base = plans[id(output)], plans.get(id(above))
        assert isinstance(plan, AliasOf)
        if above is None:
            return replace(plan, made=made)
        assert isinstance(base, AliasOf)
        numbers: list[int | SizeValue] = []
        if (calls := calls_between(above, output, lambda n: numbers.append(self._size(n)))) is not None:
            view = View(replay=calls, numbers=tuple(numbers), origin=view_origin(output))
        elif _is_window(output, above):
            view = self._by_strides(output, above, True)
        else:
            raise not_representable("it returns a view of another one that it returns, by more than strides")
        return AliasOf(view, value=base.made, made=made)

    def _plan(self, output: Any) -> OutputPlan:
        if isinstance(output, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return ComputedOutput(self.add(TracedValue(output)))
        if isinstance(output, torch.Size):
            return SizeOutput(tuple(self._size(size) for size in output))
        if not isinstance(output, torch.Tensor):
            if not isinstance(output, ATOMS):
                raise not_representable(
                    f"it returns a {type(output).__name__}, which may hold what was traced"
                )
            return ConstantOutput(output)
        if not is_traced(output):
            output = self._inputs.found(output)
        for source, entry in enumerate(self._inputs.entries):
            if entry is output:
                return SameAs(source)
        key = storage_key(output)
        if key in self._sources:
            source = self._source(output, self._sources[key])
            return AliasOf(self._seen(output, self._inputs.entries[source]), source=source)
        return self._computed(output, list(self._sharing[key].values()))

    def _source(self, output: torch.Tensor, sources: Sequence[int]) -> int:
        """The first input that contains `output`, among the inputs that share its memory. If no input
        contains it, the first that shares its memory."""
        if len(sources) == 1:
            return sources[0]
        entries = self._inputs.entries
        return next((source for source in sources if lies_within(output, entries[source])), sources[0])

    def _computed(self, output: torch.Tensor, sharing: Sequence[torch.Tensor]) -> OutputPlan:
        if output._is_view() and _was_reshaped_unseen(output):
            raise not_representable("it returns a view whose shape it changed in place, unseen by autograd")
        is_without_history = output._is_view() and output.requires_grad and output.grad_fn is None
        if len(sharing) == 1 and (is_wrapper(output) or not is_without_history):
            return ComputedOutput(self.add(TracedValue(output)))
        base = next((other for other in sharing if other._is_view() and other.requires_grad), sharing[0])
        base = next((other for other in sharing if not other._is_view() and other.requires_grad), base)
        if base._is_view() and base._base is not None:
            base = base._base
        number = self.add(TracedValue(base))
        if base is output:
            return ComputedOutput(number)
        return AliasOf(self._seen(output, base), value=number)

    def _seen(self, output: torch.Tensor, base: torch.Tensor) -> View:
        """How a call makes `output` as a view of `base`."""
        differentiable = output.requires_grad
        if differentiable and output.grad_fn is not None and not base.requires_grad:
            raise not_representable("it makes a view a leaf, and returns a view of that")
        if differentiable and passes_through_function(output, base):
            raise not_representable(
                "a Function returns a view of what it was given, which the caller gets as well"
            )
        if output.grad_fn is not None and base.requires_grad and not leads_to(output, base):
            raise not_representable(
                "it returns a view of a view that was made under no_grad, which is a leaf of its own"
            )
        kinds = [(one.dtype, type(one), one.is_conj(), one.is_neg()) for one in (output, base)]
        is_otherwise = kinds[0] != kinds[1] or is_wrapper(output) or lost_layout(base)
        # Of a dimension of size one, a fake view may have another stride than a real one.
        has_ones = any(type(size) is int and size == 1 for size in output.shape)
        if differentiable or is_otherwise or has_ones or output.is_complex():
            if (replayed := self._replayed(output, base)) is not None:
                return replayed
            if is_otherwise or (differentiable and shares_elements(base)):
                raise not_representable("it returns a view that torch cannot make again")
        return self._by_strides(output, base, differentiable)

    def _by_strides(self, output: torch.Tensor, base: torch.Tensor, differentiable: bool) -> View:
        """An ``as_strided`` view of `base`, which skips the views in between."""
        memory = storage_key(output)
        windows = [(window, of) for window, of in self._inputs.strided if storage_key(of) == memory]
        if differentiable and not all(is_dense(of) and lies_within(window, of) for window, of in windows):
            raise not_representable(
                "it asks by as_strided for what lies beside a view, and returns another view of that memory"
            )
        return self._view(output, base, differentiable)


def _is_strided_outside(
    tensor: torch.Tensor, fake: torch.Tensor, strided: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> bool:
    """Whether the function read memory outside of `tensor`, a mutated input, by ``as_strided``. Any such call
    counts unless the input's storage offset is 0, because its new value in the graph has offset 0."""
    key, offset = storage_key(tensor), fake.storage_offset()
    is_first = type(offset) is int and offset == 0
    return any(
        storage_key(of) == key
        and not (is_first and storage_key(window) == key and lies_within(window, tensor))
        for window, of in strided
    )


def _version(value: Any) -> int:
    """How often the trace changed `value` in place."""
    return versions_of([value])[0] or 0


def _refuse_state_changes(primal: PrimalValue, leaf: torch.Tensor) -> None:
    if leaf.requires_grad != primal.differentiable and leaf.grad_fn is None:
        raise not_representable(f"it switches requires_grad of {primal.name}")
    if leaf.is_leaf and leaf.grad is not None:
        raise not_representable(f"it runs a backward that accumulates into {primal.name}")


def _is_new_leaf(tensor: torch.Tensor) -> bool:
    """Whether the function has made a view a leaf. A view made under `no_grad` may look like one, but has no
    gradient edge."""
    return tensor.requires_grad and tensor.grad_fn is None and edge_of(tensor)[0] is not None


def _was_reshaped_unseen(view: torch.Tensor) -> bool:
    """Whether the node of `view` is that of a tensor of another shape: eager makes the view another one."""
    node: Any = view.grad_fn
    return node is not None and tuple(node._input_metadata[view.output_nr].shape) != tuple(view.shape)


def _is_window(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether `view` lies within `base`, has its dtype, and no two elements of `base` overlap."""
    return view.dtype == base.dtype and not shares_elements(base) and lies_within(view, base)


def _passes_by(view: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `view` was made from `other`, another view of the same memory."""
    end = edge_of(other)
    return (
        view is not other
        and storage_key(view) == storage_key(other)
        and any(
            end in node.next_functions
            for node in nodes_below([edge_of(view)], (end[0],))
            if node is not end[0]
        )
    )


def stand_in(like: Any) -> torch.Tensor:
    """A tensor with the shape, dtype and device of `like`; its strides are zero, so it takes no memory."""
    shape = tuple(like.shape)
    return torch.empty_strided(shape, (0,) * len(shape), dtype=like.dtype, device=like.device)
