"""Functionalisation: tensors whose mutations and views a trace turns into values.

In: fake tensors, also inside wrapper subclasses. Out: functional tensors, their plain values again, and what
was done to them in place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from retrograd._torch.fx import fills_with_random_numbers
from retrograd._torch.trace.graph_tracer import noted


def functional_mode() -> AbstractContextManager[Any]:
    """While open, operations on functional tensors are recorded without mutation; calls that filled a tensor
    with random numbers in place are noted. (Operators of higher order know torch's class of mode only.)"""
    mode: Any = FunctionalTensorMode(_allow_token_discovery=True)
    run = mode.__torch_dispatch__

    def dispatch(_: Any, func: Any, *args: Any) -> Any:
        with noted(fills_by=func) if fills_with_random_numbers(func) else nullcontext():
            return run(func, *args)

    mode.__torch_dispatch__ = MethodType(dispatch, mode)
    return mode


def to_functional(value: torch.Tensor) -> torch.Tensor:
    """The tensor, functional; of a wrapper subclass the inner tensors. It is a leaf, as `value` was given."""
    if is_traceable_wrapper_subclass(value):
        made = transform_subclass(value, lambda _, inner: to_functional(inner))
        torch._mirror_autograd_meta_to(value, made)
        return made
    return FunctionalTensor.to_functional(value)


def plain(value: Any) -> Any:
    """The value that a functional tensor has now. Anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        return transform_subclass(value, lambda _, inner: plain(inner))
    if isinstance(value, FunctionalTensor):
        torch._sync(value)  # type: ignore[attr-defined]
        return torch._from_functional_tensor(value.elem)
    return value


def inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a wrapper subclass, in the order in which it names them; or the tensor itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    parts = [getattr(value, name) for name in names]
    return [inner for part in parts if isinstance(part, torch.Tensor) for inner in inner_tensors(part)]


def is_traced(value: torch.Tensor) -> bool:
    """Whether the tensor belongs to a trace, rather than being a real one that a function got hold of."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return True
    return all(
        isinstance(inner, (FunctionalTensor, FakeTensor)) or torch._is_functional_tensor(inner)
        for inner in inner_tensors(value)
    )


def storage_key(value: torch.Tensor) -> tuple[int, ...]:
    """Equal for tensors that share memory, as functionalisation sees it."""
    return tuple(int(inner.untyped_storage()._cdata) for inner in inner_tensors(value))


def was_data_mutated(value: torch.Tensor) -> bool:
    """Whether its elements were written to, also through an alias."""
    return any(torch._functionalize_has_data_mutation(part.elem) for part in _parts(value))  # type: ignore[attr-defined]


def mutations_of(value: torch.Tensor) -> tuple[Any, ...]:
    """Something that changes with every change in place of the value or of what shares its memory."""
    counts = [torch._functionalize_mutation_counter(part.elem) for part in _parts(value)]
    return (*counts, *value.shape, *value.stride())


def was_metadata_mutated(value: torch.Tensor) -> bool:
    """Whether its sizes, strides or offset were changed in place."""
    return any(torch._functionalize_has_metadata_mutation(part.elem) for part in _parts(value))


def was_mutated_unseen_by_autograd(value: torch.Tensor) -> bool:
    """Whether all writing was done under ``no_grad``, or through ``.data`` and the like."""
    return all(
        torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode(part.elem)
        or torch._functionalize_are_all_mutations_hidden_from_autograd(part.elem)
        for part in _parts(value)
    )


def was_storage_changed(value: torch.Tensor) -> bool:
    """Whether ``set_`` or a resize of the storage gave it other memory."""
    return any(
        torch._functionalize_was_storage_changed(part.elem)
        or torch._functionalize_was_inductor_storage_resized(part.elem)
        for part in _parts(value)
    )


def _parts(value: torch.Tensor) -> list[Any]:
    return [part for part in inner_tensors(value) if isinstance(part, FunctionalTensor)]
