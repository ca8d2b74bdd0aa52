"""Running torch's engine: the request, the stock run, and the gateway through which every backward passes.

In: the arguments of ``torch.autograd.graph._engine_run_backward``, the one Python gateway of
``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad``. Out: the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.autograd.graph as autograd_graph

#: where torch keeps the gateway.
GATEWAYS = ("torch.autograd.graph:_engine_run_backward", "torch.autograd:_engine_run_backward")

_stock_run_backward = autograd_graph._engine_run_backward


@dataclass(frozen=True)
class EngineRequest:
    """One call of the engine. Field names are the keyword names of the C++ engine.

    Attributes:
        tensors: roots, tensors or ``GradientEdge``.
        grad_tensors: one cotangent per root.
        keep_graph, create_graph: as in ``torch.autograd.backward``.
        inputs: what gradients are wanted of; empty for all leaves.
        allow_unreachable: whether an input that the roots do not reach gives None.
        accumulate_grad: write ``.grad`` (backward) instead of returning gradients (grad).
        added: how many of the last `inputs` were added by us; nobody wants their gradients.
    """

    tensors: tuple[Any, ...]
    grad_tensors: tuple[Any, ...]
    keep_graph: bool
    create_graph: bool
    inputs: tuple[Any, ...] = ()
    allow_unreachable: bool = False
    accumulate_grad: bool = False
    added: int = 0

    def as_asked(self) -> EngineRequest:
        """Without the inputs that were added."""
        return replace(self, inputs=self.inputs[: -self.added], added=0) if self.added else self

    @classmethod
    def of(
        cls,
        tensors: Any,
        grad_tensors: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Any = (),
        *flags: bool,
        **named: bool,
    ) -> EngineRequest:
        """Read the arguments as the gateway receives them."""
        given = tuple(inputs or ())
        return cls(tuple(tensors), tuple(grad_tensors), keep_graph, create_graph, given, *flags, **named)


def run_stock(request: EngineRequest) -> tuple[torch.Tensor | None, ...]:
    """Run the backward on the engine as torch would."""
    return _stock_run_backward(
        request.tensors,
        request.grad_tensors,
        request.keep_graph,
        request.create_graph,
        request.inputs,
        allow_unreachable=request.allow_unreachable,
        accumulate_grad=request.accumulate_grad,
    )


def stock_calls_on(frame: FrameType | None) -> int:
    """How many calls of torch's own gateway are under way on the stack that ends in `frame`."""
    count = 0
    while frame is not None:
        count += frame.f_code is _stock_run_backward.__code__
        frame = frame.f_back
    return count
