"""Which tensors share memory, and what they are views of.

In: real or fake tensors. Out: groups, bases, and views made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from retrograd._torch.tensor import storage_of
from retrograd._torch.trace.functional import inner_tensors


def groups_sharing_memory(tensors: Mapping[int, torch.Tensor]) -> list[tuple[int, ...]]:
    """Keys of tensors that share memory with another one, group by group."""
    by_storage: dict[int, list[int]] = {}
    places: dict[int, tuple[int, int]] = {}
    any_foreign = False
    for key, tensor in tensors.items():
        for inner in inner_tensors(tensor):
            if inner.layout is torch.strided and not _is_empty(inner):
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
    """Whether the memory was made outside of torch, as NumPy's. Two storages may show the same of it."""
    return not tensor.untyped_storage().resizable()


def _joined(
    by_storage: Mapping[int, list[int]], places: Mapping[int, tuple[int, int]]
) -> dict[int, list[int]]:
    """The keys of storages that overlap, together."""
    joined: dict[int, list[int]] = {}
    last, end = 0, 0
    for storage in sorted(by_storage, key=lambda one: places.get(one, (0, 0))):
        begin, size = places.get(storage, (0, 0))
        if not size or begin >= end:
            last, end = storage, begin
        joined.setdefault(last, []).extend(by_storage[storage])
        end = max(end, begin + size)
    return {storage: sorted(keys) for storage, keys in joined.items()}


def _is_empty(tensor: torch.Tensor) -> bool:
    size = tensor.untyped_storage().nbytes()
    return isinstance(size, int) and size == 0


def common_base(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor of which all are views, as autograd sees it; else all of their memory, if none is
    differentiable; else None. Only for plain tensors of one dtype."""
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for t in tensors):
        return None
    if len({t.dtype for t in tensors}) > 1 or len({storage_of(t) for t in tensors}) > 1:
        return None
    bases = [t._base if t._is_view() and t._base is not None else t for t in tensors]
    if all(base is bases[0] for base in bases):
        return bases[0] if bases[0].dtype == tensors[0].dtype else None
    if any(t.requires_grad for t in tensors):
        return None
    storage = tensors[0].untyped_storage()
    with torch.no_grad():
        flat = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)
        return flat.set_(storage, 0, (storage.nbytes() // flat.element_size(),), (1,))


def view_origin(view: torch.Tensor) -> Any:
    """Why torch would refuse to change this view in place (``CreationMeta``); None for an ordinary view."""
    if not view._is_view():
        return None
    origin = torch._C._autograd._get_creation_meta(view)
    return None if origin == torch._C._autograd.CreationMeta.DEFAULT else origin


def with_view_origin(make: Callable[[], torch.Tensor], origin: Any) -> torch.Tensor:
    """The view that `make` makes, for which torch refuses in-place changes as it would for one of this
    `origin`."""
    kinds = torch._C._autograd.CreationMeta
    with torch.set_grad_enabled(torch.is_grad_enabled() and origin != kinds.NO_GRAD_MODE):
        view = make()
    torch._C._autograd._set_creation_meta(view, origin)
    return view


def copy_each(written: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Write each of `values` into the tensor at its place in `written`, with one call for all."""
    torch._foreach_copy_(written, values)


def add_each(totals: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Add each of `values` to the tensor at its place in `totals`, in place, with one call for all."""
    torch._foreach_add_(totals, values)


def lies_within(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether all elements of `view` lie between the first and the last of `base`, whose memory it shows."""
    first, last = _extent(view)
    lowest, highest = _extent(base)
    return bool(lowest <= first and last <= highest)


def _extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    first = tensor.storage_offset()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + sum((size - 1) * stride for size, stride in pairs)
