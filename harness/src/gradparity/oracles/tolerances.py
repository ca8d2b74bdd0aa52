"""The one table of tolerances.

In: a dtype. Out: how far a subject that does not promise equal bits may be from the float64 reference. An
error is the largest absolute difference in a tensor. It may be `multiple` times eager's own error, plus
`floor` times the largest magnitude in that tensor, plus `speck` times the largest magnitude among the case's
gradients (at most 1): the last is for gradients that cancel to nothing. Without a reference, `plain` times
the magnitude of eager's tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """See the module's text."""

    multiple: float
    floor: float
    speck: float
    plain: float


TABLE: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(multiple=4, floor=2e-14, speck=2e-15, plain=1e-11),
    torch.float32: Tolerance(multiple=4, floor=1e-5, speck=1e-6, plain=2e-5),
    torch.float16: Tolerance(multiple=4, floor=4e-3, speck=1e-3, plain=1e-2),
    torch.bfloat16: Tolerance(multiple=4, floor=3e-2, speck=8e-3, plain=5e-2),
    torch.complex128: Tolerance(multiple=4, floor=2e-14, speck=2e-15, plain=1e-11),
    torch.complex64: Tolerance(multiple=4, floor=1e-5, speck=1e-6, plain=2e-5),
}

UNSTABLE = 0.1
"""Eager's own error, as a share of the tensor's magnitude, from which on the reference says nothing."""


def tolerance(dtype: torch.dtype) -> Tolerance | None:
    """The row of this dtype; None for dtypes that must be equal (integers, bool)."""
    if dtype in TABLE:
        return TABLE[dtype]
    if dtype.is_floating_point:
        return TABLE[torch.bfloat16]
    return None
