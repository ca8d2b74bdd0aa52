"""How far two tensor records are apart.

In: records of equal shape. Out: whether their bits are equal, the largest absolute difference, the largest
magnitude.
"""

from __future__ import annotations

import math

import torch

from gradparity.outcome import TensorRecord

COARSER = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.bfloat16, torch.float16),
}
"""The dtypes through which a value, or a part of a complex one, may have been rounded."""
CHANCE = 2.0**-26
"""As unlikely must it be that elements are coarse by chance."""
INTEGER_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: TensorRecord, two: TensorRecord) -> bool:
    """Equal data, NaN equal to NaN, 0.0 equal to -0.0."""
    if one.digest != two.digest or len(one.parts) != len(two.parts):
        return False
    return all(_same_part(left, right) for left, right in zip(one.parts, two.parts, strict=True))


def signed_zero(one: TensorRecord, two: TensorRecord) -> bool:
    """Whether the sign of some zero differs between two records of otherwise equal bits."""
    for left, right in zip(one.parts, two.parts, strict=True):
        left, right = _real(left), _real(right)
        if not left.is_floating_point():
            continue
        whole = INTEGER_OF[left.element_size()]
        if torch.equal(left.view(whole), right.view(whole)):
            continue
        if not torch.equal(left.signbit() & (left == 0), right.signbit() & (right == 0)):
            return True
    return False


def distance(one: TensorRecord, two: TensorRecord) -> float:
    """The largest absolute difference; inf where NaN or inf stand in different places."""
    if len(one.parts) != len(two.parts):
        return math.inf
    worst = 0.0
    for left, right in zip(one.parts, two.parts, strict=True):
        if left.shape != right.shape:
            return math.inf
        if left.numel():
            worst = max(worst, _part_distance(_wide(left), _wide(right)))
    return worst


def rounded_through(eager: TensorRecord, subject: TensorRecord) -> torch.dtype | None:
    """The lower dtype through which the subject's values went and eager's did not; None if there is none.

    A subject that computes more exactly than eager may show 2.0 for eager's 2.0000002, or another speck where
    gradients cancel, which is no rounding: the records must be as far apart as that dtype rounds, and no
    further.
    """
    size, gap = magnitude(eager), distance(eager, subject)
    real = eager.dtype.to_real()
    for low in COARSER.get(real, ()):
        step = torch.finfo(low).eps
        if not step / 32 * size <= gap <= 64 * step * size or not bool(_coarse(subject, low).all()):
            continue
        rounded = int((~_coarse(eager, low)).sum())
        if rounded and (torch.finfo(real).eps / step) ** rounded <= CHANCE:
            return low
    return None


def magnitude(record: TensorRecord) -> float:
    """The largest finite absolute value; 0 for an empty tensor."""
    sizes = [_wide(part).abs().nan_to_num(0.0, 0.0, 0.0).max() for part in record.parts if part.numel()]
    return max((float(size) for size in sizes), default=0.0)


def _coarse(record: TensorRecord, low: torch.dtype) -> torch.Tensor:
    """Which values of a record a lower dtype holds exactly."""
    parts = map(_real, record.parts)
    return torch.cat([(part == part.to(low).to(part.dtype)).flatten() for part in parts])


def _part_distance(left: torch.Tensor, right: torch.Tensor) -> float:
    gap = (left - right).abs()
    gap = gap.masked_fill((left == right) | (left.isnan() & right.isnan()), 0.0)
    return float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _same_part(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    left, right = _real(left), _real(right)
    return left.is_floating_point() and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _real(part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(part) if part.is_complex() else part


def _wide(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.complex128 if part.is_complex() else torch.float64)
