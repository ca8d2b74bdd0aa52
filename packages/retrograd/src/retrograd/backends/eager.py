"""The backends that compile nothing: ``eager`` interprets what was captured, ``aten`` what was traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from retrograd._torch.fx import boxed
from retrograd.backends.base import SEGMENT, Boxed, Half


class EagerBackend:
    """Runs the captured node calls themselves: gradients equal eager's bit for bit."""

    name = "eager"
    traces = False
    takes_parts = False
    for_speed = False

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return {}

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: Half = SEGMENT) -> Boxed:
        return boxed(gm)


class AtenBackend(EagerBackend):
    """Interprets the functionalised ATen graph: between ``eager`` and ``inductor``, to tell which stage
    makes a difference."""

    name = "aten"
    traces = True
    takes_parts = True
