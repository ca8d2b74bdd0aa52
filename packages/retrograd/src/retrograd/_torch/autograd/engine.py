"""Running torch's engine: the request, the stock run, and what stands between a backward and its capture.

In: the arguments of ``torch.autograd.graph._engine_run_backward``, the one Python gateway of
``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad``; the modes that are active. Out:
the gradients; or the first obstacle, as a code and a sentence: such a backward runs on the stock engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.autograd.graph as autograd_graph

from retrograd._torch.cuda import is_captured_beside_streams

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


def why_not_collectable(request: EngineRequest) -> tuple[str, str] | None:
    """What the engine's protocol refuses or cannot express: a code and a sentence; None if it can hand this
    backward over."""
    if torch.is_anomaly_enabled():
        return "anomaly-mode", "anomaly mode checks every node's result as soon as it is there"
    if is_captured_beside_streams():
        return "cuda-graph-capture", "a CUDA graph is being captured in a program that uses several streams"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "dispatch-mode", "a TorchDispatchMode is active and must see every operation of the backward"
    if torch._C._functorch.maybe_current_level() is not None or _has_batched_root(request):
        return "functorch", "a functorch transform (grad, vjp, vmap, …) is active"
    if request.create_graph and not request.keep_graph:
        return "create-graph-without-retain-graph", "create_graph=True with retain_graph=False"
    if torch.is_inference_mode_enabled():
        return "inference-mode", "inference mode is active"
    return None


def is_traced() -> bool:
    """Whether a tracer runs this backward to see its operations: there is nothing to compile then, and
    nothing to report. AOTAutograd, ``torch.compile``, ``torch.export`` and ``make_fx`` do so.

    Asked of this thread's modes: ``torch.compiler.is_compiling`` is true on all threads while Dynamo compiles
    on one."""
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    tracers = (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    return torch._C._get_tracing_state() is not None or any(mode(key) is not None for key in tracers)


def is_transformed(request: EngineRequest) -> bool:
    """Whether ``torch.func`` (grad, vjp, jacrev, vmap, …) differentiates tensors of its own: that is a part
    of the transform, and nobody's backward."""
    roots = [tensor for tensor in request.tensors if isinstance(tensor, torch.Tensor)]
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, roots))


def _has_batched_root(request: EngineRequest) -> bool:
    """Whether a root or cotangent is wrapped by functorch or by the older vmap of `is_grads_batched`."""
    tensors = [t for t in (*request.tensors, *request.grad_tensors) if isinstance(t, torch.Tensor)]
    functorch = torch._C._functorch
    return any(
        functorch.is_functorch_wrapped_tensor(t) or functorch.is_legacy_batchedtensor(t) for t in tensors
    )
