"""What a backend is.

In: the functionalised ATen graph of a segment (an FX graph module that returns a tuple) and its fake
example inputs. Out: a boxed callable, that is one that takes a list of inputs and may empty it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from retrograd.graph.emit import Boxed as Boxed
from retrograd.graph.lazy import LazyGraph


@dataclass(frozen=True)
class Half:
    """What a graph is part of.

    Attributes:
        is_backward: whether it computes gradients of a captured function.
        is_inference: whether nothing of it will be differentiated.
        visible: how many outputs, from the first, must have the strides that they were traced with; None: it
            is for the backend to say.
        known_as: the name of the graph on disk, which says all about it and its inputs, if it has one.
    """

    is_backward: bool = False
    is_inference: bool = False
    visible: int | None = None
    known_as: str | None = None


#: a segment of a live backward.
SEGMENT = Half()


class Elsewhere(Protocol):
    """A graph that somebody else may compile."""

    def begin(self) -> None:
        """Have them begin; what it raises says why nobody does."""

    def wait(self) -> None:
        """Wait for them; what it raises says why there is nothing."""


class Backend:
    """A way to run segments.

    Attributes:
        name: shown in reports.
        traces: whether segments are traced to ATen; if not, they are interpreted as captured, which gives
            gradients equal to eager's bit for bit.
        for_speed: whether its code is meant to be faster than eager.
        takes_parts: whether parts of a graph may be compiled, each for itself, instead of the whole.
        takes_writes: whether graphs may write to their inputs by ``aten.copy_``.
    """

    name: str
    traces: bool = True
    takes_parts: bool = True
    for_speed: bool = False
    takes_writes: bool = False

    def prepare(self, calls: int = 0) -> None:
        """Graphs may follow soon: begin what takes time. It is called often.

        Args:
            calls: about how many `announce` may be told of.
        """

    def announce(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: Half) -> None:
        """`compile` will be called so, if nothing changes until then."""

    def elsewhere(self, graph: LazyGraph, half: Half) -> Elsewhere | None:
        """What can have others make what `compile` will find, if its settings do not change; None if nothing
        can."""
        return None

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Decompositions to apply while tracing."""
        return {}

    def for_parts_of(self, graph: LazyGraph, half: Half) -> Backend:
        """The backend for parts of `graph`: what it chooses by the whole of one, it chooses by that."""
        return self

    def prepared_for_parts(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        """`gm`, or a copy that computes the same, and of which parts are better code."""
        return gm

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: Half = SEGMENT) -> Boxed:
        """Compile a traced segment, or half of a captured function."""
        raise NotImplementedError
