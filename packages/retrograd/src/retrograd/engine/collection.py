"""Collects a backward: makes torch's engine hand the live graph over to our capture object.

In: the arguments of ``torch.autograd.graph._engine_run_backward``, the one Python function through which
``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` enter the engine. Out: the
gradients that the stock engine computes.

In: an `EngineRequest` and a factory of capture objects. Out: `Collected`: all values that the engine lifted
out of the autograd graph, and the artifact that the capture object made from the graph's structure. The
engine stores the artifact in its structural cache, so a later backward of equal structure gets the same one.

Only this module installs our engine compiler, and only while `window` grants this thread a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._dynamo import compiled_autograd as stock
from torch._dynamo.utils import counters as dynamo_counters

from retrograd.engine.stock_entry import stock_run_backward, window
from retrograd.errors import Refusal
from retrograd.process import ThreadValue, forgotten_by_reset, restore_after_errors

if TYPE_CHECKING:
    from retrograd.engine.request import EngineRequest

#: Where torch holds the engine's Python entry point.
GATEWAYS = ("torch.autograd.graph:_engine_run_backward", "torch.autograd:_engine_run_backward")


def run_stock(request: EngineRequest) -> tuple[torch.Tensor | None, ...]:
    """Run the backward on the stock engine, as torch would."""
    with window.stock():
        return call_engine(request)


def call_engine(request: EngineRequest, allow_unreachable: bool = False) -> tuple[torch.Tensor | None, ...]:
    """Call the engine with whatever compiler it has. `allow_unreachable` also permits unreachable inputs."""
    return stock_run_backward(
        request.tensors,
        request.grad_tensors,
        request.keep_graph,
        request.create_graph,
        request.inputs,
        allow_unreachable=request.allow_unreachable or allow_unreachable,
        accumulate_grad=request.accumulate_grad,
    )


@dataclass
class Collected:
    """One backward as the engine handed it over. The lists belong to us: a reader may empty them.

    Attributes:
        artifact: what the capture object returned for this structure: a callable that runs a `Collected`
            (called if stock compiled autograd meets the structure), with ``n_outputs`` and
            ``needs_engine_frame``.
        inputs: tensors lifted from the graph.
        sizes: sizes that are no longer static.
        scalars: lifted numbers.
        hooks: hook objects and Function contexts.
        packed: packed saved tensors.
    """

    artifact: Any
    inputs: list[torch.Tensor]
    sizes: list[int]
    scalars: list[int | float]
    hooks: list[Any]
    packed: list[Any]


class CacheEntry:
    """The engine's cache value for one structure. The engine never frees it, even when its cache is cleared,
    because it leaks the tuple that ``end_capture`` returns. So we drop the artifact from it ourselves.
    """

    __slots__ = ("artifact",)

    def __init__(self, artifact: Any) -> None:
        self.artifact: Any = artifact
        _kept.append(self)

    def __call__(self, call: Collected) -> Any:
        """Run the artifact. The engine requires a callable here."""
        return self.artifact(call)


#: The entries for all structures in the engine's cache.
_kept: list[CacheEntry] = []


#: receives what the engine hands over on this thread; None outside of `collect`
_receiver: ThreadValue[Callable[[Collected], None] | None] = ThreadValue(None)
_stock_captures = -1

#: The engine never evicts a structure. At this many we clear its cache; structures met later are recaptured.
KEPT_STRUCTURES = 512
_structures = 0


def collect(
    request: EngineRequest, factory: Callable[[], Any], run_in_frame: Callable[[Collected], None]
) -> Collected | None:
    """Let the engine walk the graph of `request` and hand it over. This computes nothing.

    Args:
        request: the backward.
        factory: makes a capture object if the structure is new; the object is closed in any case.
        run_in_frame: runs the backward at once, for artifacts with ``needs_engine_frame``.

    Returns:
        What was collected, or None if the backward ran in the engine's frame.

    Raises:
        Refusal: another thread is in a backward, or this thread is in the engine's frame.
        Exception: whatever the engine or the capture object raised. Nothing was consumed then: the same
            request can still run on the stock engine.
    """
    collected: list[Collected] = []

    def receive(call: Collected) -> None:
        if call.artifact.needs_engine_frame:
            engine_protocol.set_autograd_compiler(None, False)  # `_compiler` restores it at its end
            with window.suspended():
                run_in_frame(call)
        else:
            collected.append(call)

    captures: list[Any] = []
    owner = threading.get_ident()

    def make() -> Any:
        global _structures
        if threading.get_ident() != owner:
            raise Refusal("engine-busy", "a backward of another thread met our capture window")
        _structures += 1
        captures.append(factory())
        return captures[-1]

    with window.capture(), torch.autograd.set_multithreading_enabled(False):
        _forget_foreign_captures()
        if _structures >= KEPT_STRUCTURES:
            clear_engine_cache()
        try:
            with _receiver.switched(receive), _compiler(make):
                call_engine(request, allow_unreachable=True)
        finally:
            for capture in captures:
                capture.close()
    return collected[0] if collected else None


def runtime_wrapper(
    kept: CacheEntry, inputs: Any, sizes: Any, scalars: Any, hooks: Any, packed: Any
) -> list[None]:
    """The engine calls this with its cache value for the structure and this backward's lifted values."""
    artifact = kept.artifact
    call = Collected(artifact, list(inputs), list(sizes), list(scalars), list(hooks), list(packed))
    inputs.clear()
    if (receive := _receiver.get()) is not None:
        receive(call)
        return [None] * artifact.n_outputs
    with _compiler(None):
        return list(artifact(call))


