"""Writes to torch's profiler and its structured trace (``TORCH_TRACE``, read by tlparse).

In: names and texts. Out: ranges and records if a consumer is active; otherwise nothing, at the cost of one
check. A captured backward gets a compile id like those of stock compiled autograd (``!3``), from the same
counter. What Inductor records while it compiles a segment is filed under that id. Eager's profiler ranges
also carry the sequence number that links a node to its forward operation; torch has no Python API to set it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._dynamo import compiled_autograd as stock
from torch._dynamo.utils import get_chromium_event_logger
from torch._guards import _TLS, CompileContext, compile_context
from torch._guards import CompileId as CompileId
from torch._logging._internal import trace_structured

from retrograd.process import restore_after_errors


def profiling() -> bool:
    """Whether a profiler is active."""
    return torch._C._autograd._profiler_enabled()


def text_range(text: str) -> torch.autograd.profiler.record_function:
    """A profiler range named `text`."""
    return torch.autograd.profiler.record_function(text)


@contextmanager
def node_range(name: str) -> Iterator[None]:
    """The two ranges that eager's engine puts around a node."""
    with text_range(f"autograd::engine::evaluate_function: {name}"), text_range(name):
        yield


_trace_log = logging.getLogger("torch.__trace")


def new_compile_id() -> CompileId:
    """A new id for one captured backward."""
    number = next(stock.COMPILE_COUNTER)
    return CompileId(frame_id=None, frame_compile_id=None, compiled_autograd_id=number)


def artifact(name: str, text: Callable[[], str], compile_id: CompileId | None = None) -> None:
    """Record a text under `name`. We call `text` only if the trace is on."""
    if _trace_log.handlers:
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "string"},
            payload_fn=text,
            expect_trace_id=False,
            compile_id=compile_id,
        )


def _contexts() -> tuple[Any, Any]:
    return getattr(_TLS, "compile_context", None), getattr(_TLS, "tracing_context", None)


def _put_contexts_back(before: tuple[Any, Any]) -> None:
    _TLS.compile_context, _TLS.tracing_context = before


restore_after_errors(_contexts, _put_contexts_back)


def compiling(compile_id: CompileId) -> AbstractContextManager[Any]:
    """Inside, torch files its trace records under `compile_id`."""
    return compile_context(CompileContext(compile_id))


def event(name: str, compile_id: CompileId | None = None) -> AbstractContextManager[None]:
    """A span in the trace's timeline if the trace is on, otherwise in the profiler if that is active."""
    if _trace_log.handlers:
        return _event(name, compile_id)
    return text_range(name) if profiling() else _NO_EVENT


_NO_EVENT = nullcontext()


@contextmanager
def _event(name: str, compile_id: CompileId | None) -> Iterator[None]:
    log = get_chromium_event_logger()
    start = time.time_ns()
    log.log_event_start(name, start, {}, False, compile_id)
    try:
        yield
    finally:
        log.log_event_end(name, time.time_ns(), {}, start, False, compile_id)
