"""What stands between a backward and its capture.

In: an `EngineRequest` and the modes that are active. Out: the first obstacle, as a code and a sentence; such
a backward runs on the stock engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrograd._torch.engine import EngineRequest
from retrograd._torch.live_graph import read_live_graph

__all__ = ["is_traced", "why_not_collectable"]


def why_not_collectable(request: EngineRequest) -> tuple[str, str] | None:
    """Why the engine cannot hand this backward over: a code and a sentence; None when it can."""
    for code, text, applies in _OBSTACLES:
        if applies(request):
            return code, text
    return None


def is_traced() -> bool:
    """Whether a tracer runs this backward to see its operations: there is nothing to compile then, and
    nothing to report. AOTAutograd, ``torch.compile``, ``torch.export`` and ``make_fx`` do so."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)
    )


_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def _has_batched_root(request: EngineRequest) -> bool:
    """Whether a root or cotangent is wrapped by functorch or by the older vmap of `is_grads_batched`."""
    tensors = [t for t in (*request.tensors, *request.grad_tensors) if isinstance(t, torch.Tensor)]
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(t) or "Batched" in str(torch._C._dispatch_keys(t))
        for t in tensors
    )


def _frees_an_input_node(request: EngineRequest) -> bool:
    """Whether an intermediate input has a node that is not executed, but keeps saved tensors.

    Eager frees only what it executes; the engine's capture frees the node of every input too, and the part
    of the graph below it could not be differentiated any more.
    """
    if all(isinstance(tensor, torch.Tensor) and tensor.is_leaf for tensor in request.inputs):
        return False
    live = read_live_graph(request)
    wanted = live.wanted or frozenset()
    ends = (
        live.nodes[i].handle
        for i in wanted
        if not any(edge is not None and edge.node in wanted for edge in live.nodes[i].edges)
    )
    return any(_keeps_saved_tensors(node) for node in ends)


def _keeps_saved_tensors(node: Any) -> bool:
    return any(name.startswith("_raw_saved_") for name in dir(node))


#: What the engine's protocol refuses or cannot express, in the order in which it is looked for.
_OBSTACLES: tuple[tuple[str, str, Callable[[EngineRequest], bool]], ...] = (
    (
        "reentrant",
        "a backward started inside a running backward",
        lambda _: torch._C._current_graph_task_id() != -1,
    ),
    (
        "anomaly-mode",
        "anomaly mode checks every node's result as soon as it is there",
        lambda _: torch.is_anomaly_enabled(),
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
    (
        "intermediate-input",
        "a gradient of an intermediate tensor is asked for, whose own node the engine would free too",
        lambda request: not request.keep_graph and _frees_an_input_node(request),
    ),
)
