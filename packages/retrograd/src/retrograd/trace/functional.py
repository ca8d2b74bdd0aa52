"""Functionalisation: a trace turns mutations and views of tensors into values.

In: fake tensors, also inside wrapper subclasses. Out: functional tensors, their plain values, and which of
them were mutated. Calls with effects are traced as they are, in their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from types import MethodType
from typing import Any

import torch
from torch._higher_order_ops.effects import has_effects
from torch._prims_common import is_non_overlapping_and_dense_or_false, make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from retrograd.errors import not_representable
from retrograd.facts import fact
from retrograd.graph.fx import is_operator_overload, schema_of
from retrograd.runtime import pytree
from retrograd.runtime.tensor import inner_tensors, may_overlap, shares_elements, storage_of
from retrograd.trace.graph_tracer import recorded
from retrograd.trace.undeclared_writes import declaring_its_writes


def functional_mode(
    keeps_strides: bool = False, look_at: Callable[..., None] | None = None
) -> AbstractContextManager[Any]:
    """While open, operations on functional tensors are recorded without mutation.

    Calls that fill a tensor with random numbers in place are marked. (Higher-order operators accept only
    torch's own class of mode.)

    Args:
        keeps_strides: whether an in-place operation keeps strides that no kernel gives its results, as in
            eager. They matter: kernels without vectorised loads round differently, and some kernels choose a
            memory format by the stride of a dimension of size 1.
        look_at: called for each operator with the operator, its arguments and its keyword arguments.
    """
    mode: Any = FunctionalTensorMode()
    run = mode.__torch_dispatch__
    #: Views in which several elements share memory, and views of those. In-place writes to them are refused,
    #: because functionalisation would add up the writes.
    spread: dict[int, torch.Tensor] = {}

    def dispatch(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if look_at is not None:
            look_at(func, args, kwargs or {})
        if args and id(args[0]) in spread and _writes_to_first(func):
            raise not_representable(f"it calls {func} on what was expanded or unfolded, or on a part of that")
        changed = _changed_in_lists(func, args)
        if any(may_overlap(one, other) for one, other in combinations(changed, 2)):
            raise not_representable(f"{func} writes to tensors of which two share memory")
        plain_func = _without_mutation(func) if keeps_strides else None
        if plain_func is not None and _lies_as_no_result(args[0]):
            run(torch.ops.aten.copy_.default, types, (args[0], run(plain_func, types, args, kwargs)))
            return args[0]
        if has_effects(func):  # torch would order such calls by tokens, and the graph does by itself
            given, named = pytree.tree_map(plain, (args, kwargs or {}))
            made = func(*given, **named)
            with mode:
                return pytree.tree_map(to_functional, made)
        if (instead := declaring_its_writes(func, args)) is not None:
            operator, given, count = instead
            return run(operator, types, given, {})[:count]
        with recorded(fills_by=func) if fact("fills", func) else nullcontext():
            result = run(func, types, args, kwargs)
        torch.autograd.graph.increment_version(changed)  # functionalisation does not bump their versions
        if isinstance(result, FunctionalTensor) and args and result is args[0]:
            _keep_layout(result)
        for given in _outputs_given(func, kwargs or {}):
            _keep_layout(given)
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, FunctionalTensor) and _is_spread(func, args, one, spread):
                spread[id(one)] = one
        return result

    mode.__torch_dispatch__ = MethodType(dispatch, mode)
    return mode


@functools.cache
def _without_mutation(func: Any) -> Any:
    """The functional form of an in-place operator; None if `func` is no such operator, or has no such
    form."""
    name = func._schema.name
    if not name.startswith("aten::") or not name.endswith("_") or name == "aten::copy_":
        return None
    if torch.Tag.inplace_view in func.tags or fact("fills", func):
        return None
    packet = getattr(torch.ops.aten, name[len("aten::") : -1], None)
    return getattr(packet, func._overloadname, None)


def _lies_as_no_result(value: torch.Tensor) -> bool:
    """True if no kernel lays out a result like this: it has gaps, or unusual strides in dimensions of size 1.

    Images with one channel or one pixel may be in any memory format, and a fake does not tell which, so they
    count too. Views do not count: functionalisation regenerates a view after each mutation.
    """
    if not isinstance(value, torch.Tensor) or value._is_view() or value.layout is not torch.strided:
        return False
    if any(type(stride) is int and stride == 0 for stride in value.stride()):
        return False
    if not is_non_overlapping_and_dense_or_false(value):
        return True
    ones = [type(size) is int and size == 1 for size in value.shape]
    if value.dim() in (4, 5) and (ones[1] or all(ones[2:])):
        return True
    is_known = any(ones) and not value._has_symbolic_sizes_strides
    return is_known and value.is_contiguous() and value.stride() != make_contiguous_strides_for(value.shape)


def to_functional(value: Any) -> Any:
    """The tensor as a functional tensor; for a wrapper subclass, its inner tensors are converted.

    The result is a leaf if `value` is one. Other values are returned unchanged: some subclasses, such as
    DTensor, have inner attributes that are not tensors.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        made = transform_subclass(value, lambda _, inner: to_functional(inner))
        torch._mirror_autograd_meta_to(value, made)
        return made
    return FunctionalTensor.to_functional(value)


def plain(value: Any) -> Any:
    """The current value of a functional tensor. Other values are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        return transform_subclass(value, lambda _, inner: plain(inner))
    if isinstance(value, FunctionalTensor):
        torch._sync(value)  # type: ignore[attr-defined]
        return torch._from_functional_tensor(value.elem)
    return value


def _is_spread(func: Any, args: Sequence[Any], result: torch.Tensor, spread: Mapping[int, Any]) -> bool:
    is_part = bool(args) and id(args[0]) in spread and storage_key(result) == storage_key(args[0])
    return is_part or bool(fact("overlaps", func)) or shares_elements(result)


def _writes_to_first(func: Any) -> bool:
    """True if an operator writes to the elements of its first argument."""
    if not is_operator_overload(func) or torch.Tag.inplace_view in func.tags:
        return False
    return bool(schema_of(func).is_mutable and schema_of(func).arguments[0].is_write)


def _changed_in_lists(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in list arguments that an operator writes to.

    The operator writes to them one by one. Functionalised, it writes to all of them at once.
    """
    if not is_operator_overload(func) or not schema_of(func).is_mutable:
        return []
    pairs = zip(schema_of(func).arguments, args, strict=False)
    written = (given for one, given in pairs if isinstance(given, list) and one.is_write)
    return [each for given in written for each in given if isinstance(each, torch.Tensor)]


def _outputs_given(func: Any, kwargs: Mapping[str, Any]) -> list[FunctionalTensor]:
    """The tensors that an operator writes its results to (``out=``)."""
    if not kwargs or not is_operator_overload(func):
        return []
    given = [kwargs.get(one.name) for one in schema_of(func).arguments if one.is_out]
    return [one for one in given if isinstance(one, FunctionalTensor)]


def _keep_layout(value: FunctionalTensor) -> None:
    """Restore the strides of `value` after an in-place operation, which never changes them in eager.

    The functional operation that replaces it may return other strides, and later views would inherit them.
    """
    bare = torch._from_functional_tensor(value.elem)
    sizes, strides = tuple(value.shape), tuple(value.stride())
    if tuple(bare.shape) != sizes or not _lies_otherwise(bare, value):
        return
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], -sizes[dim]))
    made = bare.permute(order).clone(memory_format=torch.contiguous_format)
    made = made.permute([order.index(dim) for dim in range(len(sizes))])
    changed, base, is_unseen = value, value._base, Changes(value).is_unseen
    if _lies_otherwise(made, value):
        # `value` has gaps because it is a view of a larger tensor. That tensor kept its layout.
        if not isinstance(base, FunctionalTensor):
            return
        changed, made = base, plain(base)
    torch._functionalize_replace(changed.elem, made)
    torch._functionalize_commit_update(changed.elem)
    torch._sync(value)  # type: ignore[attr-defined]
    if is_unseen and not Changes(value).is_unseen:
        torch._functionalize_mark_mutation_hidden_from_autograd(value.elem)


