"""Autograd nodes and Functions, called by hand.

In: nodes of an autograd graph (``grad_fn``) and gradients. Out: the gradients they give for each of their
edges, as ``Engine::evaluate_function`` and ``validate_outputs`` (``torch/csrc/autograd/engine.cpp``) would
hand them on.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from retrograd._torch.tensor import zeros_of_slot
from retrograd.errors import Refusal


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor into whose ``.grad`` the node accumulates; None for other nodes."""
    return getattr(node, "variable", None)


def input_count(node: Any) -> int:
    """How many gradients the node takes."""
    return len(node._input_metadata)


def tells_undefined(node: Any) -> bool:
    """Whether the node is a Function that wants None, not zeros, for undefined gradients."""
    return hasattr(node, "apply") and not materializes_grads(node)


def fitted(node: Any, slot: int, grad: torch.Tensor) -> torch.Tensor:
    """`grad` as the engine makes it fit the node's input: summed to its shape, cast to its dtype.

    Raises:
        Refusal: it cannot be made to fit.
    """
    metadata = node._input_metadata[slot]
    shape = tuple(metadata.shape)
    if tuple(grad.shape) != shape:
        if not _is_expanded(shape, tuple(grad.shape)):
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
        Exception: what the node raises.
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


def _is_expanded(shape: tuple[Any, ...], larger: tuple[Any, ...]) -> bool:
    """Whether a tensor of `shape` broadcasts to `larger`, as ``at::is_expandable_to`` says."""
    if len(shape) > len(larger):
        return False
    pairs = zip(reversed(shape), reversed(larger), strict=False)
    return all(small == large or small == 1 for small, large in pairs)


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
    """Where in a context the flag is.

    Raises:
        LookupError: switching the flag does not change exactly one byte.
    """
    with torch.enable_grad(), torch.inference_mode(False):
        ctx: Any = _Sample.apply(torch.zeros((), device="cpu", requires_grad=True)).grad_fn
    images = []
    for flag in (True, False, True, False):
        ctx.materialize_grads = flag
        images.append(ctypes.string_at(id(ctx), torch._C._FunctionBase.__basicsize__))
    on, off, *again = images
    changed = [i for i, (one, other) in enumerate(zip(on, off, strict=True)) if one != other]
    if len(changed) != 1 or again != [on, off] or (on[changed[0]], off[changed[0]]) != (1, 0):
        raise LookupError(f"torch {torch.__version__} keeps materialize_grads in a way that is not known")
    return changed[0]


def entry_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` calls when no transform is active: torch's C++, bound to the class."""
    entry: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return entry
