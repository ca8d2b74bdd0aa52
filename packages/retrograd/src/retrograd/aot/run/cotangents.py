"""What a region's code was traced for, of the cotangents that it takes.

In: a partition and a root of a region. Out: `Expected`, which says whether a cotangent that arrives is so,
and in what layout it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrograd._torch.subclass import PLAIN, Layout, parts_of
from retrograd.graph.partition import Partition

Strides = tuple[Any, ...]


@dataclass(frozen=True)
class Expected:
    """What a cotangent was traced as.

    Attributes:
        boundary: its number.
        wrapping: how it is made up.
        parts: a fake of each plain tensor in it.
    """

    boundary: int
    wrapping: Layout
    parts: tuple[torch.Tensor, ...]

    @staticmethod
    def of(partition: Partition, region: int, root: int) -> Expected:
        """What region `region` expects at the boundary `root`."""
        joint = partition.joint
        value = joint.values[joint.signature.boundaries[root].value]
        fakes = {
            node.name: node.meta["val"]
            for node in partition.backwards[region].gm.graph.find_nodes(op="placeholder")
        }
        count = value.wrapping.count
        names = [f"cotangent_{root}_{part}" for part in range(count)] if count > 1 else [f"cotangent_{root}"]
        return Expected(root, value.wrapping, tuple(fakes[name] for name in names))

    @property
    def is_plain(self) -> bool:
        """Whether it is no wrapper subclass."""
        return self.wrapping is PLAIN

    @property
    def is_static(self) -> bool:
        """Whether it is a plain tensor without symbolic sizes."""
        return self.is_plain and not any(
            isinstance(number, torch.SymInt) for number in (*self.parts[0].shape, *self.parts[0].stride())
        )

    def fits(self, cotangent: torch.Tensor | None) -> bool:
        """Whether a cotangent is of the kind that was traced, whatever its layout."""
        if cotangent is None:
            return self.is_static
        return self.wrapping.fits(cotangent) and all(
            map(_is_ordinary, parts_of(cotangent, self.wrapping), self.parts)
        )

    def layout(self, cotangent: torch.Tensor | None) -> Strides | None:
        """Strides of a cotangent that is laid out otherwise than traced; of a subclass, of its parts."""
        if cotangent is None:
            return None
        if self.is_plain:
            return _strides(cotangent, self.parts[0])
        found = tuple(map(_strides, parts_of(cotangent, self.wrapping), self.parts))
        return found if any(found) else None

    def laid_out(self, cotangent: torch.Tensor | None) -> Sequence[Any]:
        """The plain tensors of a cotangent in the layout that was traced; zeros if it is undefined."""
        if cotangent is None:
            like = self.parts[0]
            zeros = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            return [zeros.zero_()]
        return list(map(_laid_out, parts_of(cotangent, self.wrapping), self.parts))


def _laid_out(value: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    if _strides(value, fake) is None:
        return value
    strides = _dense_strides(value.shape, fake)
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _is_ordinary(value: torch.Tensor, fake: torch.Tensor) -> bool:
    """Whether it is a tensor with elements of its own, such as are traced."""
    return (
        value.layout is torch.strided
        and value.dtype is fake.dtype
        and not (value.is_neg() or value.is_conj() or value._is_zerotensor())
    )


def _strides(value: torch.Tensor, fake: torch.Tensor) -> Strides | None:
    """The strides of `value`, if they are not those of `fake`."""
    strides = value.stride()
    if strides == fake.stride():
        return None
    return None if _alike(value.shape, strides, _dense_strides(value.shape, fake)) else strides


def _alike(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether strides are equal where they matter."""
    return 0 in shape or all(
        size == 1 or one == other for size, one, other in zip(shape, strides, others, strict=True)
    )


def _dense_strides(shape: Sequence[int], fake: torch.Tensor) -> list[int]:
    """Strides for `shape` with dimensions in the order of those of `fake`, which is dense."""
    order = sorted(range(len(shape)), key=lambda dim: (_hint(fake.stride(dim)), -dim))
    strides, count = [0] * len(shape), 1
    for dim in order:
        strides[dim] = count
        count *= max(shape[dim], 1)
    return strides


def _hint(number: Any) -> int:
    return int(number.node.hint) if isinstance(number, torch.SymInt) else int(number)
