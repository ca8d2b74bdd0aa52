"""Joint graphs for tests of passes, made without the capture: ``make_fx`` over ``torch.autograd.grad``.

In: a function of tensors, and the tensors. Out: a graph module with its signature, inputs for it, and the
    graph as text.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.graph.joint import (
    Boundary,
    Cotangent,
    Destination,
    Gradient,
    InputRole,
    JointSignature,
    Output,
    Primal,
    PrimalKind,
    Region,
)

Fn = Callable[..., Any]


@dataclass(frozen=True)
class Joint:
    """A joint graph and real inputs for it."""

    gm: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]

    @property
    def signature(self) -> JointSignature:
        return self.gm.meta["signature"]

    def run(self, seed: int = 0) -> tuple[Any, ...]:
        """What the graph gives for the inputs, from one state of the generator."""
        return interpreted(self.gm, self.inputs, seed)


def interpreted(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], seed: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    with torch.no_grad():
        return tuple(fx.Interpreter(gm).run(*(value.detach().clone() for value in inputs)))


def joint(fn: Fn, *primals: torch.Tensor, is_divided: bool = False, dynamic: bool = False) -> Joint:
    """The joint graph of `fn`.

    Args:
        primals: those that require grad are differentiated; of them, parameters have that role.
        is_divided: whether each output has a region of its own; else there is one for all.
        dynamic: whether sizes are symbolic.
    """
    outputs = _tuple(fn(*primals))
    roots = [n for n, value in enumerate(outputs) if value.requires_grad]
    wanted = [n for n, value in enumerate(primals) if value.requires_grad]
    regions = [[n] for n in range(len(roots))] if is_divided else [list(range(len(roots)))]
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(outputs[n].shape, generator=generator).to(outputs[n].dtype).detach() for n in roots
    ]

    def both(*inputs: torch.Tensor) -> tuple[Any, ...]:
        given, flowing = inputs[: len(primals)], inputs[len(primals) :]
        results = _tuple(fn(*given))
        grads: list[Any] = []
        for region in regions if roots else []:
            grads += torch.autograd.grad(
                [results[roots[n]] for n in region],
                [given[n] for n in wanted],
                [flowing[n] for n in region],
                allow_unused=True,
                retain_graph=True,
            )
        return (*results, *grads)

    inputs = (*(leaf(value) for value in primals), *cotangents)
    gm = make_fx(both, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    gm.meta["signature"] = _signature(primals, roots, regions, wanted, len(outputs))
    return Joint(gm, inputs)


def leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _signature(
    primals: Sequence[torch.Tensor],
    roots: Sequence[int],
    regions: Sequence[Sequence[int]],
    wanted: Sequence[int],
    outputs: int,
) -> JointSignature:
    kinds = [
        PrimalKind.PARAMETER if isinstance(value, torch.nn.Parameter) else PrimalKind.ARGUMENT
        for value in primals
    ]
    roles: list[InputRole] = [Primal(n, f"args[{n}]", kind) for n, kind in enumerate(kinds)]
    roles += [Cotangent(n) for n in range(len(roots))]
    destinations = tuple(Destination(n) for n in wanted)
    known = tuple(Region(tuple(region), destinations) for region in regions) if roots else ()
    gradients = [Gradient(n, of) for n, region in enumerate(known) for of in region.destinations]
    return JointSignature(
        tuple(roles),
        (*map(Output, range(outputs)), *gradients),
        tuple(Boundary(n) for n in roots),
        known,
    )


def joint_by_hand(
    build: Callable[[fx.Graph, list[fx.Node]], tuple[Any, ...]],
    examples: Sequence[torch.Tensor],
    cotangents: int,
    outputs: int = 1,
    destinations: Sequence[int] = (0,),
) -> Joint:
    """A joint graph whose calls `build` writes; it gets the placeholders and returns the outputs."""
    graph = fx.Graph()
    count = len(examples) - cotangents
    names = [f"primal{n}" for n in range(count)] + [f"cotangent{n}" for n in range(cotangents)]
    placeholders = [graph.placeholder(name) for name in names]
    fake = torch._subclasses.FakeTensorMode()
    for node, example in zip(placeholders, examples, strict=True):
        node.meta["val"] = fake.from_tensor(example)
    graph.output(tuple(build(graph, placeholders)))
    gm = fx.GraphModule({}, graph)
    region = Region(tuple(range(cotangents)), tuple(Destination(n) for n in destinations))
    gm.meta["signature"] = JointSignature(
        (*(Primal(n, f"args[{n}]") for n in range(count)), *map(Cotangent, range(cotangents))),
        (*map(Output, range(outputs)), *(Gradient(0, of) for of in region.destinations)),
        tuple(Boundary(n) for n in range(cotangents)),
        (region,),
    )
    return Joint(gm, tuple(examples))


def text(gm: fx.GraphModule) -> str:
    """The graph, one call a line, marks of recomputation behind it."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        args = [_argument(value) for value in node.args]
        args += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
        if node.op == "output":
            lines.append(f"return {args[0]}")
            continue
        name = str(node.target) if node.op == "get_attr" else _operator(node.target)
        call = name if node.op == "get_attr" else f"{name}({', '.join(args)})"
        mark = node.meta.get("recompute")
        lines.append(f"{node.name} = {call}" + (f"  # {mark.name}" if mark is not None else ""))
    return "\n".join(lines) + "\n"


def _operator(target: Any) -> str:
    name = str(target) if hasattr(target, "_schema") else target.__name__
    return name.removeprefix("aten.").removesuffix(".default")


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return str(value).removeprefix("torch.")


def marking(mark_of: Callable[[fx.Node], CheckpointPolicy | None]) -> Fn:
    """A pass that marks the calls of the forward half; parts of a call's result as the call itself."""

    def marked(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        for node in gm.graph.nodes:
            call = node.args[0] if node.target is operator.getitem else node
            if node.op == "call_function" and not node.meta.get("is_backward"):
                node.meta |= {"recompute": mark} if (mark := mark_of(call)) is not None else {}
        return gm

    return marked
