"""What capture recorded of one backward, as an FX graph of typed calls, and the steps that it is cut into.

In: built by ``live.capture`` in the order in which the engine walked; cut by ``live.capture.segments``. Out:
read by the scheduling pass, which returns another `BackwardGraph` in eager order, and by ``live.run.plan``.

Placeholders stand for tensors lifted out of the autograd graph (``input_i``), sizes that have changed
(``size_i``), lifted scalars (``scalar_i``), hook objects and Function contexts (``hook_i``) and packed
saved tensors (``packed_i``). Every other node carries a `Call` under ``meta["call"]``.

A function that AOTAutograd compiled has a backward graph of its own (`AotBackward`, made by
``engine.aot_functions``), which ``live.inlined.lay_in`` lays into the captured one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from retrograd.graph.emit import last_uses


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


class HookKind(enum.Enum):
    """Where a hook hangs. The value is the name under which torch's documentation knows it."""

    TENSOR_PRE = "tensor hook"
    RETAIN_GRAD = "retain_grad or C++ tensor hook"
    NODE_PRE = "node pre hook"
    NODE_POST = "node post hook"
    POST_ACCUMULATE = "post-accumulate-grad hook"
    UNPACK = "saved-tensor unpack hook"


class CallKind(enum.Enum):
    """What one call of a `BackwardGraph` is. Only functional kinds may be part of a segment."""

    NODE = "built-in autograd node"
    VALIDATE = "check of a node's outputs against the metadata of their consumers"
    COPY_SLICES = "part of an in-place operation on a view"
    SUM = "sum of the gradients that meet in one buffer"
    PROJECT = "one element of a call's result"
    HOOK = "hook"
    FUNCTION = "autograd.Function backward"
    CPP_FUNCTION = "C++ autograd function"
    ATEN = "operation of a backward that AOTAutograd traced"
    AOT_SAVED = "saved tensors on the context of a function that AOTAutograd compiled"
    ACCUMULATE = "accumulation into .grad"

    # Every pass asks each call for its kind: this hash is computed in C, that of `Enum` in Python.
    __hash__ = object.__hash__

    @property
    def is_functional(self) -> bool:
        """Whether the call reads and writes nothing but its arguments and results."""
        return self in _FUNCTIONAL

    @property
    def is_node(self) -> bool:
        """Whether the call stands for an autograd node (an inlined node is many calls of `ATEN`)."""
        return self in _NODES


_FUNCTIONAL = frozenset(
    {CallKind.NODE, CallKind.ATEN, CallKind.VALIDATE, CallKind.COPY_SLICES, CallKind.SUM, CallKind.PROJECT}
)

_NODES = frozenset(
    {CallKind.NODE, CallKind.CPP_FUNCTION, CallKind.FUNCTION, CallKind.COPY_SLICES, CallKind.ACCUMULATE}
)


class SourceKind(enum.Enum):
    """Which list of the engine's run-time arguments a placeholder reads."""

    INPUT = "input"
    SIZE = "size"
    SCALAR = "scalar"
    HOOK = "hook"
    PACKED = "packed"


@dataclass(frozen=True)
class Source:
    """Position of a placeholder among the run-time arguments."""

    kind: SourceKind
    index: int


@dataclass(frozen=True)
class NodeCall:
    """One node that the engine executed.

    Attributes:
        index: its place in the engine's walk.
        name: the autograd node's name.
        source: the user's line that made the node in the forward, where torch knows it (anomaly mode
            records it).
    """

    index: int
    name: str
    source: str = ""


