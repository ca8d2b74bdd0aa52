"""The decompositions that Inductor expects to be applied before it gets a graph.

In: torch's table. Out: the same table, with our own entries for operators whose decomposition, or whose
lowering without one, differs from eager's kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._decomp.decompositions import ldexp
from torch._prims_common import suggest_memory_format

from retrograd.facts import answers


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions, by operator."""
    # Some decompositions read ``torch._inductor.lowering``, which may not have been imported yet.
    from torch._inductor import lowering  # noqa: F401
    from torch._inductor.decomposition import select_decomp_table

    aten, table = torch.ops.aten, select_decomp_table()
    pools = aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default
    linear = "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"
    return {
        **table,
        **{
            (one := getattr(aten, name).default): functools.partial(
                _linear_upsample, decomposition_table[one]
            )
            for name in linear
        },
        **{getattr(aten, f"{name}_backward").default: _linear_upsample_backward for name in linear},
        **{pool: functools.partial(_avg_pool_backward, pool, table.get(pool)) for pool in pools},
        aten.bernoulli.p: functools.partial(_bernoulli, table.get(aten.bernoulli.p)),
        aten.ldexp.Tensor: _ldexp,
        **dict.fromkeys(answers("whole"), _as_it_is),
    }


@functools.cache
def call_whole_operators() -> None:
    """Have Inductor call the operators that must not be decomposed and that it has no lowering for."""
    from torch._inductor.lowering import lowerings, make_fallback

    for operator in answers("whole"):
        if operator not in lowerings:
            make_fallback(operator, override_decomp=True)


def _as_it_is(*args: Any, **kwargs: Any) -> Any:
    """Do not decompose."""
    return NotImplemented


def _ldexp(value: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """As in eager, the powers are contiguous, whatever the layout of the exponents."""
    return ldexp(value, exponent.contiguous())


def _bernoulli(given: Any, value: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """On a CPU, decompose into the mask of a dropout. Inductor's lowering draws in place, and a fused kernel
    may read the numbers before they are drawn. On other devices a dropout draws other numbers, so we use the
    decomposition `given`, if there is one."""
    if generator is not None:
        return NotImplemented
    if value.device.type != "cpu":
        return NotImplemented if given is None else given(value, p)
    return torch.native_dropout(torch.ones_like(value), 1 - p, True)[1].to(value.dtype)


def _linear_upsample(given: Callable[..., Any], value: torch.Tensor, size: Sequence[int], *rest: Any) -> Any:
    """Torch's decomposition, which stock applies because it traces above autograd. We trace below. A result
    of length 1 would get other strides than eager's."""
    return NotImplemented if 1 in size else given(value, size, *rest)


def _linear_upsample_backward(
    grad: torch.Tensor,
    _: Sequence[int],
    size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> Any:
    """Linear interpolation is a product with one matrix for each dimension, so its gradient is a product with
    the transposed matrices. Inductor would call eager's kernel, which adds atomically: on a GPU it takes a
    multiple of the time, and rounds in another order in each run. We leave it that kernel where sizes are
    symbolic, or matrix products are allowed to round more than it does.
    """
    sizes = *size, *grad.shape
    if not all(type(one) is int for one in sizes) or torch.get_float32_matmul_precision() != "highest":
        return NotImplemented
    result = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    for dim, (length, scale) in enumerate(zip_longest(size[2:], scales), 2):
        weights = _linear_weights(grad.shape[dim], length, align_corners, scale, result)
        result = torch.tensordot(result, weights, ([dim], [0])).movedim(-1, dim)
    return result.to(grad.dtype).contiguous(memory_format=suggest_memory_format(grad))


def _linear_weights(
    made: int, given: int, align_corners: bool, scale: float | None, like: torch.Tensor
) -> torch.Tensor:
    """The share (made, given) of each given element in each element that linear interpolation makes: 1 at its
    place, and 0 from a distance of 1 on. Source of the places: ``torch.nn.functional.interpolate``."""
    places = torch.arange(made, dtype=like.dtype, device=like.device)
    if align_corners:
        places = places * ((given - 1) / (made - 1) if made > 1 else 0.0)
    else:
        places = (places + 0.5) * (1 / scale if scale else given / made) - 0.5
    columns = torch.arange(given, dtype=like.dtype, device=like.device)
    return (1 - (places.clamp(0, given - 1)[:, None] - columns).abs()).clamp(min=0)


def _avg_pool_backward(
    operator: Any,
    given: Any,
    grad: torch.Tensor,
    value: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """In `ceil_mode`, a window may reach beyond the padding. Eager divides it by the number of elements
    inside the padding. Inductor's lowering divides by the kernel size
    (https://github.com/pytorch/pytorch/issues/198119).
    """
    rest = value, kernel_size, stride, padding, ceil_mode, count_include_pad
    if not (ceil_mode and count_include_pad and divisor_override is None):
        return NotImplemented if given is None else given(grad, *rest, divisor_override)
    dims = 2 if operator is torch.ops.aten.avg_pool2d_backward.default else 3
    lists = kernel_size, stride or kernel_size, padding
    of_each = ([*numbers] * dims if len(numbers) == 1 else numbers for numbers in lists)
    for dim, (size, step, pad) in enumerate(zip(*of_each, strict=True), -dims):
        starts = torch.arange(grad.shape[dim], device=grad.device) * step - pad
        counts = (starts + size).clamp(max=value.shape[dim] + pad) - starts
        grad = grad / counts.view(-1, *[1] * (-1 - dim))
    return operator(grad, *rest, 1)
