"""retrograd's live path behind a forward that stock torch compiled.

In: stock's backend for the forward, retrograd's for the backward. Out: the subjects
"retrograd-live+aot_eager:eager" and the like. What such a forward does otherwise than eager is stock's own:
the subject `stock` runs the same forward with torch's own backward, and tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gradparity.subjects.retrograd_live import RetrogradLive
from gradparity.subjects.stock import StockCompile

T = TypeVar("T")

FORWARDS = ("aot_eager", "inductor")


class RetrogradBehindStock(RetrogradLive):
    """torch.compile of the program's functions and modules; backward inside retrograd.compiled_autograd."""

    may_refuse = True

    def __init__(self, name: str, forward: str, backend: str) -> None:
        super().__init__(name, backend)
        self.bitwise = self.bitwise and forward == "aot_eager"
        self._forward = StockCompile(f"stock-compile:{forward}", forward)
        self.stock = self._forward

    def compile(self, target: T) -> T:
        """The function or module under stock torch.compile."""
        return self._forward.compile(target)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Eager's random numbers, in the forward's code and in the backward's."""
        with self._forward.around():
            yield

    def wrap_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Recording is not part of the program: Dynamo must not trace it."""
        return self._forward.wrap_hook(hook)

    def reset(self, cold: bool) -> None:
        """The forward always starts afresh; retrograd keeps its caches, unless a case asks."""
        self._forward.reset(cold)
        super().reset(cold)
