"""Whose memory is it: what scenarios of aliases and mutations share.

In: tensors. Out: whether they share a storage, and how they lie in it, in a form that can be observed.
"""

from __future__ import annotations

from torch import Tensor


def share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def layout(tensor: Tensor) -> tuple[object, ...]:
    """Sizes, strides and offset."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def history(tensor: Tensor) -> tuple[bool, bool]:
    """Whether the tensor requires grad, and whether it is a leaf."""
    return tensor.requires_grad, tensor.is_leaf
