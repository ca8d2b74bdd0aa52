"""What stands between a backward and its capture.

In: an `EngineRequest` and the modes that are active. Out: the first obstacle, as a code and a sentence; such
a backward runs on the stock engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from retrograd._torch.autograd.engine import EngineRequest
from retrograd._torch.cuda import is_captured_beside_streams


def why_not_collectable(request: EngineRequest) -> tuple[str, str] | None:
    """Why the engine cannot hand this backward over: a code and a sentence; None when it can."""
    for code, text, applies in _OBSTACLES:
        if applies(request):
            return code, text
    return None


def is_traced() -> bool:
    """Whether a tracer runs this backward to see its operations: there is nothing to compile then, and
    nothing to report. AOTAutograd, ``torch.compile``, ``torch.export`` and ``make_fx`` do so.

    Asked of this thread's modes: ``torch.compiler.is_compiling`` is true on all threads while Dynamo compiles
    on one."""
    return torch._C._get_tracing_state() is not None or any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACERS
    )


_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def is_transformed(request: EngineRequest) -> bool:
    """Whether ``torch.func`` (grad, vjp, jacrev, vmap, …) differentiates tensors of its own: that is a part
    of the transform, and nobody's backward."""
    roots = [tensor for tensor in request.tensors if isinstance(tensor, torch.Tensor)]
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, roots))


def _has_batched_root(request: EngineRequest) -> bool:
    """Whether a root or cotangent is wrapped by functorch or by the older vmap of `is_grads_batched`."""
    tensors = [t for t in (*request.tensors, *request.grad_tensors) if isinstance(t, torch.Tensor)]
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(t) or "Batched" in str(torch._C._dispatch_keys(t))
        for t in tensors
    )


#: What the engine's protocol refuses or cannot express, in the order in which it is looked for.
_OBSTACLES: tuple[tuple[str, str, Callable[[EngineRequest], bool]], ...] = (
    (
        "anomaly-mode",
        "anomaly mode checks every node's result as soon as it is there",
        lambda _: torch.is_anomaly_enabled(),
    ),
    (
        "cuda-graph-capture",
        "a CUDA graph is being captured in a program that uses several streams",
        lambda _: is_captured_beside_streams(),
    ),
    (
        "dispatch-mode",
        "a TorchDispatchMode is active and must see every operation of the backward",
        lambda _: torch._C._len_torch_dispatch_stack() > 0,
    ),
    (
        "functorch",
        "a functorch transform (grad, vjp, vmap, …) is active",
        lambda request: torch._C._functorch.maybe_current_level() is not None or _has_batched_root(request),
    ),
    (
        "create-graph-without-retain-graph",
        "create_graph=True with retain_graph=False",
        lambda request: request.create_graph and not request.keep_graph,
    ),
    (
        "inference-mode",
        "inference mode is active",
        lambda _: torch.is_inference_mode_enabled(),
    ),
)
