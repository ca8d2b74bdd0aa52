"""The joint graph of a function, (primals, cotangents) -> (outputs, gradients): its laws and its text form.

In: ``aot.capture`` makes it, and passes change it. Out: ``aot.partition`` and ``aot.export`` read it. If a
law is broken, a `VerificationError` names the stage, the node, its role and the passes so far.

We divide eager's autograd graph of a function into *regions*, to preserve what a user can observe of it. The
regions meet at *boundaries*. A boundary is a differentiable output of the function, or a tensor inside it at
which the graphs of two outputs meet. A region takes the cotangents of its roots and computes gradients for
its destinations: primals, or boundaries closer to the inputs. A function with one output has one region.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from retrograd.errors import Reason, VerificationError
from retrograd.graph.reach import bits_reaching


class PrimalKind(enum.Enum):
    """The origin of a primal."""

    ARGUMENT = "argument"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    SIZE = "size"  # a symbolic integer


@dataclass(frozen=True)
class Primal:
    """An input: its number among the primals, and a readable name (``args[0]``, ``layer.weight``).

    A wrapper subclass has several placeholders, one per inner tensor, numbered by `part`. The same holds for
    the other roles.
    """

    index: int
    name: str
    kind: PrimalKind = PrimalKind.ARGUMENT
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"


@dataclass(frozen=True)
class Cotangent:
    """The cotangent of a boundary."""

    boundary: int
    part: int = 0

    def __str__(self) -> str:
        return f"cotangent of boundary {self.boundary}"


def primal_name(number: int, part: int = 0, parts: int = 1) -> str:
    """The name of a primal's placeholder. `part` numbers it among the `parts` of a wrapper subclass.

    Inductor decides by name which inputs outlive a graph (``is_nonfreeable_buffers``). It assumes that the
    memory of other inputs is free after their last read. Without these names it would cast all parameters
    first, while the device has nothing else to do, and hold all casts at once.
    """
    return f"primals_{number}_{part}" if parts > 1 else f"primals_{number}"


def cotangent_name(boundary: int, part: int = 0, parts: int = 1) -> str:
    """The name of a cotangent's placeholder. Inductor and torch's partitioners recognise cotangents by it."""
    return f"tangents_{boundary}_{part}" if parts > 1 else f"tangents_{boundary}"


@dataclass(frozen=True)
class Output:
    """A value that the forward computes: its number among those values."""

    index: int
    part: int = 0

    def __str__(self) -> str:
        return f"output {self.index}"


@dataclass(frozen=True)
class Destination:
    """Where a gradient goes: a primal, or (if `is_boundary`) a boundary closer to the inputs.

    If several regions contribute to one gradient, each passes on its contributions one by one, numbered, so
    that the engine adds them in eager's order.
    """

    index: int
    is_boundary: bool = False
    number: int = 0

    def __str__(self) -> str:
        return f"{'boundary' if self.is_boundary else 'primal'} {self.index}"


@dataclass(frozen=True)
class Gradient:
    """The contribution of one region to the gradient of one destination."""

    region: int
    of: Destination
    part: int = 0

    def __str__(self) -> str:
        return f"gradient of {self.of} from region {self.region}"


InputRole = Primal | Cotangent
OutputRole = Output | Gradient


@dataclass(frozen=True)
class Boundary:
    """A tensor at which regions meet.

    Attributes:
        value: its forward value (`Output.index`). A boundary that the user does not see has a stand-in
            instead, with its shape but without elements.
        is_visible: whether the user sees it.
    """

    value: int
    is_visible: bool = True


@dataclass(frozen=True)
class Region:
    """A part of eager's autograd graph that runs as one node.

    Attributes:
        roots: the boundaries whose cotangents it takes.
        destinations: where its gradients go.
        has_functions: whether it contains a custom ``autograd.Function``, which computes gradients even from
            an undefined cotangent.
        undefined_matters: whether an undefined cotangent has another effect than zeros.
        saves: whether eager saves tensors for it. Once they are freed, a backward raises.
    """

    roots: tuple[int, ...]
    destinations: tuple[Destination, ...]
    has_functions: bool = False
    undefined_matters: bool = False
    saves: bool = False


@dataclass(frozen=True)
class BackwardStep:
    """One step of a full backward, in eager's order.

    A region runs, or (if `is_leaf`) the gradient of a primal is complete and the primal receives it.
    """

    index: int
    is_leaf: bool = False


@dataclass(frozen=True)
class JointSignature:
    """The meaning of every placeholder and every output of a joint graph.

    Attributes:
        inputs: one role per placeholder, primals first.
        outputs: one role per output: first each `Output`, then each `Gradient`, region by region.
        boundaries, regions: how eager's autograd graph is divided.
        order: the steps of a backward that takes all cotangents, in eager's order.
    """

    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    boundaries: tuple[Boundary, ...] = ()
    regions: tuple[Region, ...] = ()
    order: tuple[BackwardStep, ...] = ()

    @property
    def primals(self) -> tuple[Primal, ...]:
        """The primals, in the order of their placeholders."""
        return tuple(role for role in self.inputs if isinstance(role, Primal))

    @property
    def forward_count(self) -> int:
        """How many outputs the forward computes."""
        return sum(not isinstance(role, Gradient) for role in self.outputs)


def cotangents_reaching(graph: fx.Graph, signature: JointSignature) -> Mapping[fx.Node, int]:
    """For each node, the boundaries on whose cotangents it depends, as bits; 0 for a node of the forward.

    Raises:
        ValueError: the graph and the signature have different numbers of inputs.
    """
    roles = zip(graph.find_nodes(op="placeholder"), signature.inputs, strict=True)
    return bits_reaching(
        graph, {node: 1 << role.boundary for node, role in roles if isinstance(role, Cotangent)}
    )


def bits_of(boundaries: Iterable[int]) -> int:
    """A set of boundaries as the bits of one number."""
    return sum(1 << boundary for boundary in set(boundaries))


_COPY = torch.ops.aten.copy_.default


def output_values(graph: fx.Graph) -> tuple[Any, ...]:
    """The graph's outputs: nodes, and constants such as None."""
    (values,) = graph.output_node().args
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def output_examples(graph: fx.Graph) -> list[Any]:
    """The example values of the graph's outputs; None for an output without one."""
    values = output_values(graph)
    return [value.meta.get("val") if isinstance(value, fx.Node) else None for value in values]


