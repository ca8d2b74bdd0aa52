"""A user's callable as a backend: ``(gm, example_inputs) -> callable``, as ``torch.compile`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from retrograd.backends.base import SEGMENT, Boxed, Half
from retrograd.errors import BackendError


class CustomBackend:
    """Wraps a user's compile function.

    Args:
        fn: takes a graph module and fake example inputs; returns a callable that takes the inputs one by
            one, or, if it carries ``_boxed_call = True``, as one list.
    """

    traces = True
    takes_parts = False
    for_speed = False

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._fn = fn

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return {}

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: Half = SEGMENT) -> Boxed:
        compiled = self._fn(gm, list(example_inputs))
        if not callable(compiled):
            raise BackendError(
                f"backend {self.name!r} returned {type(compiled).__name__}, "
                "expected a callable that runs the graph"
            )
        if getattr(compiled, "_boxed_call", False):
            return compiled

        def run(args: list[Any]) -> Sequence[Any]:
            values = tuple(args)
            args.clear()
            result = compiled(*values)
            return result if isinstance(result, (tuple, list)) else (result,)

        return run
