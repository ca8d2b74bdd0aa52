"""What a backend is.

In: the functionalised ATen graph of a segment (an FX graph module that returns a tuple) and its fake
example inputs. Out: a boxed callable, that is one that takes a list of inputs and may empty it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import fx

from retrograd.graph.emit import Boxed as Boxed
from retrograd.graph.lazy import LazyGraph


@dataclass(frozen=True)
class GraphKind:
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
SEGMENT = GraphKind()


class Answer(Future[str | None]):
    """What another process will say of a graph that it is to compile: why it could not, or None. An exception
    would hold the frames of who waited for it, with their tensors, for as long as a thread knows of it."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    @property
    def is_of_parent(self) -> bool:
        """Whether the process was forked since: nobody will tell it."""
        return self._process != os.getpid()


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

    def prepare(self, *, in_process: bool = False) -> None:
        """Graphs may follow soon, `in_process` for `begin` too: start what takes time. It is called often."""

    def process_settings(self) -> Mapping[str, Any] | None:
        """What code depends on besides its graph, if other processes can compile; None if they cannot."""
        return None

    def begin(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: GraphKind) -> Answer | None:
        """Have another process begin with what `compile` will be asked for; None if nobody does."""
        return None

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Decompositions to apply while tracing."""
        return {}

    def for_parts_of(self, graph: LazyGraph, half: GraphKind) -> Backend:
        """The backend for parts of `graph`: what it chooses by the whole of one, it chooses by that."""
        return self

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: GraphKind = SEGMENT) -> Boxed:
        """Compile a traced segment, or half of a captured function."""
        raise NotImplementedError