def lost_layout(value: torch.Tensor) -> bool:
    """True if an in-place operation left `value` with other strides or another offset than in eager.

    `_keep_layout` cannot restore the layout of an input with gaps, or of one that does not begin at the start
    of its storage. Views taken afterwards get the wrong offsets and strides.
    """
    return isinstance(value, FunctionalTensor) and _lies_otherwise(plain(value), value, offsets_count=True)


def _lies_otherwise(one: torch.Tensor, other: torch.Tensor, offsets_count: bool = False) -> bool:
    """True if two tensors of the same sizes differ in strides that matter, or in their offsets if
    `offsets_count`."""
    triples = zip(other.shape, one.stride(), other.stride(), strict=True)
    try:
        if offsets_count and one.storage_offset() != other.storage_offset():
            return True
        return any(size > 1 and stride != wanted for size, stride, wanted in triples)
    except GuardOnDataDependentSymNode:  # an unbacked size
        return False


def is_traced(value: torch.Tensor) -> bool:
    """True if the tensor belongs to a trace; False for a real tensor that the function reached by itself."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return True
    return all(
        isinstance(inner, (FunctionalTensor, FakeTensor)) or torch._is_functional_tensor(inner)
        for inner in inner_tensors(value)
    )


def storage_key(value: torch.Tensor) -> tuple[int, ...]:
    """A key that is equal for tensors that share memory according to functionalisation."""
    return tuple(map(storage_of, inner_tensors(value)))


class Changes:
    """The mutations of a functional tensor so far, also those made through an alias.

    Attributes:
        elements: whether elements were written.
        shape: whether sizes, strides or the offset changed.
        memory: whether ``set_`` or a resize of the storage gave it other memory.
        is_unseen: whether autograd saw none of the writes, because of ``no_grad``, ``.data`` or the like.
    """

    def __init__(self, value: torch.Tensor) -> None:
        parts = [part.elem for part in _parts(value)]
        was_moved = torch._functionalize_was_storage_changed
        was_resized = torch._functionalize_was_inductor_storage_resized
        without_grad = torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode
        hidden = torch._functionalize_are_all_mutations_hidden_from_autograd
        self.elements = any(map(torch._functionalize_has_data_mutation, parts))  # type: ignore[attr-defined]
        self.shape = any(map(torch._functionalize_has_metadata_mutation, parts))
        self.memory = any(was_moved(part) or was_resized(part) for part in parts)
        self.is_unseen = all(without_grad(part) or hidden(part) for part in parts)


def any_changed(values: Iterable[Any]) -> bool:
    """True if one of these functional tensors was mutated. Other values are ignored."""
    found = [Changes(value) for value in values if isinstance(value, torch.Tensor)]
    return any(changes.elements or changes.shape or changes.memory for changes in found)


def mutations_of(value: torch.Tensor) -> tuple[Any, ...]:
    """A value that changes with each mutation of the tensor or of an alias of it."""
    counts = [torch._functionalize_mutation_counter(part.elem) for part in _parts(value)]
    return (*counts, *value.shape, *value.stride())


def _parts(value: torch.Tensor) -> list[Any]:
    return [part for part in inner_tensors(value) if isinstance(part, FunctionalTensor)]
