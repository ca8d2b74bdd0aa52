"""The backends, and how to find one by name or make one from a callable.

In: the user's ``backend=`` argument. Out: a `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from retrograd.backends import processes
from retrograd.backends.base import SEGMENT, Answer, Backend, Boxed, GraphKind
from retrograd.backends.inductor import (
    chooses_layouts,
    compile_graph,
    decompositions,
    draw_from_seed,
    draws_own_numbers,
    get_ready,
    has_own_numbers,
    numbers_of_seed,
    patched,
)
from retrograd.engine import versions_of
from retrograd.errors import BackendError, InputsChangedError, OptionError, name_of
from retrograd.graph.fx import boxed, copied, fill_in_place, is_mutating, lazy_graph_module
from retrograd.graph.joint import output_examples
from retrograd.graph.lazy import LazyGraph
from retrograd.graph.redraws import is_seeded


class AtenBackend(Backend):
    """Interprets the functionalised ATen graph. It lies between ``eager`` and ``inductor``, and shows which
    stage makes a difference."""

    name = "aten"
    takes_writes = True

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: GraphKind = SEGMENT) -> Boxed:
        graph = copied(gm.graph)
        fill_in_place(graph)
        for node in filter(is_seeded, graph.nodes):
            node.target = numbers_of_seed
        return boxed(lazy_graph_module(gm, graph))


class EagerBackend(AtenBackend):
    """Runs the captured node calls themselves. Gradients equal eager's bit for bit."""

    name = "eager"
    traces = False
    takes_parts = False
    for_speed = False


#: the setting with which Inductor's code draws eager's random numbers.
_LIKE_EAGER = "torch._inductor.config.fallback_random = True, before it is compiled"


class InductorBackend(Backend):
    """Compiles through ``compile_fx_inner`` with Inductor's decompositions, without Dynamo or AOTAutograd.

    Args:
        settings: of ``torch._inductor.config``, in effect while it compiles.
    """

    name = "inductor"
    for_speed = takes_writes = True

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self.settings = dict(settings or {})

    def prepare(self, *, in_process: bool = False) -> None:
        get_ready()
        if in_process:
            processes.start()

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        with patched(self.settings):
            return decompositions()

    def process_settings(self) -> Mapping[str, Any] | None:
        return processes.usable_settings()

    def begin(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: GraphKind) -> Answer | None:
        return processes.begin(gm, example_inputs, half, self.settings)

    def redraw(self, graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
        with patched(self.settings):
            return draw_from_seed(graph, node) if draws_own_numbers() else super().redraw(graph, node)

    def draws_otherwise(self, targets: Collection[str]) -> str:
        with patched(self.settings):
            return _LIKE_EAGER if has_own_numbers(targets) else ""

    def for_parts_of(self, graph: LazyGraph, half: GraphKind) -> Backend:
        with patched(self.settings):
            chooses = chooses_layouts(graph, half.is_inference)
        return self if chooses else InductorBackend({**self.settings, "layout_optimization": False})

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: GraphKind = SEGMENT) -> Boxed:
        with patched(self.settings):
            return compile_graph(gm, example_inputs, **asdict(half))


class CustomBackend(Backend):
    """Wraps a user's compile function, with the signature that ``torch.compile`` expects.

    Args:
        fn: takes a graph module and fake example inputs; returns a callable. We pass the inputs one by one,
            or as one list if the callable has ``_boxed_call = True``.
    """

    takes_parts = False

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = name_of(fn)
        self._fn = fn

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], half: GraphKind = SEGMENT) -> Boxed:
        # before `fn` may change the graph
        expected = [*map(_described, output_examples(gm.graph))]
        is_functional = not any(map(is_mutating, gm.graph.nodes))
        compiled = self._fn(gm, list(example_inputs))
        if not callable(compiled):
            raise BackendError(
                f"backend {self.name!r} returned {type(compiled).__name__}, "
                "expected a callable that runs the graph"
            )
        is_boxed, is_proven = bool(getattr(compiled, "_boxed_call", False)), False

        def called(args: list[Any]) -> Any:
            if is_boxed:
                return compiled(args)
            values = tuple(args)
            args.clear()
            result = compiled(*values)
            return result if isinstance(result, (tuple, list)) else (result,)

        def run(args: list[Any]) -> Any:
            nonlocal is_proven
            if is_proven:
                return called(args)
            given = list(args)
            versions = versions_of(given)
            try:
                results = called(args)
            finally:
                if is_functional:
                    self._refuse_changes(versions, versions_of(given))
            self._check(results, expected)
            is_proven = True
            return results

        return run

    def _refuse_changes(self, before: Sequence[int | None], after: Sequence[int | None]) -> None:
        """Check the inputs after the first run.

        Raises:
            InputsChangedError: the code has changed one in place.
        """
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            if one != other:
                raise InputsChangedError(
                    f"code of backend {self.name!r} changed input {i} in place, which must stay as it is. "
                    "Eager cannot run instead, because the input is lost"
                )

    def _check(self, results: Sequence[Any], expected: Sequence[Any]) -> None:
        """Check the results of the first run.

        Raises:
            BackendError: the number of results is wrong, or the shape or dtype of one.
        """
        found = [_described(result) for result in results]
        if len(found) != len(expected):
            raise BackendError(
                f"code of backend {self.name!r} returned {len(found)} results, expected {len(expected)}"
            )
        for i, (one, wanted) in enumerate(zip(found, expected, strict=True)):
            if wanted is not None and one != wanted:
                raise BackendError(f"result {i} of backend {self.name!r} is {one}, expected {wanted}")


def _described(value: Any) -> str | None:
    """Dtype and shape of a tensor with known sizes; None for anything else."""
    if not isinstance(value, torch.Tensor) or not all(type(size) is int for size in value.shape):
        return None
    return f"{value.dtype} {list(value.shape)}"


#: the registered backends, by name.
BACKENDS: dict[str, Callable[[], Backend]] = {
    backend.name: backend for backend in (AtenBackend, EagerBackend, InductorBackend)
}


def find_backend(backend: str | Backend | Callable[..., Any], option: str = "backend") -> Backend:
    """The backend for a name, a `Backend` or a callable. `option` is the option's name in errors."""
    if isinstance(backend, str) and backend in BACKENDS:
        return BACKENDS[backend]()
    if isinstance(backend, Backend):
        return backend
    if isinstance(backend, str) or not callable(backend):
        expected = f"one of {', '.join(sorted(BACKENDS))}, or a callable (gm, example_inputs) -> callable"
        here = ", a name for torch.compile alone; leave it out here" if backend == "retrograd" else ""
        raise OptionError(option, f"got {backend!r}{here}", expected)
    return CustomBackend(backend)
