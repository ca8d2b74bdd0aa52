"""The ``inductor`` backend: torch's code generator, called directly on the segment's ATen graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from retrograd._torch.inductor import compile_graph, decompositions, patched
from retrograd.backends.base import SEGMENT, Boxed, Half


class InductorBackend:
    """Compiles through ``compile_fx_inner`` with Inductor's own decompositions; no Dynamo, no AOTAutograd.

    Args:
        settings: of ``torch._inductor.config``, while it compiles.
    """

    name = "inductor"
    traces = True
    takes_parts = True
    for_speed = True

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._settings = dict(settings or {})

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        with patched(self._settings):
            return decompositions()

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: Half = SEGMENT) -> Boxed:
        with patched(self._settings):
            return compile_graph(
                gm,
                example_inputs,
                visible=half.visible,
                is_backward=half.is_backward,
                is_inference=half.is_inference,
            )