@dataclass(frozen=True)
class Call:
    """What one FX node means.

    Attributes:
        kind: which kind of call.
        node_call: index of the node call that it belongs to.
        hook: which kind of hook, for hook calls.
        step: for the calls of an inlined node, which of its steps (see `BackwardGraph.inlined`).
        note: why the call is what it is, where its kind does not say enough.
        enters: for the call that takes a gradient into an inlined node, and for hooks on it: its number.
    """

    kind: CallKind
    node_call: int
    hook: HookKind | None = None
    step: int = 0
    note: str = ""
    enters: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The node call and the step in it."""
        return self.node_call, self.step


@dataclass(frozen=True)
class BackwardGraph:
    """One captured backward.

    Attributes:
        graph: the calls; the output node returns one value per requested gradient (none for
            ``.backward()``).
        node_calls: every node the engine executed, by index; those that only pass hooks are here too.
        needs_engine_frame: C++ hooks are called, which is possible only while the engine's call is alive.
        inlined: node calls whose own graph was laid in, that is functions that AOTAutograd compiled.
    """

    graph: fx.Graph
    node_calls: tuple[NodeCall, ...]
    needs_engine_frame: bool
    inlined: Mapping[int, InlinedCall] = field(default_factory=dict)

    def calls(self) -> Iterator[tuple[fx.Node, Call]]:
        """The FX nodes that are calls, with their meaning, in graph order."""
        nodes = self.graph.nodes
        return iter([(node, node.meta["call"]) for node in nodes if node.op == "call_function"])

    def placeholders(self) -> Iterator[tuple[fx.Node, Source]]:
        """The FX placeholders with their position among the run-time arguments."""
        nodes = self.graph.nodes
        return iter([(node, node.meta["source"]) for node in nodes if node.op == "placeholder"])

    def outputs(self) -> tuple[fx.Node | None, ...]:
        """The values returned to the caller of ``autograd.grad``."""
        return tuple(next(iter(reversed(self.graph.nodes))).args[0])

    def intact_calls(self) -> list[int]:
        """Inlined node calls of which another part can be differentiated later."""
        return [index for index, inlined in self.inlined.items() if inlined.leaves_a_part]

    def with_graph(self, graph: fx.Graph) -> BackwardGraph:
        """The same capture with its calls laid out anew."""
        return replace(self, graph=graph)

    def node_name(self, index: int) -> str:
        """``MulBackward0 (7 of 31)`` for messages."""
        return f"{self.node_calls[index].name} ({index} of {len(self.node_calls)})"


def call_of(node: fx.Node) -> Call:
    """The `Call` of a call node."""
    call = node.meta["call"]
    assert isinstance(call, Call)
    return call


def call_name(node: fx.Node) -> str:
    """The name of what a call calls, such as ``MulBackward0``."""
    return str(getattr(node.target, "__name__", node.target))


def source_of(node: fx.Node) -> Source:
    """The `Source` of a placeholder."""
    source = node.meta["source"]
    assert isinstance(source, Source)
    return source


def is_alias(node: fx.Node) -> bool:
    """Whether the call is the backward of ``x[...]``, which returns the gradient that it is given."""
    return call_of(node).kind is CallKind.NODE and call_name(node) == "AliasBackward0"


@dataclass(frozen=True)
class Segment:
    """Functional calls between two opaque ones.

    Attributes:
        nodes: the calls, in order.
        inputs: values from before that they read.
        outputs: values of theirs that are read later.
        worth_compiling: whether it holds a node call, not only checks, sums and projections.
        interpret_because: why it is a segment of its own that is not compiled; empty if it is compiled.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    worth_compiling: bool
    interpret_because: str = ""


@dataclass(frozen=True)
class OpaqueCall:
    """One call that runs as eager runs it, with the projections of its result."""

    node: fx.Node
    projections: tuple[fx.Node, ...]
    reason: str


@dataclass(frozen=True)
class Accumulation:
    """One accumulation into ``.grad``: `node`'s arguments are the variable and the gradient."""

    node: fx.Node


PlanStep = Segment | OpaqueCall | Accumulation


@dataclass(frozen=True)
class Schedule:
    """The steps in order; ``dying[i]`` are the values that no step after number i reads."""

    steps: tuple[PlanStep, ...]
    dying: tuple[frozenset[fx.Node], ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in order."""
        return tuple(step for step in self.steps if isinstance(step, Segment))

    @property
    def opaque_calls(self) -> tuple[OpaqueCall, ...]:
        """The opaque calls, in order."""
        return tuple(step for step in self.steps if isinstance(step, OpaqueCall))


def dying_values(
    reads: Sequence[Iterable[fx.Node]], outputs: Iterable[fx.Node | None]
) -> tuple[frozenset[fx.Node], ...]:
    """For each step, the values that no later step reads.

    Args:
        reads: by step, the values that it reads or makes. outputs: outlive all steps.
    """
    kept = [node for node in outputs if node is not None]
    last = last_uses([*enumerate(reads), (len(reads), kept)])
    return tuple(frozenset(last.get(number, ())) for number in range(len(reads)))


# as text: one line per call or step, with short names, under every torch the same


def readable(backward: BackwardGraph) -> str:
    """The calls in order, each group under the autograd node that it belongs to."""
    lines: list[str] = [f"backward({', '.join(node.name for node, _ in backward.placeholders())}):"]
    current = None
    for node, call in backward.calls():
        if call.node_call != current:
            current = call.node_call
            source = backward.node_calls[current].source
            lines.append(f"  # {backward.node_name(current)}" + (f"  {source}" if source else ""))
        target = call_name(node)
        kind = f"  # {call.hook.value}" if call.hook else ""
        lines.append(f"    {node.name} = {target}({', '.join(map(repr, node.args))}){kind}")
    outputs = ", ".join("None" if node is None else node.name for node in backward.outputs())
    lines.append(f"  return ({outputs})")
    return "\n".join(lines)


def readable_schedule(backward: BackwardGraph, schedule: Schedule) -> str:
    """The steps in order: which node calls each segment holds, and what each opaque call is."""
    segments = {step: number for number, step in enumerate(schedule.segments)}
    lines = []
    for number, step in enumerate(schedule.steps):
        if isinstance(step, Segment):
            kind, nodes, source = f"segment {segments[step]}:", step.nodes, ""
        else:
            kind = f"{step.reason} at" if isinstance(step, OpaqueCall) else "accumulation:"
            nodes, source = (step.node,), backward.node_calls[call_of(step.node).node_call].source
        calls = dict.fromkeys(call_of(node).node_call for node in nodes)
        names = ", ".join(map(backward.node_name, calls))
        lines.append(f"{number:4d}  {kind} {names}" + (f"  {source}" if source else ""))
    return "\n".join(lines)