def output_kinds(graph: fx.Graph) -> tuple[str | None, ...]:
    """Dtype and sizes of each output, on which callers rely; None if the metadata holds no tensor.

    They are texts, so that symbolic sizes get no guard.
    """
    return tuple(map(_kind, output_values(graph)))


def _kind(value: Any) -> str | None:
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor):
        return None
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def verify_joint(
    gm: fx.GraphModule,
    signature: JointSignature,
    stage: str,
    passes_so_far: Sequence[str] = (),
    kinds: Sequence[str | None] | None = None,
) -> None:
    """Check the laws of a joint graph.

    The graph is well formed. It has one placeholder per input role and one output per output role. No output
    of the forward depends on a cotangent, and a gradient depends only on cotangents of its region's roots.
    Nothing is mutated except primals, by ``copy_`` at the end. Outputs keep their dtype and sizes.

    Raises:
        VerificationError: a law is broken.
    """
    for broken in _broken_laws(gm, signature, kinds):
        named = broken.node.name if isinstance(broken.node, fx.Node) else ""
        after = f", after passes [{', '.join(passes_so_far)}]" if passes_so_far else ""
        raise VerificationError(
            Reason(
                f"joint-{broken.code}",
                broken.text,
                stage + after,
                node=f"{named} ({broken.role})" if named and broken.role else named or broken.role,
                source=_source(broken.node),
                way_out=_WAYS_OUT[broken.code],
            )
        ) from broken.cause


class _Broken(NamedTuple):
    code: str
    text: str
    node: Any = None
    role: str = ""
    cause: Exception | None = None


