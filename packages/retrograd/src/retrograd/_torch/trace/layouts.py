"""Operators whose results lie otherwise in memory than a trace says.

In: decompositions, as ``make_fx`` takes them. Out: the same, and for each operator in the table one that
gives its result the layout that the real kernel gives it: torch's fake kernel or Inductor's decomposition
keeps the strides of an input there. The operator is given what it was given: its kernel may round otherwise
for another layout.

What a function does may depend on how a value lies: ``matmul`` folds dimensions, or does not, and rounds
accordingly. Generated code lays results out as the fakes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format

_aten = torch.ops.aten
#: of a result that has the memory format of no argument.
CONTIGUOUS = None
#: by operator, the number of the argument whose memory format its first result has; of a list, the one that
#: all have, or none. Source: their ``TORCH_META_FUNC`` or kernels in ``aten/src/ATen/native``.
FORMATS: Mapping[Any, int | None] = {
    _aten.pow.Scalar: CONTIGUOUS,
    _aten.isin.Tensor_Tensor: CONTIGUOUS,
    _aten.isin.Tensor_Scalar: CONTIGUOUS,
    _aten.mse_loss_backward.default: CONTIGUOUS,
    _aten.smooth_l1_loss_backward.default: CONTIGUOUS,
    _aten.huber_loss_backward.default: CONTIGUOUS,
    _aten._log_softmax_backward_data.default: CONTIGUOUS,
    _aten._weight_norm_interface.default: CONTIGUOUS,
    _aten.cat.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.upsample_nearest1d.default: 0,
    _aten._upsample_nearest_exact1d.default: 0,
    _aten.upsample_bilinear2d.default: 0,
}
#: the same, where the kernels of devices differ.
FORMATS_ON: Mapping[str, Mapping[Any, int | None]] = {
    "cpu": {
        _aten.log_sigmoid_forward.default: CONTIGUOUS,
        _aten.channel_shuffle.default: 0,
        _aten.max_unpool2d.default: 0,
        _aten.native_batch_norm.default: 0,
        _aten._native_batch_norm_legit_functional.default: 0,
        _aten._native_batch_norm_legit_no_training.default: 0,
        _aten._native_batch_norm_legit.no_stats: 0,
        _aten.roll.default: 0,
    },
    "cuda": {
        _aten.channel_shuffle.default: CONTIGUOUS,
        _aten.max_unpool2d.default: CONTIGUOUS,
        _aten.pixel_shuffle.default: CONTIGUOUS,
    },
}
#: whose fake kernel is the decomposition.
_FAKED_BY_DECOMPOSITION = frozenset({
    _aten.upsample_bilinear2d.default,
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit_no_training.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten.native_batch_norm_backward.default,
    _aten.roll.default,
})  # fmt: skip
#: the operator that is being traced without what is said here.
_within: ContextVar[Any] = ContextVar("within", default=None)


def laid_out_as_real(decompositions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """`decompositions`, and those of the tables. Where a result has the format of an argument, the fake
    kernel says so, unless it is the decomposition, and only a decomposition is wrong."""
    entries = [entry for table in (FORMATS, *FORMATS_ON.values()) for entry in table.items()]
    wrong = [
        one
        for one, number in entries
        if number is CONTIGUOUS or one in decompositions or one in _FAKED_BY_DECOMPOSITION
    ]
    own = {operator: partial(_laid_out, operator, decompositions.get(operator)) for operator in wrong}
    return {**decompositions, **own}


def _laid_out(operator: Any, given: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    if _within.get() is operator:
        return NotImplemented if given is None else given(*args, **kwargs)
    token = _within.set(operator)
    try:
        result = operator(*args, **kwargs)
    finally:
        _within.reset(token)
    several = isinstance(result, (tuple, list))
    first, *others = result if several else [result]
    if isinstance(first, torch.Tensor) and (layout := _format(operator, first, args)) is not None:
        first = first.contiguous(memory_format=layout)
        if layout is torch.contiguous_format and first.stride() != make_contiguous_strides_for(first.shape):
            first = first.clone(memory_format=layout)  # in dimensions of one element
    return (first, *others) if several else first


def _format(operator: Any, result: torch.Tensor, args: Sequence[Any]) -> torch.memory_format | None:
    """The memory format of the real result; None if it is as traced."""
    table = FORMATS if operator in FORMATS else FORMATS_ON.get(result.device.type, {})
    if operator not in table:
        return None
    number = table[operator]
    given = [] if number is CONTIGUOUS else args[number]
    given = given if isinstance(given, (tuple, list)) else [given]
    like = [one for one in given if one.dim() == result.dim()]
    if any(one._has_symbolic_sizes_strides for one in (*like, result)):
        return None
    found = {suggest_memory_format(one) for one in like}
    return found.pop() if len(found) == 1 else torch.contiguous_format
