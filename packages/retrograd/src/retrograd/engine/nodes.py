"""Autograd nodes and Functions: called by hand; their saved tensors checked for changes, and released.

In: nodes of an autograd graph (``grad_fn``) and gradients. Out: the gradients they give for each of their
edges, as ``Engine::evaluate_function`` and ``validate_outputs`` (``torch/csrc/autograd/engine.cpp``) would
hand them on.

In: nodes, or the tensors that the engine collected, whose versions it has checked. Out: the tensors with the
history that they had when they were saved; which of them were changed in place since. Eager checks a saved
tensor when its node reads it; a plan must do so after user code has run. The text of the error follows
``SavedVariable::unpack`` in ``torch/csrc/autograd/saved_variable.cpp``.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from retrograd.engine.collection import run_stock
from retrograd.engine.request import EngineRequest
from retrograd.errors import Refusal
from retrograd.graph.eager_order import LiveGraph
from retrograd.runtime.modes import torch_functions_off, without_torch_functions
from retrograd.runtime.tensor import PLAIN_CLASSES, zeros_of_slot

#: the versions of tensors at one time, by the nodes that stand for them.
Versions = Mapping[fx.Node, int]


@without_torch_functions
def raise_modified(pairs: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Raise eager's error for the first tensor that is not at its version."""
    for tensor, version in pairs:
        if tensor._version != version:
            raise RuntimeError(modified_error(tensor, version))


def modified_error(tensor: torch.Tensor, expected: int) -> str:
    """What eager says when a saved tensor is not at the `expected` version."""
    node = tensor.grad_fn
    name = "" if node is None else re.sub(*_shortening(), node.name())
    origin = name and f", which is output {tensor.output_nr} of {name},"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}]{origin} is at version {tensor._version}; "
        f"expected version {expected} instead. Hint: enable anomaly detection to find the operation that "
        "failed to compute its gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False)."
    )


@functools.cache
def _shortening() -> tuple[str, str]:
    """What torch's error replaces in the name of a node, and by what: since 2.13 it names the operator."""
    with torch.enable_grad(), torch.inference_mode(False):
        saved = torch.zeros((), device="cpu", requires_grad=True).clone()
        root = saved * saved
        torch.autograd.graph.increment_version(saved)
    request = EngineRequest((root,), (torch.zeros(()),), False, False, accumulate_grad=True)
    try:
        run_stock(request)
    except RuntimeError as error:
        return (r"$^", "") if "CloneBackward0" in str(error) else (r"Backward\d*$", "")
    raise AssertionError("torch accepted a saved tensor that was changed in place")


def versions_of(values: Sequence[Any]) -> list[int | None]:
    """The version of each; None for what tracks none."""
    if PLAIN_CLASSES.issuperset(map(type, values)):
        try:
            return [value._version for value in values]
        except RuntimeError:  # an inference tensor is among them
            pass
    with torch_functions_off():
        return [
            value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None
            for value in values
        ]


def request_to_release(
    live: LiveGraph, request: EngineRequest, nodes: Collection[int], from_roots: bool
) -> EngineRequest:
    """The backward whose nodes are `nodes`. The engine takes whole paths: they hold every node on a path
    between two of them.

    Args:
        live: the graph of `request`. nodes: indices in it.
        from_roots: whether the nodes are all those above them too, so that the roots of `request` serve.
    """
    ends = [i for i in nodes if not any(edge and edge.node in nodes for edge in live.nodes[i].edges)]
    inputs = tuple(GradientEdge(live.nodes[i].handle, 0) for i in ends)
    if from_roots:
        return EngineRequest(request.tensors, request.grad_tensors, False, False, inputs, True)
    followers = {edge.node for i in nodes for edge in live.nodes[i].edges if edge}
    heads = [live.nodes[i].handle for i in nodes if i not in followers]
    roots = tuple(GradientEdge(node, 0) for node in heads)
    return EngineRequest(roots, tuple(map(_cotangent, heads)), False, False, inputs, True)


def _cotangent(node: Any) -> torch.Tensor:
    """Something of the metadata of a node's first gradient; it takes no memory."""
    metadata = node._input_metadata[0]
    return torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(metadata.shape)


def fitted(node: Any, slot: int, grad: torch.Tensor) -> torch.Tensor:
    """`grad` as the engine makes it fit the node's input: summed to its shape, cast to its dtype."""
    metadata = node._input_metadata[slot]
    shape = tuple(metadata.shape)
    if tuple(grad.shape) != shape:
        pairs = zip(reversed(shape), reversed(grad.shape), strict=False)
        # As ``at::is_expandable_to`` says.
        if len(shape) > grad.dim() or not all(small == large or small == 1 for small, large in pairs):
            raise Refusal(
                "node-refused", f"got {list(grad.shape)} but expected shape compatible with {list(shape)}"
            )
        grad = grad.sum_to_size(shape)
    if grad.dtype != metadata.dtype:
        grad = grad.to(metadata.dtype)
    return grad


