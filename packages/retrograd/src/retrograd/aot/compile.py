"""Fourth stage: a `Partition` becomes a callable with real autograd.

In: forward and backward graphs, and a backend for each. Out: a `Compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrograd.aot.compiled import Compiled
from retrograd.aot.run.call import CompiledFunction
from retrograd.aot.run.lower_half import is_ready, lower, recorded
from retrograd.aot.run.region import RegionCode
from retrograd.backends.base import Boxed, Half
from retrograd.backends.registry import find_backend
from retrograd.config import Config
from retrograd.graph.partition import Partition, SavedKind
from retrograd.report import Report, process_report


def compile(
    partition: Partition,
    forward: str | Callable[..., Any] = "inductor",
    backward: str | Callable[..., Any] | None = None,
    *,
    lazy: bool = True,
    cudagraphs: bool = False,
    regions: bool | int = True,
) -> Compiled:
    """Compile both halves.

    Args:
        partition: from ``partition``. One may be compiled several times, with different backends.
        forward, backward: a backend's name, or a callable ``(gm, example_inputs) -> callable``; the
            backward's is the forward's if not given.
        lazy: compile each region's backward when it first runs, for the layout of what was saved; else at
            once.
        cudagraphs: record what the code does on a CUDA device, and replay it where that is safe; what the
            forward saves stays in the recording's memory. Where it is not, ``retrograd.explain()`` says why.
        regions: compile structure that repeats itself, such as the layers of a deep model, once, where that
            is worth it; a number: from so many autograd nodes on it is. User-written backends get whole
            graphs.

    Returns:
        A callable that takes what the captured function takes, and returns what it returns.

    Raises:
        OptionError: an option has a value that it cannot have.
        Exception: whatever a backend raises.
    """
    config = Config(backend=forward, backward=backward, cudagraphs=cudagraphs, regions=regions)
    return Compiled(compile_with(partition, config, process_report, lazy))


def compile_with(partition: Partition, config: Config, report: Report, lazy: bool = True) -> CompiledFunction:
    """The same for choices that are checked already; `report` is told what runs eagerly later."""
    ahead = find_backend(config.backend)
    behind = ahead if config.backward is None else find_backend(config.backward)
    half = _forward_half(partition, lazy)
    code = lower(ahead, partition.forward, partition.joint.state, half, config)
    if config.cudagraphs and is_ready(code):
        code = _recorded(code, partition)
    regions = [
        RegionCode(partition, number, behind, config, report) for number in range(len(partition.backwards))
    ]
    if not lazy:
        for region in regions:
            region.compile_ahead()
    return CompiledFunction(partition, code, regions)


def _recorded(code: Boxed, partition: Partition) -> Boxed:
    """The forward's code, recorded; what it gives besides the function's own values may stay where it is."""
    results: Any = partition.forward.graph.output_node().args[0]
    kept = range(partition.joint.signature.forward_count, len(results))
    return recorded(code, partition.forward.graph, kept=kept)


def _forward_half(partition: Partition, lazy: bool) -> Half:
    """What is saved may have any strides, unless the backward is compiled before they are known."""
    saved = sum(saved.kind is SavedKind.INTERMEDIATE for saved in partition.saved)
    visible = partition.joint.signature.forward_count + (0 if lazy else saved)
    return Half(is_inference=not partition.backwards, visible=visible)
