"""Ops whose real output strides differ from their meta kernel's.

In: decompositions, as for ``make_fx``. Out: the same, with one more for each operator whose layout is listed
as a fact. The added decomposition calls the operator, then gives its result the layout of the real kernel.
Torch's meta kernel or Inductor's decomposition preserves an input's strides where the real kernel does not,
or the reverse. The arguments keep their layout, because a kernel may round differently for another one.

In: the result of a meta kernel, and the arguments. Out: the result in the real kernel's layout.

Layouts matter: generated code lays out results like the fakes, and ``matmul``, for example, folds dimensions
depending on strides, which changes rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    invert_perm,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from retrograd.facts import answers, fact
from retrograd.process import ThreadValue
from retrograd.runtime.tensor import has_overlaps

_HALF = (torch.bfloat16, torch.float16)
#: Re-entrancy guard: the operator that currently bypasses this table.
_within: ThreadValue[Any] = ThreadValue(None)


def laid_out_as_real(decompositions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """`decompositions`, plus one for each operator whose layout torch's meta kernels get wrong."""
    wrong = {**answers("layout"), **answers("copies")}
    own = {operator: partial(_laid_out, operator, decompositions.get(operator)) for operator in wrong}
    return {**decompositions, **own}


def _laid_out(operator: Any, given: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    is_right = fact("layout", operator) == "half" and not any(map(_is_half_and_expanded, args))
    if is_right or _within.get() is operator:
        return NotImplemented if given is None else given(*args, **kwargs)
    if fact("copies", operator) and has_overlaps(args[0]):
        args = (args[0].clone(), *args[1:])
    with _within.switched(operator):
        result = operator(*args, **kwargs)
    return laid_out_like_real(operator, result, args)


def laid_out_like_real(operator: Any, result: Any, args: Sequence[Any]) -> Any:
    """The traced `result` of `operator`, in the layout of the real kernel's result."""
    if isinstance(result, (tuple, list)):
        return tuple(laid_out_like_real(operator, one, args) for one in result)
    layout = fact("layout", operator)
    if isinstance(layout, dict) and isinstance(result, torch.Tensor):
        layout = layout.get(result.device.type, layout.get("other"))
    if layout is None or not isinstance(result, torch.Tensor):
        return result
    if isinstance(layout, list) or (layout == "half" and any(map(_is_half_and_expanded, args))):
        operands = args if layout == "half" else [args[number] for number in layout]
        return _common_layout(result, [one for one in operands if isinstance(one, torch.Tensor)])
    if isinstance(layout, int):
        layout = _common_format(result, args[layout])
    if layout in ("contiguous", torch.contiguous_format):
        # strides of dimensions of size 1 must match too
        is_right = statically_known_true(sym_eq(result.stride(), make_contiguous_strides_for(result.shape)))
        return result if is_right else result.clone(memory_format=torch.contiguous_format)
    return result.contiguous(memory_format=layout) if isinstance(layout, torch.memory_format) else result


def _is_half_and_expanded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF and has_overlaps(value)


def _common_layout(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """`result` with its dimensions in the order of those of `operands`; the first operand decides first."""
    with torch._C._DisableTorchDispatch():
        *metas, given = (
            torch.empty_strided(one.shape, one.stride(), device="meta") for one in (*operands, result)
        )
        metas = torch.broadcast_tensors(*metas)
        order, _ = compute_elementwise_output_logical_to_physical_perm(*metas)
        if metas[0].shape != result.shape or given.permute(order).is_contiguous():
            return result
    return result.permute(order).contiguous().permute(invert_perm(order)).clone()


def _common_format(result: torch.Tensor, given: Any) -> torch.memory_format | None:
    """The memory format of `given`, a tensor or several, among those with as many dimensions as `result`;
    None if unknown."""
    given = given if isinstance(given, (tuple, list)) else [given]
    like = [one for one in given if one.dim() == result.dim()]
    if any(one._has_symbolic_sizes_strides for one in (*like, result)):
        return None
    found = {suggest_memory_format(one) for one in like}
    return found.pop() if len(found) == 1 else torch.contiguous_format
