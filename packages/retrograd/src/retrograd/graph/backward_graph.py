"""A captured backward as an FX graph of typed calls, and the steps into which it is cut.

In: ``live.capture`` builds the graph in the order in which the engine visits the nodes;
``live.capture.segments`` cuts it into steps. Out: the scheduling pass returns a `BackwardGraph` in eager
order; ``live.run.plan`` runs the steps.

Placeholders are tensors lifted out of the autograd graph (``input_i``), sizes that have changed (``size_i``),
lifted scalars (``scalar_i``), hook objects and Function contexts (``hook_i``) and packed saved tensors
(``packed_i``). Every other node carries a `Call` under ``meta["call"]``.

A function that AOTAutograd compiled has its own backward graph: an `AotBackward`, made by
``engine.stock_aot``. ``live.inlined.lay_in`` inlines it into the captured one.
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
        slot: the output of the forward to which it belongs.
        leaves: how many placeholders it fills; more than one for a tensor subclass.
        read: turns the gradient that arrives into those values, in the layout and class of the traced one.
    """

    slot: int
    leaves: int
    read: Callable[[Any], list[Any]]


@dataclass(frozen=True)
class BuiltGradient:
    """A gradient that is a tensor subclass: `build` makes it from the values of `parts`."""

    parts: tuple[Any, ...]
    build: Callable[..., Any]


@dataclass(frozen=True)
class AotBackward:
    """The backward graph of one compiled function.

    Its placeholders are, in this order: symbolic sizes, saved tensors, saved opaque objects, tangents.

    Attributes:
        name: the prefix of its nodes in the captured graph, such as ``aot3``.
        graph: ATen calls. Each node carries ``seq_nr``, the sequence number of the forward operation that it
            differentiates.
        constants: the values of its ``get_attr`` nodes.
        tangents: the cotangents it takes.
        gradients: for each input of the forward: None, a node of `graph`, or a `BuiltGradient`.
        kept_on_context: how many saved tensors are attributes of the context rather than saved tensors of the
            node.
    """

    name: str
    graph: fx.Graph
    constants: Mapping[str, Any]
    tangents: tuple[Tangent, ...]
    gradients: tuple[fx.Node | BuiltGradient | None, ...]
    kept_on_context: int


