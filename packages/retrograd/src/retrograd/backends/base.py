"""What a backend is.

In: the functionalised ATen graph of a segment (an FX graph module that returns a tuple) and its fake
example inputs. Out: a boxed callable, that is one that takes a list of inputs and may empty it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import fx

__all__ = ["Backend", "Boxed"]

Boxed = Callable[[list[Any]], Sequence[Any]]


class Backend(Protocol):
    """A way to run segments.

    Attributes:
        name: shown in reports.
        traces: whether segments are traced to ATen; if not, they are interpreted as captured, which gives
            gradients equal to eager's bit for bit.
    """

    name: str
    traces: bool

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Decompositions to apply while tracing."""
        ...

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a traced segment."""
        ...
