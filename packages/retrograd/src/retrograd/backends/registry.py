"""The backends, and how one is found by name or made of a callable.

In: what the user gave as ``backend=``. Out: a `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from retrograd._torch.fx import boxed, copied, fill_in_place, lazy_graph_module
from retrograd._torch.inductor import compile_graph, decompositions, patched
from retrograd.backends.base import SEGMENT, Backend, Boxed, Half
from retrograd.errors import BackendError, OptionError


class AtenBackend(Backend):
    """Interprets the functionalised ATen graph: between ``eager`` and ``inductor``, to tell which stage
    makes a difference."""

    name = "aten"

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: Half = SEGMENT) -> Boxed:
        graph = copied(gm.graph)
        fill_in_place(graph)
        return boxed(lazy_graph_module(gm, graph))


class EagerBackend(AtenBackend):
    """Runs the captured node calls themselves: gradients equal eager's bit for bit."""

    name = "eager"
    traces = False
    takes_parts = False
    for_speed = False


class InductorBackend(Backend):
    """Compiles through ``compile_fx_inner`` with Inductor's own decompositions; no Dynamo, no AOTAutograd.

    Args:
        settings: of ``torch._inductor.config``, while it compiles.
    """

    name = "inductor"
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


class CustomBackend(Backend):
    """Wraps a user's compile function, as ``torch.compile`` takes them.

    Args:
        fn: takes a graph module and fake example inputs; returns a callable that takes the inputs one by
            one, or, if it carries ``_boxed_call = True``, as one list.
    """

    takes_parts = False

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._fn = fn

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


#: the registered backends by name.
BACKENDS: dict[str, Callable[[], Backend]] = {
    backend.name: backend for backend in (AtenBackend, EagerBackend, InductorBackend)
}


def find_backend(backend: str | Backend | Callable[..., Any], option: str = "backend") -> Backend:
    """The backend named, given or wrapped; `option` is the name under which it was given."""
    if isinstance(backend, str) and backend in BACKENDS:
        return BACKENDS[backend]()
    if isinstance(backend, Backend):
        return backend
    if isinstance(backend, str) or not callable(backend):
        expected = f"one of {', '.join(sorted(BACKENDS))}, or a callable (gm, example_inputs) -> callable"
        raise OptionError(option, f"got {backend!r}", expected)
    return CustomBackend(backend)
