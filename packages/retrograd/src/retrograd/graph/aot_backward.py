"""The backward of a function that AOTAutograd compiled, as a graph that can be laid into a captured backward.

In: made by ``_torch.autograd.aot_functions`` from the context of such a function. Out: read by
``live.inlined.lay_in``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Tangent:
    """One cotangent that the graph takes.

    Attributes:
        slot: which output of the forward it belongs to.
        leaves: how many placeholders it fills; more than one for a tensor subclass.
        read: makes those values of the gradient that arrives: the layout and class that the graph was
            traced for.
    """

    slot: int
    leaves: int
    read: Callable[[Any], list[Any]]


@dataclass(frozen=True)
class BuiltGradient:
    """A gradient that is a tensor subclass: `build` makes it of the values of `parts`."""

    parts: tuple[Any, ...]
    build: Callable[..., Any]


@dataclass(frozen=True)
class AotBackward:
    """One compiled function's backward graph. Its placeholders are, in this order: symbolic sizes, saved
    tensors, saved opaque objects, tangents.

    Attributes:
        name: ``aot3``: the prefix of its nodes in the captured graph.
        graph: ATen calls; nodes carry ``seq_nr``, the sequence number of the forward operation that they
            differentiate.
        constants: the values of its ``get_attr`` nodes.
        tangents: the cotangents it takes.
        gradients: one entry per input of the forward: None, a node of `graph`, or a `BuiltGradient`.
        kept_on_context: how many saved tensors stand on the context itself, not among the saved tensors.
    """

    name: str
    graph: fx.Graph
    constants: Mapping[str, Any]
    tangents: tuple[Tangent, ...]
    gradients: tuple[fx.Node | BuiltGradient | None, ...]
    kept_on_context: int


@dataclass(frozen=True)
class AotCall:
    """What the engine hands over where it comes to a compiled function. Values are those of the recorder.

    Attributes:
        context: position of the function's context among the hooks.
        grads: gradients of the forward's outputs; None is undefined.
        sizes: symbolic sizes that the forward saved.
        saved: its saved tensors.
        objects: positions among the hooks of the opaque objects that it saved.
        wanted: for each argument of the forward, whether it was a tensor.
        zeros: makes what makes zeros in place of the gradient of an output; None if sizes are not known.
    """

    context: int
    grads: Sequence[Any]
    sizes: Sequence[Any]
    saved: Sequence[Any]
    objects: Sequence[int]
    wanted: Sequence[bool]
    zeros: Callable[[int], Callable[[], Any]] | None


@dataclass(frozen=True)
class InlinedCall:
    """What became of a node call whose own graph was laid in. Eager would have run many nodes in its place.

    Attributes:
        steps: for each step, in order, which gradients (numbers of the node's edges) are ready at its end.
        totals: by output of the forward, the whole gradient there: what arrives from outside together with
            what the graph itself adds; before hooks.
        consumed: which of eager's nodes would have released what they saved; sequence numbers or the like.
        consumed_for: by output of the forward, the same if only the gradient there is wanted.
        leaves_a_part: whether another part can be differentiated later, without ``retain_graph``.
    """

    steps: tuple[tuple[int, ...], ...]
    totals: Mapping[int, fx.Node | None]
    consumed: frozenset[float]
    consumed_for: Mapping[int, frozenset[float]]
    leaves_a_part: bool