def call_node(node: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Run the node; one gradient per edge, not fitted yet.

    Raises:
        Refusal: a Python Function returned too few or too many gradients, or what is none; or it changed its
            context, or the gradients that it was given.
    """
    if not hasattr(node, "apply"):
        results = node(*grads)
        return list(results) if isinstance(results, tuple) else [results]
    if materializes_grads(node):
        grads = [zeros_of_slot(node, i)() if grad is None else grad for i, grad in enumerate(grads)]
    before = list(_held(vars(node)))
    versions = [None if grad is None else grad._version for grad in grads]
    results = node.apply(*grads)
    after = list(_held(vars(node)))
    if len(after) != len(before) or any(one is not other for one, other in zip(after, before, strict=True)):
        raise Refusal("node-refused", f"the backward of {node.name()} changes its own context")
    if [None if grad is None else grad._version for grad in grads] != versions:
        raise Refusal("backward-effect", f"the backward of {node.name()} changes the gradient it is given")
    return _by_edge(node, results if isinstance(results, (tuple, list)) else (results,))


def _held(value: Any, depth: int = 4) -> Iterator[Any]:
    """What a context holds: the value, and what is in it if it is a container."""
    yield value
    if depth and isinstance(value, Mapping):
        yield from (held for key, item in value.items() for held in (key, *_held(item, depth - 1)))
    elif depth and isinstance(value, (list, tuple, set, deque)):
        yield from (held for item in value for held in _held(item, depth - 1))


def refuse_nan(name: str, grads: Sequence[torch.Tensor | None]) -> None:
    """What anomaly mode checks after each node.

    Raises:
        RuntimeError: a gradient is not a number; in the engine's words.
    """
    for i, grad in enumerate(grads):
        if grad is not None and bool(grad.ne(grad).any()):
            raise RuntimeError(f"Function '{name}' returned nan values in its {i}th output.")


def checkpoint_is_valid() -> bool:
    """Whether the backward that is running may enter reentrant checkpoints: it goes into all leaves."""
    return bool(torch.autograd._is_checkpoint_valid())


def will_run(node: Any) -> list[bool]:
    """For each edge of `node`, whether the backward that is running goes on there. One that returns gradients
    does not say so of leaves: it may."""

    return [below is not None and will_execute(below) for below, _ in node.next_functions]


def will_execute(node: Any) -> bool:
    """Whether the backward that is running comes to `node`; it does not say so of every leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


def backward_number() -> int:
    """The number of the backward that is running, which no other has."""
    return torch._C._current_graph_task_id()


def refuse_reentry(nodes: Iterable[Any]) -> None:
    """Raises: RuntimeError: a node is a reentrant checkpoint, which may not run now; in its own words."""
    for node in nodes:
        if isinstance(node, CheckpointFunction._backward_cls):
            CheckpointFunction.backward(node)


def _by_edge(node: Any, results: Sequence[Any]) -> list[torch.Tensor | None]:
    """A Function's gradients, one per argument of its forward, sorted to its edges, one per tensor."""
    wanted = node.needs_input_grad
    if len(results) < len(wanted) or any(result is not None for result in results[len(wanted) :]):
        raise Refusal(
            "node-refused",
            f"function {node.name()} returned an incorrect number of gradients (expected {len(wanted)}, "
            f"got {len(results)})",
        )
    values = iter([result for result, want in zip(results, wanted, strict=False) if want])
    grads = [None if below is None else next(values) for below, _ in node.next_functions]
    for grad in grads:
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise Refusal(
                "node-refused", f"function {node.name()} returned {type(grad).__name__}, not a tensor"
            )
    return grads


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def materializes_grads(ctx: Any) -> bool:
    """Whether undefined gradients reach the backward of `ctx` as zeros. torch lets the flag be set, but not
    be read: it is read in the context's own memory, at the byte that changes when one of ours is switched."""
    return ctypes.string_at(id(ctx) + flag_offset(), 1) != b"\0"


@functools.cache
def flag_offset() -> int:
    """Where in a context the flag is."""
    with torch.enable_grad(), torch.inference_mode(False):
        ctx: Any = _Sample.apply(torch.zeros((), device="cpu", requires_grad=True)).grad_fn
    images = []
    for flag in (True, False, True, False):
        ctx.materialize_grads = flag
        images.append(ctypes.string_at(id(ctx), torch._C._FunctionBase.__basicsize__))
    on, off, *redone = images
    changed = [i for i, (one, other) in enumerate(zip(on, off, strict=True)) if one != other]
    if len(changed) != 1 or redone != [on, off] or (on[changed[0]], off[changed[0]]) != (1, 0):
        raise LookupError(f"torch {torch.__version__} keeps materialize_grads in a way that is not known")
    return changed[0]


def entry_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` calls when no transform is active: torch's C++, bound to the class."""
    entry: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return entry
