"""Give one half of a partition to a backend.

In: a functional ATen graph whose placeholders have example values. Out: a boxed callable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd._torch.trace import decomposed, guard_count
from retrograd.aot.run.late import in_time
from retrograd.backends.base import Backend, Boxed, Half
from retrograd.config import Config
from retrograd.events import counters
from retrograd.graph.capture_state import CaptureState
from retrograd.repeats.compile import CALLS_PER_NODE, compile_in_regions


def lower(
    backend: Backend,
    gm: fx.GraphModule,
    state: CaptureState,
    half: Half,
    config: Config,
    example_inputs: Sequence[Any] | None = None,
) -> Boxed:
    """Compile `gm`, after the decompositions that the backend asks for unless `capture` applied them; what
    repeats itself in it once, where `config` says so and the backend takes parts of graphs. What takes too
    long becomes code later."""
    inputs = example_inputs or [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    table = backend.decompositions()
    if table and not state.decompositions:
        gm = decomposed(gm, inputs, state.fake_mode, table)
    counters["aot_compiles"] += 1
    least = config.smallest_repeat * CALLS_PER_NODE if backend.takes_parts else 0

    def compile_part(part: fx.GraphModule, examples: Sequence[Any], visible: int | None) -> Boxed:
        return backend.compile(part, examples, replace(half, visible=visible))

    def compile_graph() -> Boxed:
        return compile_in_regions(gm, inputs, compile_part, least, half.visible, config.fewest_copies)

    return in_time(compile_graph, config.compile_timeout, lambda: guard_count(state.fake_mode))
