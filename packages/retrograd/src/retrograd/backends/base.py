"""The interface of backends.

In: the functionalised ATen graph of a segment (an FX graph module that returns a tuple) and its fake example
inputs. Out: a boxed callable: it takes a list of inputs and may empty it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import fx

from retrograd.graph.emit import Boxed as Boxed
from retrograd.graph.lazy import LazyGraph
from retrograd.graph.redraws import draw_from_state


@dataclass(frozen=True)
class GraphKind:
    """The role of a graph.

    Attributes:
        is_backward: whether it computes gradients of a captured function.
        is_inference: whether none of its results will be differentiated.
        visible: how many of the first outputs must have their traced strides. None leaves it to the backend.
        known_as: the graph's cache key on disk, which determines it and its inputs; None if it has none.
    """

    is_backward: bool = False
    is_inference: bool = False
    visible: int | None = None
    known_as: str | None = None


#: a segment of a live backward.
SEGMENT = GraphKind()


class Answer(Future[str | None]):
    """The answer of another process that compiles a graph: None, or why it failed. We do not use exceptions:
    an exception keeps the waiting code's frames and tensors alive while a thread refers to it."""

    def __init__(self) -> None:
        super().__init__()
        #: the process that asked. A child that is forked later never receives the answer.
        self.process = os.getpid()


class Backend:
    """Compiles and runs segments.

    What `compile` returns takes one list of inputs, which it may empty, and returns the graph's outputs. It
    promises their number, shapes and dtypes, and eager's strides for the first `visible` of them. It writes
    to inputs only if `takes_writes`. If it raises, the inputs are unchanged.

    Attributes:
        name: shown in reports.
        traces: whether segments are traced to ATen. If not, they are interpreted as captured, and gradients
            equal eager's bit for bit.
        takes_parts: whether we may compile parts of a graph separately, instead of the whole.
        for_speed: whether its code is meant to be faster than eager.
        takes_writes: whether graphs may write to their inputs by ``aten.copy_``.
    """

    name: str
    traces: bool = True
    takes_parts: bool = True
    for_speed: bool = False
    takes_writes: bool = False

    def prepare(self, *, in_process: bool = False) -> None:
        """Start slow preparations: graphs may follow soon, for `begin` too if `in_process`. Called often."""

    def process_settings(self) -> Mapping[str, Any] | None:
        """What code depends on besides its graph. None if other processes cannot compile for this one."""
        return None

    def begin(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: GraphKind) -> Answer | None:
        """A handle to another process that compiles this graph; `compile` then hits the cache. None if no
        process does."""
        return None

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Decompositions to apply while tracing."""
        return {}

    def redraw(self, graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
        """Replace a random call in the forward of a joint graph, because the backward needs its numbers.

        Returns:
            What the forward saves, the value that replaces `node`, and a call with the same value for the
            backward. None if the forward shall save its results instead.
        """
        return draw_from_state(graph, node)

    def draws_otherwise(self, targets: Collection[str]) -> str:
        """How to make code for calls of `targets` get eager's random numbers, for an error. Empty if it gets
        the numbers that eager's kernels get from the same state of a generator."""
        return ""

    def for_parts_of(self, graph: LazyGraph, half: GraphKind) -> Backend:
        """A backend for subgraphs of `graph` that inherits whole-graph decisions, such as memory format."""
        return self

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: GraphKind = SEGMENT) -> Boxed:
        """Compile a traced segment, or the forward or backward graph of a captured function."""
        raise NotImplementedError
