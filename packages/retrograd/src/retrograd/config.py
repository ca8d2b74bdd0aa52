"""What the user can choose about the live path, as one frozen value.

In: the keyword arguments of ``retrograd.compiled_autograd``. Out: `Config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    CompileFn = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]

__all__ = ["FEWEST_COPIES", "SMALLEST_REGION", "Config", "fewest_copies", "smallest_region"]

#: autograd nodes that a region has at least: with fewer, what a call of its code costs is felt.
SMALLEST_REGION = 16

#: copies of a region that there are at least: two or three are compiled as quickly in one piece.
FEWEST_COPIES = 4


def smallest_region(regions: bool | int) -> int:
    """How many autograd nodes a region has at least, for the option ``regions=``; 0: there are no regions.

    Raises:
        ValueError: neither True nor False nor a number of nodes.
    """
    if not isinstance(regions, int) or regions < 0:
        raise ValueError(f"regions must be True, False or a number of nodes, got {regions!r}")
    return SMALLEST_REGION if regions is True else int(regions)


def fewest_copies(regions: bool | int) -> int:
    """How many copies of a region there are at least, for the option ``regions=``."""
    return FEWEST_COPIES if regions is True else 2


@dataclass(frozen=True)
class Config:
    """Settings of one ``compiled_autograd`` context.

    Attributes:
        backend: a registered name (``"inductor"``, ``"aten"``, ``"eager"``) or a callable
            ``(gm, example_inputs) -> callable`` that receives the functionalised ATen graph of a segment.
        strict: raise `CaptureError` / `LoweringError` instead of running as eager does.
        dynamic: ``None``: sizes are static until they change, then symbolic; ``True``: symbolic from
            the start; ``False``: always static.
        recompile_limit: lowerings of one segment after which it is interpreted node by node.
        opaque: names of autograd nodes (``"MulBackward0"``) to be run as opaque calls.
        regions: whether structure that repeats itself is compiled once, where that is worth it; a number:
            from how many autograd nodes on it is.
        background: compile on another thread, and interpret until the code is there.
        cudagraphs: record what compiled segments do on a CUDA device, and replay it where that is safe.
    """

    backend: str | CompileFn = field(default="inductor", compare=False)
    strict: bool = False
    dynamic: bool | None = None
    recompile_limit: int = 8
    opaque: frozenset[str] = frozenset()
    regions: bool | int = True
    background: bool = False
    cudagraphs: bool = False

    #: what tells two backends apart: a callable need not be hashable, and is equal to itself only.
    _backend_key: str | int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = self.backend if isinstance(self.backend, str) else id(self.backend)
        object.__setattr__(self, "_backend_key", key)
        if self.recompile_limit < 1:
            raise ValueError(f"recompile_limit must be at least 1, got {self.recompile_limit}")
        if self.dynamic not in (None, True, False):
            raise ValueError(f"dynamic must be None, True or False, got {self.dynamic!r}")
        smallest_region(self.regions)

    @property
    def smallest_region(self) -> int:
        """How many autograd nodes a region has at least; 0: there are no regions."""
        return smallest_region(self.regions)

    @property
    def fewest_copies(self) -> int:
        """How many copies of a region there are at least."""
        return fewest_copies(self.regions)

    @staticmethod
    def names(opaque: Iterable[str]) -> frozenset[str]:
        """Check and freeze a collection of autograd node names."""
        if isinstance(opaque, str):
            raise TypeError(f"opaque must be a collection of node names, got the string {opaque!r}")
        names = frozenset(opaque)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"opaque must hold node names such as 'MulBackward0', got {name!r}")
        return names
