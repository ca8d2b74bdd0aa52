"""Lowers one graph of a partition.

In: a functional ATen graph whose placeholders have example values. Out: a boxed callable. It may start as
separately compiled parts if they compile faster. It is a `LateCode` if compiling takes longer than the user
wants to wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd.backends.background import PendingCode, begin, is_taken
from retrograd.backends.base import Answer, Backend, Boxed, GraphKind
from retrograd.backends.fallible import compile_fallible
from retrograd.backends.processes import is_done
from retrograd.backends.tier_up import TierUp
from retrograd.config import Config
from retrograd.cudagraphs.graphed_function import unrecordable_calls
from retrograd.errors import Reason, Refusal
from retrograd.events import counters
from retrograd.graph.fx import lazy_graph
from retrograd.graph.joint_graph import CaptureState
from retrograd.graph.lazy import LazyGraph
from retrograd.policy import ATEN_CALLS_PER_NODE
from retrograd.repeats.compile import Division, divide
from retrograd.runtime.modes import without_autocast
from retrograd.trace import decomposed, guard_count


@without_autocast
def lower(
    backend: Backend,
    graph: LazyGraph,
    state: CaptureState,
    half: GraphKind,
    config: Config,
) -> Boxed:
    """Compile `graph`.

    We first apply the backend's decompositions, unless `capture` did. Repeated structure is compiled once, if
    `config` allows it and the backend takes parts of graphs.
    """
    table = backend.decompositions()
    if table and not state.decompositions:
        inputs = graph.summary.inputs
        graph = lazy_graph(decomposed(graph.gm, inputs, state.fake_mode, table), inputs)
    counters["aot_compiles"] += 1

    def compile_graph() -> Boxed:
        known, numbers = graph.known_as if graph.division else None, itertools.count()
        found: Division = graph.division or _divided(backend, graph, half, config)
        graph.division = None  # it holds the graphs of the parts
        how = backend.for_parts_of(graph, half) if found.steps else backend

        def compile_part(part: fx.GraphModule, examples: Sequence[Any], visible: int | None) -> Boxed:
            number = next(numbers)
            own = replace(half, visible=visible, known_as=known and f"{known} {number}")
            if number < len(graph.begun):
                is_done(graph.begun[number], once_begun=True)
            return compile_fallible(how, part, examples, own, strict=config.strict)

        code = found.code(compile_part)
        may_change = not found.is_symbolic and not graph.summary.has_effects_besides_random
        return _tiering_up(code, backend, graph, half, config) if found.steps and may_change else code

    if config.patience is None:
        return compile_graph()
    pending = begin(compile_graph, config.patience)
    return pending.result() if is_taken(pending) else LateCode(pending, lambda: guard_count(state.fake_mode))


def begin_in_processes(
    backend: Backend, graph: LazyGraph, state: CaptureState, half: GraphKind, config: Config
) -> None:
    """Have other processes start on the graphs that `lower` will compile. Does nothing if decompositions
    must be applied first, or if CUDA graphs will cut the graph."""
    if backend.decompositions() and not state.decompositions:
        return
    if config.cudagraphs and unrecordable_calls(graph.gm.graph):
        return
    graph.division = division = _divided(backend, graph, half, config)
    how = backend.for_parts_of(graph, half) if division.steps else backend
    graph.begun = [
        how.begin(part, examples, replace(half, visible=visible))
        for part, examples, visible in division.graphs.values()
    ]


def _tiering_up(parts: Boxed, backend: Backend, graph: LazyGraph, half: GraphKind, config: Config) -> Boxed:
    """Code that runs `parts`, and later the whole of `graph` once another process has compiled it under the
    current settings. Returns `parts` itself if `config` or the backend rules that out: recorded code must not
    change, and a user may choose not to wait."""
    if config.whole_after is None or config.cudagraphs or config.patience is not None:
        return parts
    settings = backend.process_settings()
    if settings is None:
        return parts
    inputs, answers = graph.summary.inputs, list[Answer | None]()

    def check_settings() -> None:
        now = backend.process_settings() or {}
        if other := [key for key in settings if settings[key] != now.get(key)]:
            raise Refusal("elsewhere", f"settings have changed since: {', '.join(other)}")

    def begin() -> None:
        check_settings()
        backend.prepare(in_process=True)
        answers.append(backend.begin(graph.gm, inputs, half))

    @without_autocast
    def finish() -> Boxed:
        check_settings()
        if not is_done(*answers):
            raise Refusal("elsewhere", "no other process has compiled the whole")
        return compile_fallible(backend, graph.gm, inputs, half, strict=config.strict, is_proven=True)

    return TierUp(parts, config.whole_after, begin, finish)


def _divided(backend: Backend, graph: LazyGraph, half: GraphKind, config: Config) -> Division:
    least = config.smallest_repeat * ATEN_CALLS_PER_NODE if backend.takes_parts else 0
    return divide(graph.gm, graph.summary.inputs, least, half.visible, config.fewest_copies)


class LateCode:
    """Code that another thread is compiling.

    Args:
        pending: becomes the code.
        guards: counts the guards on the graph's sizes. If compiling adds guards, it is too late to install
            them, and we do not use the code.
    """

    def __init__(self, pending: PendingCode, guards: Callable[[], int]) -> None:
        self._pending, self._guards, self._guards_then = pending, guards, guards()

    @property
    def is_ready(self) -> bool:
        """Whether it may be called. The call may raise the error of the compilation."""
        return self._pending.done() and self._guards() == self._guards_then

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the code."""
        return self._pending.result()(args)


def is_ready(code: Boxed) -> bool:
    """Whether the code may be called."""
    return code.is_ready if isinstance(code, LateCode) else True


def still_compiling(name: str) -> Reason:
    """The reason why `name` runs in eager mode while it is being compiled."""
    return Reason(
        "compile-timeout",
        f"{name} takes longer to compile than compile_timeout allows; it is compiled in the background",
        "aot.compile",
        way_out="nothing to do, or a larger compile_timeout",
    )
