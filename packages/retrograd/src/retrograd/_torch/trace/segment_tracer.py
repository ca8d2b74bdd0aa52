"""Trace a segment to ATen under fake tensors. No Dynamo, no AOTAutograd.

In: a boxed function, the values that it is called with, and which sizes are to be symbolic. Out: a `Traced`
graph that mutates nothing, its fake inputs and the shape environment with the guards that tracing left there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from retrograd._torch.fx import is_mutating
from retrograd._torch.state import autocast_off
from retrograd._torch.tensor import is_lazy
from retrograd._torch.trace.fakes import fake_of, is_fake, new_fake_mode, symbolic_integer, why_not_fakeable
from retrograd._torch.trace.graph_tracer import Decompositions, make_graph
from retrograd.errors import Refusal
from retrograd.graph.emit import Boxed


@dataclass(frozen=True)
class Traced:
    """A traced segment.

    Attributes:
        gm: the functional ATen graph; returns a tuple of the outputs that are not None.
        example_inputs: fake tensors and symbolic integers, one per value of `fed`.
        fed: positions of the arguments that the graph takes.
        given: for each output of the segment, its position in the graph's result, or None.
        shape_env: has the guards; None when every size is static.
    """

    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    shape_env: ShapeEnv | None


def is_batched(value: Any) -> bool:
    """Whether the value is a tensor of torch's older vmap, which ``is_grads_batched`` uses."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def is_not_in_memory(value: Any) -> bool:
    """Whether the elements of a tensor are not those in its memory, which generated code reads: it is lazily
    conjugated or negated, has no memory because all are zero, or is batched."""
    if not isinstance(value, torch.Tensor):
        return False
    return is_lazy(value) or value._is_zerotensor() or is_batched(value)


def trace(
    fn: Boxed,
    args: Sequence[Any],
    symbolic: Mapping[int, frozenset[int]] | None,
    decompositions: Decompositions,
) -> Traced:
    """Trace `fn`.

    Args:
        fn: runs the segment on a list of values.
        args: the values; None for undefined gradients.
        symbolic: for each argument, which dimensions are symbolic (dimension 0 of an int is its value);
            None to make every size static.
        decompositions: applied while tracing.
    """
    if reason := next(filter(None, map(_why_not_traceable, args)), None):
        raise Refusal("not-traceable", reason)
    mode = new_fake_mode(symbolic is not None)
    fakes = _fakes(mode, args, symbolic or {})
    fed = tuple(i for i, fake in enumerate(fakes) if isinstance(fake, (torch.Tensor, torch.SymInt)))
    given: list[int | None] = []

    def flat(*inputs: Any) -> tuple[Any, ...]:
        values = dict(zip(fed, inputs, strict=True))
        results = fn([values.get(i, value) for i, value in enumerate(args)])
        present = [result for result in results if result is not None]
        count = iter(range(len(present)))
        given[:] = [None if result is None else next(count) for result in results]
        return tuple(present)

    example_inputs = tuple(fakes[i] for i in fed)
    gm = _functional_graph(flat, example_inputs, decompositions)
    return Traced(gm, example_inputs, fed, tuple(given), mode.shape_env)


def decomposed(
    gm: fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode, table: Decompositions
) -> fx.GraphModule:
    """`gm` traced again with decompositions."""
    with torch.no_grad(), autocast_off(), fake_mode:
        return _graph(gm, inputs, table)


def _why_not_traceable(value: Any) -> str | None:
    """Why a segment with this input has to be interpreted; None if it can be traced."""
    if isinstance(value, torch.Tensor):
        return "tensor subclass FakeTensor" if is_fake(value) else why_not_fakeable(value)
    return None if value is None or isinstance(value, (int, float)) else f"{type(value).__name__} argument"


def _functional_graph(
    fn: Callable[..., Any], inputs: Sequence[Any], decompositions: Decompositions
) -> fx.GraphModule:
    """Trace as it is; if the graph mutates, functionalise the graph. (Not the function: functionalisation
    would hide from it which of its arguments require grad, and would meet tensor subclasses.)"""
    gm = _graph(fn, inputs, decompositions)
    if any(map(is_mutating, gm.graph.nodes)):
        with torch.no_grad():
            mutating = gm
            functional = torch.func.functionalize(lambda *args: mutating(*args), remove="mutations")
            gm = _graph(functional, inputs, decompositions)
    if left := next(filter(is_mutating, gm.graph.nodes), None):
        raise Refusal("not-traceable", f"{left.target} changes one of the segment's inputs in place")
    return gm


def _graph(fn: Callable[..., Any], inputs: Sequence[Any], decompositions: Decompositions) -> fx.GraphModule:
    def body(tracer: Any) -> Sequence[Any]:
        for i, value in enumerate(inputs):
            tracer.placeholder(f"arg{i}_1", value)
        results: Sequence[Any] = fn(*inputs)
        return results

    gm = make_graph(body, decompositions)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _fakes(mode: FakeTensorMode, values: Sequence[Any], symbolic: Mapping[int, frozenset[int]]) -> list[Any]:
    """One fake per value; the same tensor twice gives the same fake; None and static numbers stay."""
    seen: dict[int, Any] = {}

    def fake(index: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                made = fake_of(mode, value, f"t{index}", symbolic.get(index, ()))
                # Some formulas ask their saved tensors (linalg.solve: which gradients are wanted).
                seen[id(value)] = made.requires_grad_(value.requires_grad)
            return seen[id(value)]
        if type(value) is int and symbolic.get(index):
            return symbolic_integer(mode, value, f"t{index}")
        return value

    return [fake(index, value) for index, value in enumerate(values)]