@forgotten_by_reset
def clear_engine_cache() -> None:
    """Clear the engine's cache of structures, ours and those of stock compiled autograd."""
    global _structures
    _structures = 0
    engine_protocol.clear_cache()
    while _kept:
        _kept.pop().artifact = None


def leave_engine_cache_to_stock() -> None:
    """The engine's cache does not record who filled it: stock must not find our structures."""
    if _kept:
        clear_engine_cache()


def _forget_foreign_captures() -> None:
    """Nor may we find stock's structures: clear the cache if stock compiled autograd has captured since."""
    global _stock_captures
    captures = dynamo_counters["compiled_autograd"]["captures"]
    if captures != _stock_captures:
        clear_engine_cache()
        _stock_captures = captures


class _Replaced(threading.local):
    """The engine's compilers that this thread has replaced, oldest first."""

    def __init__(self) -> None:
        self.compilers: list[tuple[Any, bool]] = []


_replaced = _Replaced()


def _put_compilers_back(count: int) -> None:
    """Put replaced compilers back until `count` remain. An error may interrupt the code below anywhere."""
    compilers = _replaced.compilers
    while len(compilers) > count:
        compiler, dynamic = compilers[-1]
        engine_protocol.set_autograd_compiler(compiler, dynamic)
        stock.compiled_autograd_enabled = stock.compiled_autograd_enabled or compiler is not None
        compilers.pop()


restore_after_errors(lambda: len(_replaced.compilers), _put_compilers_back)


class _compiler:
    """Installs `factory` as the engine's compiler, and restores the previous one at the end."""

    def __init__(self, factory: Callable[[], Any] | None) -> None:
        self._factory = factory

    def __enter__(self) -> None:
        self._count = len(_replaced.compilers)
        # In one instruction: no error can come between the exchange and the record of it.
        _replaced.compilers.extend(map(engine_protocol.set_autograd_compiler, (self._factory,), (False,)))

    def __exit__(self, *error: object) -> None:
        _put_compilers_back(self._count)


def installed_compiler() -> Any | None:
    """The compiler that stock compiled autograd has installed; None if it is off. Each time that it is
    switched on, this is a new object. It is never our compiler."""
    if not stock.compiled_autograd_enabled:
        return None
    with window.stock(), _compiler(None):  # `window` lets no other thread capture meanwhile
        return _replaced.compilers[-1][0]


@contextmanager
def stock_compiler_off() -> Iterator[None]:
    """Switch stock compiled autograd off, and restore it at the end."""
    with _compiler(None):
        stock.compiled_autograd_enabled = False
        yield
