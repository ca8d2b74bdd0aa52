"""Calls autograd nodes and Functions by hand, and checks the versions of saved tensors.

In: nodes of an autograd graph (``grad_fn``), and gradients. Out: one gradient for each edge of a node, as
``Engine::evaluate_function`` and ``validate_outputs`` (``torch/csrc/autograd/engine.cpp``) would pass it on.

In: saved tensors, and the state they had when the backward was collected. Out: eager's error if one has been
modified or detached in place since. Eager checks a saved tensor when its node reads it; a plan must check
again after user code has run. The error text follows ``SavedVariable::unpack`` in
``torch/csrc/autograd/saved_variable.cpp``.
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

#: States of tensors at one moment, by the FX nodes that represent the tensors.
States = Mapping[fx.Node, int]


@without_torch_functions
def raise_modified(pairs: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Raise eager's error for the first tensor that is not in its expected state."""
    for tensor, state in pairs:
        if tensor._version != state >> 1:
            raise RuntimeError(modified_error(tensor, state >> 1))
        if tensor.is_leaf and not state & 1:
            saved, request = _saved_and_request()
            saved.detach_()
            run_stock(request)
            raise AssertionError("torch accepted a saved tensor that was detached in place")


def modified_error(tensor: torch.Tensor, expected: int) -> str:
    """Eager's error text for a saved tensor that is not at the `expected` version."""
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
    """A pattern and a replacement that shorten a node's name as torch's error does, which 2.13 changed."""
    saved, request = _saved_and_request()
    torch.autograd.graph.increment_version(saved)
    try:
        run_stock(request)
    except RuntimeError as error:
        return (r"$^", "") if "CloneBackward0" in str(error) else (r"Backward\d*$", "")
    raise AssertionError("torch accepted a saved tensor that was changed in place")


def _saved_and_request() -> tuple[torch.Tensor, EngineRequest]:
    """A tensor that a node has saved, and a backward through that node."""
    with torch.enable_grad(), torch.inference_mode(False):
        saved = torch.zeros((), device="cpu", requires_grad=True).clone()
        root = saved * saved
        return saved, EngineRequest((root,), (torch.zeros(()),), False, False, accumulate_grad=True)


def states_of(values: Sequence[Any]) -> list[int | None]:
    """What eager checks of each value if it was saved: twice its version, plus one for a leaf. ``detach_``
    makes a tensor a leaf."""
    with torch_functions_off():
        versions = versions_of(values)
        return [
            None if version is None else 2 * version + value.is_leaf
            for value, version in zip(values, versions, strict=True)
        ]


def versions_of(values: Sequence[Any]) -> list[int | None]:
    """The version of each value; None for values without a version."""
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
    """A backward that runs exactly `nodes`. The engine runs whole paths, so `nodes` must contain every node
    on a path between two of them.

    Args:
        live: the graph of `request`.
        request: the backward whose roots are used if `from_roots`.
        nodes: indices in `live`.
        from_roots: whether `nodes` contains all nodes above them too, so that the roots of `request` serve.
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
    """A cotangent with the metadata of the node's first gradient; it takes no memory."""
    metadata = node._input_metadata[0]
    return torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(metadata.shape)


def fitted(node: Any, slot: int, grad: torch.Tensor) -> torch.Tensor:
    """`grad`, summed to the shape of the node's input and cast to its dtype, as the engine does."""
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
    """Run the node. Returns one gradient per edge, before `fitted`.

    Raises:
        Refusal: a Python Function returned the wrong number of gradients or a non-tensor, or it changed its
            context or the gradients that it received.
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
    """All objects that a context holds: the value itself, and the contents of containers."""
    yield value
    if depth and isinstance(value, Mapping):
        yield from (held for key, item in value.items() for held in (key, *_held(item, depth - 1)))
    elif depth and isinstance(value, (list, tuple, set, deque)):
        yield from (held for item in value for held in _held(item, depth - 1))


def refuse_nan(name: str, grads: Sequence[torch.Tensor | None]) -> None:
    """Check for NaN gradients, as anomaly mode does after each node.

    Raises:
        RuntimeError: a gradient contains NaN; the text is the engine's.
    """
    for i, grad in enumerate(grads):
        if grad is not None and bool(grad.ne(grad).any()):
            raise RuntimeError(f"Function '{name}' returned nan values in its {i}th output.")


def checkpoint_is_valid() -> bool:
    """Whether the current backward may enter reentrant checkpoints; only one into all leaves may."""
    return bool(torch.autograd._is_checkpoint_valid())


def will_run(node: Any) -> list[bool]:
    """For each edge of `node`, whether the current backward continues along it. If the backward returns
    gradients, the engine does not answer for leaves; we then return True."""

    return [below is not None and will_execute(below) for below, _ in node.next_functions]


def will_execute(node: Any) -> bool:
    """Whether the current backward reaches `node`; True if the engine does not answer, as for some leaves."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


def backward_number() -> int:
    """The unique number of the current backward."""
    return torch._C._current_graph_task_id()


def refuse_reentry(nodes: Iterable[Any]) -> None:
    """Raises: RuntimeError: a node is a reentrant checkpoint, which may not run now; torch's own error."""
    for node in nodes:
        if isinstance(node, CheckpointFunction._backward_cls):
            CheckpointFunction.backward(node)


def _by_edge(node: Any, results: Sequence[Any]) -> list[torch.Tensor | None]:
    """Map a Function's gradients, one per argument of its forward, to its edges, one per tensor argument."""
    wanted = node.needs_input_grad
    if len(results) < len(wanted) or any(result is not None for result in results[len(wanted) :]):
        raise Refusal(
            "node-refused",
            f"function {node.name()} returned an incorrect number of gradients (expected {len(wanted)}, "
            f"got {len(results)})",
        )
    for result in results:
        if result is not None and not isinstance(result, torch.Tensor):
            raise Refusal(
                "node-refused", f"function {node.name()} returned {type(result).__name__}, not a tensor"
            )
    undefined = sum(result is None for result, want in zip(results, wanted, strict=False) if not want)
    if undefined < len(wanted) - len(node.next_functions):
        text = f"function {node.name()} returned a gradient for an argument that is not a tensor"
        raise Refusal("node-refused", text)
    values = iter([result for result, want in zip(results, wanted, strict=False) if want])
    return [None if below is None else next(values) for below, _ in node.next_functions]


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def materializes_grads(ctx: Any) -> bool:
    """Whether undefined gradients reach the backward of `ctx` as zeros. torch has a setter for this flag but
    no getter, so we read the flag's byte in the context's memory."""
    return ctypes.string_at(id(ctx) + flag_offset(), 1) != b"\0"


@functools.cache
def flag_offset() -> int:
    """The flag's byte offset in a context: the one byte that changes when we toggle a sample's flag."""
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
    """The C++ function, bound to the class, that ``function.apply`` calls when no transform is active."""
    entry: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return entry
