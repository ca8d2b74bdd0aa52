"""Operators whose results lie otherwise in memory than torch's fake kernels say.

In: decompositions, as ``make_fx`` takes them. Out: the same, and for each such operator one that makes its
result contiguous where the fake one is not. The operator is given what it was given: its kernel may round
otherwise for another layout.

What a function does may depend on how a value lies: ``matmul`` folds dimensions, or does not, and rounds
accordingly. Generated code lays results out as the fakes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

_aten = torch.ops.aten
#: by operator, on which devices its (first) result is contiguous, though the fake one has the strides of an
#: input; None: on all. Source: their ``TORCH_META_FUNC`` or kernels in ``aten/src/ATen/native``.
CONTIGUOUS: Mapping[Any, str | None] = {
    _aten.pow.Scalar: None,
    _aten.isin.Tensor_Tensor: None,
    _aten.isin.Tensor_Scalar: None,
    _aten.mse_loss_backward.default: None,
    _aten.smooth_l1_loss_backward.default: None,
    _aten.huber_loss_backward.default: None,
    _aten._log_softmax_backward_data.default: None,
    _aten._weight_norm_interface.default: None,
    _aten.log_sigmoid_forward.default: "cpu",
}
#: the operator that is being traced without what is said here.
_within: ContextVar[Any] = ContextVar("within", default=None)


def laid_out_as_real(decompositions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """`decompositions`, and those of `CONTIGUOUS`."""
    own = {operator: partial(_laid_out, operator, decompositions.get(operator)) for operator in CONTIGUOUS}
    return {**decompositions, **own}


def _laid_out(operator: Any, given: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    if _within.get() is operator:
        return NotImplemented if given is None else given(*args, **kwargs)
    token = _within.set(operator)
    try:
        result = operator(*args, **kwargs)
    finally:
        _within.reset(token)
    if isinstance(result, tuple):
        first, *others = result
        return (_contiguous(first, CONTIGUOUS[operator]), *others)
    return _contiguous(result, CONTIGUOUS[operator])


def _contiguous(value: torch.Tensor, device: str | None) -> torch.Tensor:
    if value._has_symbolic_sizes_strides or device not in (None, value.device.type):
        return value
    return value.contiguous()
