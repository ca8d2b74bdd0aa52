"""Tensor properties that only torch knows: memory, sharing, and the layout required of gradients.

In: real or fake tensors. Out: addresses, reference counts, and aliases unknown to autograd; the tensors
inside wrapper subclasses; groups that share memory, their bases, and regenerated views; gradients. The layout
contract for gradients is ``torch/csrc/autograd/utils/grad_layout_contract.h``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo import guards
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from retrograd.runtime.pytree import tree_leaves

Size = tuple[int, ...]

#: The tensor classes that do not override any operation.
PLAIN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})

_compared = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
_set_version: Any = torch._C._autograd._unsafe_set_version_counter
_use_count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
_compiled: Any = guards  # its annotations omit the functions that generated code calls


def addresses_are(tensors: list[Any], addresses: list[int], places: list[int]) -> bool:
    """Whether each of `tensors` at `places` has its address in `addresses` (one for each tensor)."""
    if _compared is not None:  # only in builds with CUDA
        return bool(_compared(tensors, addresses, places))
    return all(tensors[i].data_ptr() == addresses[i] for i in places)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the conjugate or the negative of what its memory contains."""
    return tensor.is_conj() or tensor.is_neg()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with its elements materialised if it is lazy; expanded dimensions stay expanded."""
    if not is_lazy(tensor):
        return tensor
    once = tensor[tuple([slice(None) if stride else slice(1) for stride in tensor.stride()])]
    return once.resolve_conj().resolve_neg().expand(tensor.shape)


def geometry_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Sizes and strides; None if they do not determine the elements: for lazily conjugated or negated, sparse
    and vmap-batched tensors."""
    functorch = torch._C._functorch
    if tensor.layout is not torch.strided or is_lazy(tensor):
        return None
    if functorch.is_legacy_batchedtensor(tensor) or functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.shape, tensor.stride()


def storage_of(tensor: torch.Tensor) -> int:
    """An identity for the storage of `tensor`, unique among live storages."""
    return int(tensor.untyped_storage()._cdata)


def memory_of(tensor: torch.Tensor) -> int:
    """The address at which the storage of `tensor` begins."""
    return tensor.untyped_storage().data_ptr()


def holders(storages: Sequence[int]) -> list[int]:
    """The reference count of each storage (from `storage_of`; it must be alive)."""
    count = torch._C._storage_Use_Count
    return [count(storage) for storage in storages]


def are_only_here(values: list[Any], places: Collection[int]) -> bool:
    """Whether only the list references the tensors at `places`, in Python and in C++."""
    get = values.__getitem__
    # two references: the list, and the argument of the call
    return (
        max(map(sys.getrefcount, map(get, places)), default=0) <= 2
        and max(map(_use_count, map(get, places)), default=0) <= 1
    )


def reinterpreted(
    tensor: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], further: Any = 0
) -> torch.Tensor:
    """A tensor over the memory of `tensor`, starting `further` elements after its start. Autograd does not
    know it as a view."""
    made: torch.Tensor = _compiled._reinterpret_tensor(tensor, tuple(size), tuple(stride), further)
    return made


def unowned(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A second storage over the memory of `tensor` that does not keep the memory alive."""
    memory = tensor.untyped_storage()
    make: Any = torch._C._construct_storage_from_data_pointer
    made: torch.UntypedStorage = make(memory.data_ptr(), tensor.device, memory.nbytes())
    return made


def placed_on(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in `storage` with the offset, sizes and strides of `tensor`."""
    where = tensor.storage_offset(), tensor.shape, tensor.stride()
    with torch.inference_mode(False):
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *where)


def new_memory(device: torch.device) -> Callable[[Size, Size, torch.dtype], torch.Tensor]:
    """The fastest function that currently allocates on `device`, from size, strides and dtype."""
    if device.type == "cpu":
        return _compiled._empty_strided_cpu
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        return _compiled._empty_strided_cuda
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the version counters of tensors."""
    if not torch.is_inference_mode_enabled():
        _set_version(tuple(tensors), tuple(versions))


def whole_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A flat tensor from the first to the last element of tensors of one dtype in one storage."""
    begin = min(tensor.storage_offset() for tensor in tensors)
    end = max(map(_end, tensors))
    return reinterpreted(tensors[0], (end - begin,), (1,), begin - tensors[0].storage_offset())


