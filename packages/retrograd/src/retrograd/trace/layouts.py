"""Operators whose results lie otherwise in memory than a trace says.

In: decompositions, as ``make_fx`` takes them. Out: the same, and for each operator with a fact about its
layout one that gives its result the layout that the real kernel gives it: torch's fake kernel or Inductor's
decomposition keeps the strides of an input there, or does not. The operator is given what it was given: its
kernel may round otherwise for another layout.

In: what a fake kernel gives, and the arguments. Out: the same, laid out as the real result.

What a function does may depend on how a value lies: ``matmul`` folds dimensions, or does not, and rounds
accordingly. Generated code lays results out as the fakes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
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
from retrograd.runtime.tensor import has_overlaps

_HALF = (torch.bfloat16, torch.float16)
#: the operator whose own kernel, or decomposition, is being traced.
_within: ContextVar[Any] = ContextVar("within", default=None)


def laid_out_as_real(decompositions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """`decompositions`, and those of operators with another layout than torch says."""
    wrong = {**answers("layout"), **answers("copies")}
    own = {operator: partial(_laid_out, operator, decompositions.get(operator)) for operator in wrong}
    return {**decompositions, **own}


def _laid_out(operator: Any, given: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    is_right = fact("layout", operator) == "half" and not any(map(_is_half_and_expanded, args))
    if is_right or _within.get() is operator:
        return NotImplemented if given is None else given(*args, **kwargs)
    if fact("copies", operator) and has_overlaps(args[0]):
        args = (args[0].clone(), *args[1:])
    token = _within.set(operator)
    try:
        result = operator(*args, **kwargs)
    finally:
        _within.reset(token)
    return laid_out_like_real(operator, result, args)


def laid_out_like_real(operator: Any, result: Any, args: Sequence[Any]) -> Any:
    """The traced `result` of `operator`, laid out as the real one."""
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
        # also if only dimensions of one element lie otherwise
        is_right = statically_known_true(sym_eq(result.stride(), make_contiguous_strides_for(result.shape)))
        return result if is_right else result.clone(memory_format=torch.contiguous_format)
    return result.contiguous(memory_format=layout) if isinstance(layout, torch.memory_format) else result


def _is_half_and_expanded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF and has_overlaps(value)


def _common_layout(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """`result` with its dimensions in the order in which those of `operands` lie, the first foremost."""
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
    """The memory format that `given`, a tensor or several, has where its sizes are as many as those of
    `result`; None if that is not known."""
    given = given if isinstance(given, (tuple, list)) else [given]
    like = [one for one in given if one.dim() == result.dim()]
    if any(one._has_symbolic_sizes_strides for one in (*like, result)):
        return None
    found = {suggest_memory_format(one) for one in like}
    return found.pop() if len(found) == 1 else torch.contiguous_format
