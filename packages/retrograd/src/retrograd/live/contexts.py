"""Which session runs a backward: that of the innermost context of this thread, else the process-wide one,
else that of the callable of ``retrograd.compile`` from which it comes.

In: contexts that are entered and left, and the process-wide setting. Out: `run_backward`, which answers
torch's gateway. Contexts are kept in a ``ContextVar``: each thread and each asyncio task has its own, and a
task made inside a context inherits it for as long as the context is open.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, ClassVar

import torch

from retrograd._torch.autograd import (
    GATEWAYS,
    EngineRequest,
    answer_queries,
    clear_engine_cache,
    installed_compiler,
    is_traced,
    is_transformed,
    plans_under_way,
    run_stock,
    stock_compiler_off,
    watch_hooks,
    window,
)
from retrograd._torch.patches import handle
from retrograd._torch.state import compile_stance
from retrograd.errors import ContextError
from retrograd.live.backward_ownership import claimant, has_claims
from retrograd.live.session import MOST_NESTED, TOO_DEEP, Session
from retrograd.process import ForkSafeLock

Grads = tuple[torch.Tensor | None, ...]


class _EnteredContext:
    """One time that a session was switched on; `stock` is the stock compiler that was on already."""

    __slots__ = ("is_open", "owner", "session", "stock")

    def __init__(self, owner: object, session: Session) -> None:
        self.owner, self.session = owner, session
        self.stock = installed_compiler()
        self.is_open = True


#: what this thread or task has entered, innermost last. An entry that was closed elsewhere may still be here.
_entered: ContextVar[tuple[_EnteredContext, ...]] = ContextVar("retrograd_entered", default=())


def enter(owner: object, session: Session) -> None:
    """From here on, on this thread, backwards belong to `session`."""
    open_gateway()
    _entered.set((*_open_entries(), _EnteredContext(owner, session)))
    _count_open(1)


def leave(owner: object) -> None:
    """End what `owner` entered last; what others entered since stays.

    Raises:
        ContextError: `owner` is not entered on this thread.
    """
    entries = _open_entries()
    last = next((entry for entry in reversed(entries) if entry.owner is owner), None)
    if last is None:
        raise ContextError
    last.is_open = False
    _entered.set(tuple(entry for entry in entries if entry is not last))
    _count_open(-1)
    if installed_compiler() is not None:
        _engine_cache.leave_to_stock()


def _open_entries() -> tuple[_EnteredContext, ...]:
    return tuple(entry for entry in _entered.get() if entry.is_open)


class ProcessWide:
    """The setting that holds where no context is open, on all threads."""

    _entry: ClassVar[_EnteredContext | None] = None

    @classmethod
    def switch(cls, session: Session | None) -> None:
        """Set or replace the process-wide session; None switches off."""
        if session is not None:
            open_gateway()
        cls._entry = None if session is None else _EnteredContext(cls, session)

    @classmethod
    def entry(cls) -> _EnteredContext | None:
        """What is set now."""
        return cls._entry


def run_backward(
    stock_run: Any, tensors: Any, grad_tensors: Any, keep_graph: bool, create_graph: bool, inputs: Any = (),
    *flags: bool, **named: bool,
) -> Grads:  # fmt: skip
    """Answers ``torch.autograd.graph._engine_run_backward``."""
    wanted = tuple(inputs or ())
    request = EngineRequest(
        tuple(tensors), tuple(grad_tensors), keep_graph, create_graph, wanted, *flags, **named
    )
    entry = next((entry for entry in reversed(_entered.get()) if entry.is_open), None) or ProcessWide.entry()
    stock = installed_compiler()
    if stock is None and entry is not None and plans_under_way() > MOST_NESTED:
        # As few frames of ours as can be: here eager has room for 60 levels.
        entry.session.refuse(TOO_DEEP)
        with window.stock():
            grads = run_stock(request)
        entry.session.note(TOO_DEEP)
        return grads
    if stock is None:
        return _run(entry or _claimed(request), request)
    if entry is None or stock is not entry.stock:  # it was switched on inside our context, or there is none
        _engine_cache.leave_to_stock()
        return _run(None, request)
    with stock_compiler_off():
        return _run(entry, request)


def _claimed(request: EngineRequest) -> _EnteredContext | None:
    session = claimant(request)
    return None if session is None else _EnteredContext(session, session)


def _run(entry: _EnteredContext | None, request: EngineRequest) -> Grads:
    if entry is None or compile_stance() == "force_eager" or is_traced() or is_transformed(request):
        if entry is not None and is_transformed(request):
            entry.session.leave_to_transform()
        with window.stock():
            return run_stock(request)
    _engine_cache.is_ours = True
    return entry.session.run(request)


class _EngineCache:
    """The engine's cache does not know who filled it: stock must not find structures of ours."""

    is_ours = False

    def leave_to_stock(self) -> None:
        if self.is_ours:
            clear_engine_cache()
            self.is_ours = False


_engine_cache = _EngineCache()


@functools.cache
def open_gateway() -> None:
    """From here on every backward of this process passes `run_backward`."""
    for gateway in GATEWAYS:
        handle(gateway, run_backward)
    answer_queries()
    watch_hooks()


_open = 0
_open_lock = ForkSafeLock()


def _count_open(by: int) -> None:
    global _open
    with _open_lock:
        _open += by


def is_anything_open() -> bool:
    """Whether a context is open on any thread, or backwards may belong to a compiled callable."""
    return _open > 0 or ProcessWide.entry() is not None or has_claims()