def _end(tensor: torch.Tensor) -> int:
    first, last = _extent(tensor)
    return int(last) + 1 if tensor.numel() else int(first)


# tensors inside others, and tensors that share memory


def inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a wrapper subclass, in the order in which it names them; or the tensor itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    parts = [getattr(value, name) for name in names]
    return [inner for part in parts if isinstance(part, torch.Tensor) for inner in inner_tensors(part)]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def groups_sharing_memory(tensors: Mapping[int, torch.Tensor]) -> list[tuple[int, ...]]:
    """Groups of keys whose tensors share memory. Tensors that share with no other are not listed."""
    by_storage: dict[int, list[int]] = {}
    places: dict[int, tuple[int, int]] = {}
    any_foreign = False
    for key, tensor in tensors.items():
        for inner in inner_tensors(tensor):
            if inner.layout is torch.strided and not _is_without_memory(inner):
                by_storage.setdefault(storage_of(inner), []).append(key)
                if not isinstance(inner, FakeTensor):
                    storage = inner.untyped_storage()
                    places[storage_of(inner)] = (storage.data_ptr(), storage.nbytes())
                    any_foreign |= is_foreign(inner)
    if any_foreign:
        by_storage = _joined(by_storage, places)
    groups = {tuple(dict.fromkeys(keys)) for keys in by_storage.values()}
    return [group for group in sorted(groups) if len(group) > 1]


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether the memory was allocated outside of torch, as by NumPy. Two storages may then overlap."""
    return not tensor.untyped_storage().resizable()


def _joined(
    by_storage: Mapping[int, list[int]], places: Mapping[int, tuple[int, int]]
) -> dict[int, list[int]]:
    """Merge the keys of storages that overlap."""
    joined: dict[int, list[int]] = {}
    last, end = 0, 0
    for storage in sorted(by_storage, key=lambda one: places.get(one, (0, 0))):
        begin, size = places.get(storage, (0, 0))
        if not size or begin >= end:
            last, end = storage, begin
        joined.setdefault(last, []).extend(by_storage[storage])
        end = max(end, begin + size)
    return {storage: sorted(keys) for storage, keys in joined.items()}


def _is_without_memory(tensor: torch.Tensor) -> bool:
    size = tensor.untyped_storage().nbytes()
    return isinstance(size, int) and size == 0


def common_base(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor of which all are views, as autograd sees it. For inference tensors without one, a flat
    tensor over all of their memory. Otherwise None. Only for plain tensors of one dtype.

    Other tensors in one memory, such as a tensor and its ``.data``, may have separate version counters."""
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for t in tensors):
        return None
    if len({t.dtype for t in tensors}) > 1 or len({storage_of(t) for t in tensors}) > 1:
        return None
    bases = [t._base if t._is_view() and t._base is not None else t for t in tensors]
    if all(base is bases[0] for base in bases):
        return bases[0] if bases[0].dtype == tensors[0].dtype else None
    if not all(t.is_inference() for t in tensors):
        return None
    storage = tensors[0].untyped_storage()
    with torch.no_grad():
        flat = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)
        return flat.set_(storage, 0, (storage.nbytes() // flat.element_size(),), (1,))


def view_origin(view: torch.Tensor) -> Any:
    """Why torch would refuse to modify this view in place (``CreationMeta``); None for an ordinary view."""
    if not view._is_view():
        return None
    origin = torch._C._autograd._get_creation_meta(view)
    return None if origin == torch._C._autograd.CreationMeta.DEFAULT else origin


def with_view_origin(make: Callable[[], torch.Tensor], origin: Any) -> torch.Tensor:
    """Call `make`, and mark the view so that torch refuses in-place changes as for a view of this
    `origin`."""
    kinds = torch._C._autograd.CreationMeta
    with torch.set_grad_enabled(torch.is_grad_enabled() and origin != kinds.NO_GRAD_MODE):
        view = make()
    if view._is_view():  # in inference mode, none is
        torch._C._autograd._set_creation_meta(view, origin)
    return view


#: Add each tensor of the second list to its counterpart in the first, in one call.
add_each = torch._foreach_add_
#: Dtypes for which torch has no kernels that copy many tensors at once.
_ONE_BY_ONE = frozenset({torch.uint16, torch.uint32, torch.uint64})
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


def copy_each(targets: Tensors, sources: Tensors) -> None:
    """Copy each of `sources` into its counterpart in `targets`. If all have one dtype, a device needs only a
    few kernels for this."""
    if targets[0].dtype in _ONE_BY_ONE:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(targets, sources)


def by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of the tensors of each dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(place)
    return list(groups.values())


def lies_within(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether all elements of `view` lie between the first and last of `base`; both share memory."""
    first, last = _extent(view)
    lowest, highest = _extent(base)
    return bool(lowest <= first and last <= highest)


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share a storage and their extents overlap."""
    (first, last), (lowest, highest) = _extent(one), _extent(other)
    return storage_of(one) == storage_of(other) and bool(first <= highest and lowest <= last)


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is expanded, so that several elements share one memory location. Creates no guard."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(
        type(stride) is int and stride == 0 and (type(size) is not int or size > 1) for size, stride in pairs
    )


def _extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    first = tensor.storage_offset()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + sum((size - 1) * stride for size, stride in pairs)


# gradients


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory extent, each location exactly once."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def has_overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share a memory location; for symbolic sizes, whether `tensor` is expanded."""
    if tensor._has_symbolic_sizes_strides:
        return any(type(stride) is int and stride == 0 for stride in tensor.stride())
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def obeys_layout_contract(grad: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether a dense `grad` has the strides required of ``variable.grad``."""
    if grad.is_nested or variable.layout is not torch.strided:
        return False
    if variable.is_contiguous() and grad.stride() == variable.stride():  # fast path for the common case
        return 0 not in grad.stride()
    if not is_dense(variable):
        return grad.is_contiguous()
    return all(
        stride == owed if size != 1 else stride != 0
        for size, stride, owed in zip(grad.shape, grad.stride(), variable.stride(), strict=False)
    )


#: torch's own accessor: a subclass may define a property ``grad``, which eager's C++ does not call.
_grad: Any = torch._C.TensorBase.grad
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor], None] = _grad.__set__


def set_grad_of_another_shape(variable: torch.Tensor, grad: torch.Tensor) -> None:
    """Set the ``.grad`` of a leaf whose ``data`` now has another size or dtype. Python refuses this; the
    engine does not check."""
    leaf: Any = variable
    data = leaf.data
    try:
        leaf.data = torch.empty((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
        set_grad(leaf, grad)
    finally:
        leaf.data = data


def accumulate_in_node(variable: torch.Tensor, grad: torch.Tensor) -> None:
    """Make the AccumulateGrad node of `variable` write its ``.grad``, with the node's warnings but without
    any hook."""
    leaf: Any = variable
    with torch.enable_grad():
        copy = leaf.view_as(leaf) if leaf.layout is torch.strided else leaf.clone()  # sparse has no views
        node = copy.grad_fn.next_functions[0][0]
    hooks = leaf._post_accumulate_grad_hooks or {}
    kept = dict(hooks)
    hooks.clear()  # otherwise the node would call them; the plan calls them later
    try:
        node(grad)
    finally:
        hooks.update(kept)


def zeros_of_slot(node: Any, slot: int) -> Callable[[], torch.Tensor]:
    """A function that makes zeros for an undefined gradient of the forward's differentiable output `slot`. It
    does not reference `node`."""
    metadata = node._input_metadata[slot]
    return functools.partial(torch.zeros, metadata.shape, dtype=metadata.dtype, device=metadata.device)


def graph_is_kept() -> bool:
    """Whether the current backward was asked to retain the graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_batched(value: Any) -> bool:
    """Whether `value` is a tensor of torch's older vmap, which ``is_grads_batched`` uses."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def is_not_in_memory(value: Any) -> bool:
    """Whether the elements of a tensor differ from those in its memory, which generated code reads: it is
    lazily conjugated or negated, a zero tensor without memory, or batched."""
    if not isinstance(value, torch.Tensor):
        return False
    return is_lazy(value) or value._is_zerotensor() or is_batched(value)