@dataclass(frozen=True)
class AotCall:
    """What the engine passes when it reaches a compiled function. Values are the recorder's.

    Attributes:
        context: position of the function's context among the hooks.
        grads: gradients of the forward's outputs; None is undefined.
        sizes: symbolic sizes that the forward saved.
        saved: tensors that the forward saved.
        objects: positions among the hooks of the opaque objects that the forward saved.
        wanted: for each argument of the forward, whether it was a tensor.
        zeros: for an output, returns a function that makes zeros in place of its gradient; None if sizes are
            unknown.
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
    """A node call whose own graph was inlined. Eager would have run many nodes in its place.

    Attributes:
        steps: for each step, in order, the gradients (numbers of the node's edges) that are ready at its end.
        totals: by output of the forward, its full gradient before hooks: the incoming gradient plus what the
            graph itself adds.
        consumed: which of eager's nodes would have released their saved tensors, as sequence numbers or
            similar keys.
        consumed_for: by output of the forward, the same if only the gradient of that output is requested.
        leaves_a_part: whether another subgraph can be differentiated later without ``retain_graph``.
    """

    steps: tuple[tuple[int, ...], ...]
    totals: Mapping[int, fx.Node | None]
    consumed: frozenset[float]
    consumed_for: Mapping[int, frozenset[float]]
    leaves_a_part: bool


class HookKind(enum.Enum):
    """The kind of a hook. The value is its name in torch's documentation."""

    TENSOR_PRE = "tensor hook"
    RETAIN_GRAD = "retain_grad or C++ tensor hook"
    NODE_PRE = "node pre hook"
    NODE_POST = "node post hook"
    POST_ACCUMULATE = "post-accumulate-grad hook"
    UNPACK = "saved-tensor unpack hook"


class CallKind(enum.Enum):
    """The kind of a call of a `BackwardGraph`. A segment contains only calls of functional kinds."""

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

    # Every pass looks up the kind of each call. This hash is computed in C, that of `Enum` in Python.
    __hash__ = object.__hash__

    @property
    def is_functional(self) -> bool:
        """Whether the call has no effect besides its results."""
        return self in _FUNCTIONAL

    @property
    def is_node(self) -> bool:
        """Whether the call represents an autograd node. (An inlined node is many calls of kind `ATEN`.)"""
        return self in _NODES


_FUNCTIONAL = frozenset(
    {CallKind.NODE, CallKind.ATEN, CallKind.VALIDATE, CallKind.COPY_SLICES, CallKind.SUM, CallKind.PROJECT}
)

_NODES = frozenset(
    {CallKind.NODE, CallKind.CPP_FUNCTION, CallKind.FUNCTION, CallKind.COPY_SLICES, CallKind.ACCUMULATE}
)


class SourceKind(enum.Enum):
    """The list of the engine's run-time arguments from which a placeholder reads."""

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
        index: its position in the engine's order.
        name: the autograd node's name.
        source: the line of user code that made the node in the forward, if known. Anomaly mode records it.
    """

    index: int
    name: str
    source: str = ""


@dataclass(frozen=True)
class Call:
    """The meaning of one FX node.

    Attributes:
        kind: the kind of call.
        node_call: index of the node call to which it belongs.
        hook: the kind of hook, for hook calls.
        step: for a call of an inlined node, its step (see `BackwardGraph.inlined`).
        note: why the call is what it is, if its kind does not show that.
        slot: for a hook on one gradient, and for the call that passes a gradient into an inlined node: the
            number of that gradient.
    """

    kind: CallKind
    node_call: int
    hook: HookKind | None = None
    step: int = 0
    note: str = ""
    slot: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The node call and the step within it."""
        return self.node_call, self.step


@dataclass(frozen=True)
class BackwardGraph:
    """One captured backward.

    Attributes:
        graph: the calls. The output node returns one value per requested gradient (none for ``.backward()``).
        node_calls: every node that the engine executed, by index, including those that only pass hooks.
        needs_engine_frame: whether it calls C++ hooks, which is possible only during the engine's call.
        inlined: the node calls whose own graph was inlined: functions that AOTAutograd compiled.
    """

    graph: fx.Graph
    node_calls: tuple[NodeCall, ...]
    needs_engine_frame: bool
    inlined: Mapping[int, InlinedCall] = field(default_factory=dict)

    def calls(self) -> Iterator[tuple[fx.Node, Call]]:
        """The FX nodes that are calls, each with its `Call`, in graph order."""
        nodes = self.graph.nodes
        return iter([(node, node.meta["call"]) for node in nodes if node.op == "call_function"])

    def placeholders(self) -> Iterator[tuple[fx.Node, Source]]:
        """The FX placeholders, each with its position among the run-time arguments."""
        nodes = self.graph.nodes
        return iter([(node, node.meta["source"]) for node in nodes if node.op == "placeholder"])

    def outputs(self) -> tuple[fx.Node | None, ...]:
        """The values that ``autograd.grad`` returns to the caller."""
        return tuple(next(iter(reversed(self.graph.nodes))).args[0])

    def intact_calls(self) -> list[int]:
        """Inlined node calls of which another subgraph can be differentiated later."""
        return [index for index, inlined in self.inlined.items() if inlined.leaves_a_part]

    def with_graph(self, graph: fx.Graph) -> BackwardGraph:
        """The same capture with another graph."""
        return replace(self, graph=graph)

    def node_name(self, index: int) -> str:
        """The node's name for messages, such as ``MulBackward0 (7 of 31)``."""
        return f"{self.node_calls[index].name} ({index} of {len(self.node_calls)})"


def call_of(node: fx.Node) -> Call:
    """The `Call` of a call node."""
    call = node.meta["call"]
    assert isinstance(call, Call)
    return call


def call_name(node: fx.Node) -> str:
    """The name of the call's target, such as ``MulBackward0``."""
    return str(getattr(node.target, "__name__", node.target))


def source_of(node: fx.Node) -> Source:
    """The `Source` of a placeholder."""
    source = node.meta["source"]
    assert isinstance(source, Source)
    return source


#: The nodes of ``x[...]`` and of views with as many elements. Their backwards return views, as a rule.
_OF_VIEWS = frozenset(
    f"{name}Backward0" for name in ("Alias", "View", "UnsafeView", "T", "Transpose", "Permute", "Unsqueeze")
)


def returns_view(node: fx.Node) -> bool:
    """Whether the call is the backward of a view, which computes nothing."""
    return call_of(node).kind is CallKind.NODE and call_name(node) in _OF_VIEWS


@dataclass(frozen=True)
class Segment:
    """Functional calls between two opaque ones.

    Attributes:
        nodes: the calls, in order.
        inputs: earlier values that the calls read.
        outputs: values of the calls that are read later.
        worth_compiling: whether it contains a node call that computes something, not only views, checks, sums
            and projections.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    worth_compiling: bool


@dataclass(frozen=True)
class OpaqueCall:
    """One call that runs as in eager, with the projections of its result."""

    node: fx.Node
    projections: tuple[fx.Node, ...]
    reason: str


@dataclass(frozen=True)
class Accumulation:
    """One accumulation into ``.grad``. The arguments of `node` are the variable and the gradient."""

    node: fx.Node


PlanStep = Segment | OpaqueCall | Accumulation


@dataclass(frozen=True)
class Schedule:
    """The steps in order. ``dying[i]`` are the values that no step after step i reads."""

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
        reads: for each step, the values that it reads or makes.
        outputs: values that outlive all steps.
    """
    kept = [node for node in outputs if node is not None]
    last = last_uses([*enumerate(reads), (len(reads), kept)])
    return tuple(frozenset(last.get(number, ())) for number in range(len(reads)))


# Text form: one line per call or step, with short names, identical under every version of torch.


def readable(backward: BackwardGraph) -> str:
    """The calls in order, grouped by the autograd node to which they belong."""
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
    """The steps in order: the node calls of each segment, and each opaque call with its reason."""
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
