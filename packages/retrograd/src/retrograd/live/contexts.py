"""Finds the session that runs a backward.

A backward belongs to the session of the innermost context of its thread. If there is none, it belongs to the
process-wide session, else to that of the ``retrograd.compile`` callable from which it comes.

In: contexts that are entered and left, the process-wide setting, and the outputs of compiled callables. Out:
`run_backward`, which handles calls at torch's gateway. Contexts live in a ``ContextVar``: each thread and
each asyncio task has its own. A task made inside a context inherits it while the context is open.

We mark the autograd nodes of a compiled callable's outputs; the mark lives as long as the node. A backward
belongs to the callable whose mark comes first below its roots. So ``retrograd.compile`` compiles a backward
that runs long after the call, in any thread, without a setting for the whole process. A backward that meets
no mark runs on the stock engine.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.engine import (
    GATEWAYS,
    EngineRequest,
    answer_queries,
    edge_of,
    installed_compiler,
    is_traced,
    is_transformed,
    leave_engine_cache_to_stock,
    nodes_below,
    note_reentry,
    plans_under_way,
    run_stock,
    stock_compiler_off,
    watch_hooks,
)
from retrograd.errors import ContextError
from retrograd.facts.patches import handle
from retrograd.live.capture.reentry import note
from retrograd.live.session import MOST_NESTED, TOO_DEEP, Grads, Session
from retrograd.process import restore_after_errors, restored_on_error
from retrograd.runtime import pytree
from retrograd.runtime.modes import compile_stance, without_torch_functions


@dataclass(eq=False, slots=True)
class _EnteredContext:
    """One activation of a session. `stock` is the stock compiler that was already active."""

    owner: object
    session: Session
    stock: Any = field(default_factory=installed_compiler)


#: the open contexts of all threads
_open: set[_EnteredContext] = set()

#: What this thread or task has entered, innermost last. It may still hold an entry that another thread or
#: task has closed.
_entered: ContextVar[tuple[_EnteredContext, ...]] = ContextVar("retrograd_entered", default=())


def _put_entries_back(before: tuple[_EnteredContext, ...]) -> None:
    _open.difference_update(set(_entered.get()) - set(before))
    _entered.set(before)


restore_after_errors(_entered.get, _put_entries_back)


def enter(owner: object, session: Session) -> None:
    """From now on, backwards of this thread belong to `session`."""
    open_gateway()
    entry = _EnteredContext(owner, session)
    _entered.set((*_open_entries(), entry))
    _open.add(entry)  # last, so that every open entry is also in `_entered` if an error interrupts us


def leave(owner: object) -> None:
    """Close the context that `owner` entered last. Contexts that others have entered since stay open.

    Raises:
        ContextError: `owner` has no open context.
    """
    entries = _open_entries()
    last = next((entry for entry in reversed(entries) if entry.owner is owner), None)
    if last is None:
        raise ContextError
    _open.discard(last)
    _entered.set(tuple(entry for entry in entries if entry is not last))
    if installed_compiler() is not None:
        leave_engine_cache_to_stock()


def _open_entries() -> tuple[_EnteredContext, ...]:
    return tuple(entry for entry in _entered.get() if entry in _open)


#: applies on all threads where no context is open
_process_wide: _EnteredContext | None = None


def set_process_wide(session: Session | None) -> None:
    """Set or replace the process-wide session; None removes it."""
    global _process_wide
    if session is not None:
        open_gateway()
    _process_wide = None if session is None else _EnteredContext(None, session)


# backwards of compiled callables

#: The sessions of live callables. A backward that meets the mark of one of them belongs to it.
living: set[Session] = set()


class _Mark:
    """Shared by the outputs of one call of a compiled callable."""

    __slots__ = ("__weakref__", "session")

    def __init__(self, session: Session) -> None:
        self.session = session


_MARK = "retrograd.session"

#: Marks on live nodes. If there are none, we search no graph.
_marks: weakref.WeakSet[_Mark] = weakref.WeakSet()


@without_torch_functions
def claim(outputs: Any, session: Session) -> None:
    """Mark the nodes of all tensors in `outputs` with `session`, unless they have a mark."""
    mark = _Mark(session)
    _marks.add(mark)
    for output in _leaves_of(outputs):
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            node: Any = output.grad_fn
            node.metadata.setdefault(_MARK, mark)


def _leaves_of(outputs: Any) -> Iterable[Any]:
    """The values in `outputs`. We flatten the common shapes without pytree, which is slower."""
    if isinstance(outputs, torch.Tensor):
        return (outputs,)
    values = [*outputs.values()] if isinstance(outputs, dict) else outputs
    is_flat = type(values) in (tuple, list) and all(isinstance(v, _ALONE) for v in values)
    return values if is_flat else pytree.tree_leaves(outputs)


_ALONE = torch.Tensor, type(None)


def run_backward(
    stock_run: Any, tensors: Any, grad_tensors: Any, keep_graph: bool, create_graph: bool, inputs: Any = (),
    *flags: bool, **named: bool,
) -> Grads:  # fmt: skip
    """Replaces ``torch.autograd.graph._engine_run_backward``."""
    wanted = tuple(inputs or ())
    request = EngineRequest(
        tuple(tensors), tuple(grad_tensors), keep_graph, create_graph, wanted, *flags, **named
    )
    return restored_on_error(_run_backward, request)


def _run_backward(request: EngineRequest) -> Grads:
    note_reentry(request)
    entry = next((entry for entry in reversed(_entered.get()) if entry in _open), None) or _process_wide
    stock = installed_compiler()
    if stock is None and entry is not None and plans_under_way() > MOST_NESTED:
        # Use as few Python frames of ours as possible: eager nests up to 60 levels here.
        entry.session.refuse(TOO_DEEP)
        grads = run_stock(request)
        entry.session.note(TOO_DEEP)
        return grads
    if stock is None:
        return _run(entry or _claimed(request), request)
    if entry is None or stock is not entry.stock:  # entered inside our context, or there is none
        leave_engine_cache_to_stock()
        return _run(None, request)
    with stock_compiler_off():
        return _run(entry, request)


def _claimed(request: EngineRequest) -> _EnteredContext | None:
    """The callable that a backward belongs to; None if the backward meets no mark of a live one."""
    if not _marks:
        return None
    for node in nodes_below(map(edge_of, request.tensors)):
        mark = node.metadata.get(_MARK)
        if mark is not None and mark.session in living:
            return _EnteredContext(mark.session, mark.session)
    return None


def _run(entry: _EnteredContext | None, request: EngineRequest) -> Grads:
    if entry is not None and not is_traced():
        if is_transformed(request):
            entry.session.leave_to_transform()
        elif compile_stance() != "force_eager":
            return entry.session.run(request)
    return run_stock(request)


@functools.cache
def open_gateway() -> None:
    """From now on, every backward of this process passes through `run_backward`."""
    for gateway in GATEWAYS:
        handle(gateway, run_backward)
    answer_queries()
    watch_hooks(note)


def is_anything_open() -> bool:
    """Whether a context is open on any thread, or backwards may belong to a compiled callable."""
    return bool(_open) or _process_wide is not None or bool(living)
