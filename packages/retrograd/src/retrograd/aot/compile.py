"""Fourth stage: a `Partition` becomes a callable with real autograd.

In: forward and backward graphs, and a backend for each. Out: a `Compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrograd.aot.compiled import Compiled
from retrograd.aot.lower import lower
from retrograd.aot.run_backward import RegionCode
from retrograd.aot.run_forward import CompiledFunction
from retrograd.backends.base import Half
from retrograd.backends.registry import find_backend
from retrograd.graph.partition import Partition, SavedKind

__all__ = ["compile"]


def compile(
    partition: Partition,
    forward: str | Callable[..., Any] = "inductor",
    backward: str | Callable[..., Any] | None = None,
    *,
    lazy: bool = True,
    regions: bool | int = True,
) -> Compiled:
    """Compile both halves.

    Args:
        partition: from ``partition``. One may be compiled several times, with different backends.
        forward, backward: a backend's name, or a callable ``(gm, example_inputs) -> callable``; the
            backward's is the forward's if not given.
        lazy: compile each region's backward when it first runs, for the layout of what was saved; else at
            once.
        regions: compile structure that repeats itself, such as the layers of a deep model, once, where that
            is worth it; a number: from so many autograd nodes on it is. User-written backends get whole
            graphs.

    Returns:
        A callable that takes what the captured function takes, and returns what it returns.

    Raises:
        UnknownBackendError: no such backend.
        ValueError: `regions` is neither True nor False nor a number of nodes.
        Exception: whatever a backend raises.
    """
    ahead = find_backend(forward)
    behind = ahead if backward is None else find_backend(backward)
    half = _forward_half(partition, lazy)
    code = lower(ahead, partition.forward, partition.joint.state, half, regions=regions)
    backwards = [
        RegionCode(partition, number, behind, regions) for number, _ in enumerate(partition.backwards)
    ]
    if not lazy:
        for backward in backwards:
            backward.compile_ahead()
    return Compiled(CompiledFunction(partition, code, backwards))


def _forward_half(partition: Partition, lazy: bool) -> Half:
    """What is saved may have any strides, unless the backward is compiled before they are known."""
    saved = sum(saved.kind is SavedKind.INTERMEDIATE for saved in partition.saved)
    visible = partition.joint.signature.forward_count + (0 if lazy else saved)
    return Half(is_inference=not partition.backwards, visible=visible)
