"""Give one half of a partition to a backend.

In: a functional ATen graph whose placeholders have example values. Out: a boxed callable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from retrograd._torch.joint_tracing import decomposed
from retrograd.backends.base import Backend, Boxed, Half
from retrograd.events import counters
from retrograd.graph.capture_state import CaptureState

__all__ = ["lower"]


def lower(
    backend: Backend,
    gm: fx.GraphModule,
    state: CaptureState,
    half: Half,
    example_inputs: Sequence[Any] | None = None,
) -> Boxed:
    """Compile `gm`, after the decompositions that the backend asks for unless `capture` applied them."""
    inputs = example_inputs or [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    table = backend.decompositions()
    if table and not state.decompositions:
        gm = decomposed(gm, inputs, state.fake_mode, table)
    counters["aot_compiles"] += 1
    return backend.compile(gm, inputs, half)
