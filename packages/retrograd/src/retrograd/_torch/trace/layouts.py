"""Operators whose results lie otherwise in memory than a trace says.

In: decompositions, as ``make_fx`` takes them. Out: the same, and for each operator in the table one that
gives its result the layout that the real kernel gives it: torch's fake kernel or Inductor's decomposition
keeps the strides of an input there, or does not. The operator is given what it was given: its kernel may
round otherwise for another layout.

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

from retrograd._torch.tensor import has_overlaps

_aten = torch.ops.aten
#: of a result that has the memory format of no argument.
CONTIGUOUS = None
#: by operator, the number of the argument whose memory format its results have; of a list, the one that
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
    _aten.poisson.default: CONTIGUOUS,
    _aten._standard_gamma.default: CONTIGUOUS,
    _aten.normal.Tensor_Tensor: CONTIGUOUS,
    _aten.normal.float_Tensor: CONTIGUOUS,
    _aten.glu_backward.default: CONTIGUOUS,
    _aten.native_layer_norm_backward.default: CONTIGUOUS,
    _aten.nll_loss2d_forward.default: CONTIGUOUS,
    _aten.multi_margin_loss_backward.default: CONTIGUOUS,
    _aten.adaptive_max_pool3d.default: CONTIGUOUS,
    _aten.cat.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.batch_norm_backward.default: 1,
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
        _aten.replication_pad2d.default: 0,
        _aten.replication_pad3d.default: 0,
        _aten.replication_pad2d_backward.default: 1,
        _aten.replication_pad3d_backward.default: 1,
        _aten.reflection_pad2d.default: 0,
        _aten.reflection_pad3d.default: 0,
        _aten.reflection_pad2d_backward.default: 1,
        _aten.reflection_pad3d_backward.default: 1,
    },
    "cuda": {
        _aten.channel_shuffle.default: CONTIGUOUS,
        _aten.max_unpool2d.default: CONTIGUOUS,
        _aten.pixel_shuffle.default: CONTIGUOUS,
        _aten.native_dropout_backward.default: 0,
    },
}
#: of operators that go over the elements of some arguments together (``TensorIterator``), the numbers of
#: these, unless there is an entry above. Torch composes their fakes of other operators, and so they have the
#: layout of a step between.
TOGETHER: Mapping[Any, tuple[int, ...]] = {
    _aten.elu_backward.default: (0, 5),
    _aten.leaky_relu_backward.default: (1, 0),
    _aten.threshold_backward.default: (1, 0),
    _aten.lerp.Tensor: (0, 1, 2),
    _aten._prelu_kernel_backward.default: (1, 2, 0),
    _aten.binary_cross_entropy.default: (0,),
    _aten.binary_cross_entropy_backward.default: (1,),
    _aten.huber_loss.default: (0,),
    _aten.put.default: (0,),
    **dict.fromkeys(
        (
            _aten.complex.default,
            _aten.copysign.Tensor,
            _aten.div.Tensor_mode,
            _aten.floor_divide.default,
            _aten.fmax.default,
            _aten.fmin.default,
            _aten.hardsigmoid_backward.default,
            _aten.hardswish_backward.default,
            _aten.hardtanh_backward.default,
            _aten.heaviside.default,
            _aten.lcm.default,
            _aten.lerp.Scalar,
            _aten.logaddexp.default,
            _aten.logaddexp2.default,
            _aten.logical_and.default,
            _aten.logical_or.default,
            _aten.logical_xor.default,
            _aten.logit_backward.default,
            _aten.native_dropout_backward.default,
            _aten.polar.default,
            _aten.softplus_backward.default,
            _aten.special_xlog1py.default,
            _aten.xlogy.Tensor,
        ),
        (0, 1),
    ),
}
#: of those that go over all operands together, the ones whose fakes are wrong in half precision only, if an
#: operand is expanded: torch composes such a fake of casts and a call, and that cast has a layout of its own.
NARROW = frozenset({
    _aten.add.Tensor, _aten.atan2.default, _aten.clamp.Tensor, _aten.clamp_max.Tensor, _aten.clamp_min.Tensor,
    _aten.div.Tensor, _aten.eq.Tensor, _aten.fmod.Tensor, _aten.ge.Tensor, _aten.gelu_backward.default,
    _aten.gt.Tensor, _aten.hypot.default, _aten.igamma.default, _aten.igammac.default, _aten.le.Tensor,
    _aten.lt.Tensor, _aten.maximum.default, _aten.minimum.default, _aten.mish_backward.default,
    _aten.mse_loss.default, _aten.mul.Tensor, _aten.ne.Tensor, _aten.pow.Tensor_Tensor,
    _aten.remainder.Tensor, _aten.rsub.Tensor, _aten.sigmoid_backward.default, _aten.silu_backward.default,
    _aten.smooth_l1_loss.default, _aten.sub.Tensor, _aten.tanh_backward.default,
})  # fmt: skip
_HALF = (torch.bfloat16, torch.float16)
#: all operators of the tables but the last.
LAYOUTS = frozenset(FORMATS).union(TOGETHER, *FORMATS_ON.values())
#: whose fake kernel is wrong, too.
_WRONG_FAKE = frozenset({
    _aten.upsample_bilinear2d.default,
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit_no_training.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten.native_batch_norm_backward.default,
    _aten.batch_norm_backward.default,
    _aten.roll.default,
    _aten.replication_pad2d.default,
    _aten.replication_pad3d.default,
    _aten.replication_pad2d_backward.default,
    _aten.replication_pad3d_backward.default,
    _aten.reflection_pad2d.default,
    _aten.reflection_pad3d.default,
    _aten.reflection_pad2d_backward.default,
    _aten.reflection_pad3d_backward.default,
})  # fmt: skip
#: that copy their first argument and write to the copy; in torch 2.11 the fake result shows an element in
#: several places if that does.
_COPYING = (_aten.slice_scatter.default, _aten.select_scatter.default, _aten.diagonal_scatter.default)
#: the operator that is being traced without what is said here.
_within: ContextVar[Any] = ContextVar("within", default=None)


def laid_out_as_real(decompositions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """`decompositions`, and those of the tables. Where a result has the format of an argument, the fake
    kernel says so, as a rule, and only a decomposition is wrong."""
    entries = [entry for table in (FORMATS, *FORMATS_ON.values()) for entry in table.items()]
    wrong = [
        one for one, number in entries if number is CONTIGUOUS or one in decompositions or one in _WRONG_FAKE
    ]
    wrong.extend([*TOGETHER, *_COPYING, *NARROW])
    own = {operator: partial(_laid_out, operator, decompositions.get(operator)) for operator in wrong}
    return {**decompositions, **own}


def _laid_out(operator: Any, given: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    if _within.get() is operator or (operator in NARROW and not any(map(_is_narrow_and_expanded, args))):
        return NotImplemented if given is None else given(*args, **kwargs)
    if operator in _COPYING and has_overlaps(args[0]):
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
    if not isinstance(result, torch.Tensor):
        return result
    is_together = operator in TOGETHER and operator not in FORMATS_ON.get(result.device.type, {})
    if is_together or operator in NARROW:
        operands = [args[number] for number in TOGETHER.get(operator, range(len(args)))]
        return _laid_out_together(result, [one for one in operands if isinstance(one, torch.Tensor)])
    layout = _format(operator, result, args)
    if layout is torch.contiguous_format:
        # also if only dimensions of one element lie otherwise
        is_right = statically_known_true(sym_eq(result.stride(), make_contiguous_strides_for(result.shape)))
        return result if is_right else result.clone(memory_format=layout)
    return result if layout is None else result.contiguous(memory_format=layout)


def _is_narrow_and_expanded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF and has_overlaps(value)


def _laid_out_together(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
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


def _format(operator: Any, result: torch.Tensor, args: Sequence[Any]) -> torch.memory_format | None:
    """The memory format of the real result; None if it is as traced."""
    table = FORMATS if operator in FORMATS else FORMATS_ON.get(result.device.type, {})
    if operator not in table:
        return None
    number = table[operator]
    if number is CONTIGUOUS:
        return torch.contiguous_format
    given = args[number]
    given = given if isinstance(given, (tuple, list)) else [given]
    like = [one for one in given if one.dim() == result.dim()]
    if any(one._has_symbolic_sizes_strides for one in (*like, result)):
        return None
    found = {suggest_memory_format(one) for one in like}
    return found.pop() if len(found) == 1 else torch.contiguous_format