def _broken_laws(
    gm: fx.GraphModule, signature: JointSignature, kinds: Sequence[str | None] | None
) -> Iterator[_Broken]:
    """The laws that `gm` breaks. A law is checked only if all laws before it hold."""
    graph, last = gm.graph, next(iter(reversed(gm.graph.nodes)), None)
    try:
        graph.lint()
    except Exception as error:
        yield _Broken("lint", f"the graph is not well formed: {error}", cause=error)
    if last is None or last.op != "output":
        yield _Broken("lint", "the graph has no output at its end")
    placeholders, values = graph.find_nodes(op="placeholder"), output_values(graph)
    for what, code, found, roles in (
        ("placeholders", "inputs", placeholders, signature.inputs),
        ("outputs", "outputs", values, signature.outputs),
    ):
        if len(found) != len(roles):
            text = f"{len(found)} {what} where the signature has {len(roles)} {code}"
            yield _Broken(code, text, role=", ".join(map(str, roles[len(found) :][:1])))
    outputs = list(zip(values, signature.outputs, strict=True))
    reaching = cotangents_reaching(graph, signature)
    for value, role in outputs:
        is_gradient = isinstance(role, Gradient)
        allowed = bits_of(signature.regions[role.region].roots) if isinstance(role, Gradient) else 0
        if outside := reaching.get(value, 0) & ~allowed:
            numbers = ", ".join(str(i) for i in range(outside.bit_length()) if outside >> i & 1)
            why = "which is no root of its region" if is_gradient else "and belongs to the forward"
            text = f"{role} depends on the cotangent of boundary {numbers}, {why}"
            yield _Broken("dependence", text, value, str(role))
    roles_of = dict(zip(placeholders, signature.inputs, strict=True))
    at_end = True
    for node in reversed(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        is_mutating = node.op == "call_function" and schema is not None and schema.is_mutable
        into = roles_of.get(node.args[0]) if node.target is _COPY else None
        if is_mutating and not (at_end and isinstance(into, Primal)):
            yield _Broken("mutation", f"{node.target} changes a tensor in place", node, str(into or ""))
        at_end = at_end and (is_mutating or node.op == "output")
    for (value, role), before in zip(outputs, kinds or (), strict=False):
        now = _kind(value) if isinstance(value, fx.Node) else repr(value)
        if before is not None and now not in (None, before):
            yield _Broken("outputs", f"{role} is {now} and was {before}", value, str(role))


_WAYS_OUT = {
    "lint": "in the pass, insert a node before its users and erase it only when it has none",
    "inputs": "a pass keeps every placeholder, in order, even one that nothing reads",
    "outputs": "a pass keeps every output, in order, with its dtype and sizes",
    "dependence": "in the pass, keep values that a cotangent reaches out of the forward and of other regions",
    "mutation": "use the functional operator; only copy_ into a primal, after everything else, is allowed",
}


def _source(node: Any) -> str:
    trace = node.meta.get("stack_trace") if isinstance(node, fx.Node) else None
    lines = [line.strip() for line in (trace or "").splitlines() if line.strip()]
    return "  ".join(lines[-2:])


# Text form


def rendered(graph: fx.Graph, signature: JointSignature, sources: bool) -> str:
    """The text of the graph. `sources` adds the line of user code before the first call that comes from
    it."""
    lines = ["def joint("]
    placeholders = graph.find_nodes(op="placeholder")
    lines += [
        f"    {_shown_value(node)},  # {role}"
        for node, role in zip(placeholders, signature.inputs, strict=True)
    ]
    lines.append("):")
    before = ""
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if sources and (source := _line_of(node)) not in ("", before):
            lines.append(f"    # {source}")
            before = source
        lines.append(f"    {_shown_value(node)} = {_call(node)}")
    lines.append("    return (")
    for value, role in zip(output_values(graph), signature.outputs, strict=True):
        lines.append(f"        {value},  # {role}")
    return "\n".join([*lines, "    )"])


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    target: Any = node.target
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    if name == "getitem":
        return f"{node.args[0]}[{node.args[1]}]"
    given = [_shown(value) for value in node.args]
    given += [f"{key}={_shown(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(given)})"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, fx.Node) else repr(value)


def _shown_value(node: fx.Node) -> str:
    kind = _kind(node)
    return node.name if kind is None else f"{node.name}: {kind}"


def _line_of(node: fx.Node) -> str:
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    found = [line.strip() for line in lines if line.strip().startswith("File ")]
    return found[-1] if found else ""
