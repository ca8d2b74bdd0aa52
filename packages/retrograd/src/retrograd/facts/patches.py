"""Replaces attributes of torch: one table of all of them, one mechanism.

In: a name from the table and a handler for it. Out: torch's attribute is a dispatcher from then on. It calls
the handler of this thread, or else the handler of the process, or else the original. We never restore an
attribute, so nothing can be restored too early while another thread is inside. A process-wide handler that
concerns only one thread checks that thread's state.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from retrograd.facts import read_table
from retrograd.process import ForkSafeLock, ThreadValue

#: Receives the original and the arguments of a call, and returns the result.
Handler = Callable[..., Any]

#: Where a process group begins to coalesce operations; only in builds with ``torch.distributed``.
COLLECTING = "torch._C._distributed_c10d:ProcessGroup._start_coalescing"

#: All replaced attributes (``module:attribute``): why there is no other way, or which fault this repairs.
TABLE: Mapping[str, Mapping[str, str]] = read_table("patches")["patches"]


#: what answers calls on this thread only, by the name of what is replaced; innermost last
_here: ThreadValue[tuple[tuple[str, Handler], ...]] = ThreadValue(())
_everywhere: dict[str, Handler] = {}
_replaced: set[str] = set()
_lock = ForkSafeLock()


def handle(name: str, handler: Handler) -> None:
    """From now on, `handler` answers calls of `name` on every thread."""
    _replace(name)
    _everywhere[name] = handler


@contextmanager
def handled_here(name: str, handler: Handler) -> Iterator[None]:
    """Inside, `handler` answers calls of `name` on this thread."""
    _replace(name)
    entry = name, handler
    _here.set((*_here.get(), entry))
    try:
        yield
    finally:  # blocks need not be nested
        _here.set(tuple(one for one in _here.get() if one is not entry))


def owner_and_attribute(name: str) -> tuple[Any, str]:
    """The object that owns the attribute called `name`, and the attribute's own name.

    Raises:
        ImportError, AttributeError: this torch has no such attribute.
    """
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner = importlib.import_module(module)
    if owners:
        owner = operator.attrgetter(".".join(owners))(owner)
    inspect.getattr_static(owner, attribute)
    return owner, attribute


def _replace(name: str) -> None:
    if name in _replaced:
        return
    assert name in TABLE, f"{name} is replaced, but does not stand in the table of patches"
    with _lock:
        if name not in _replaced:
            owner, attribute = owner_and_attribute(name)
            setattr(owner, attribute, _dispatcher_like(name, owner, attribute))
            _replaced.add(name)


def _dispatcher_like(name: str, owner: Any, attribute: str) -> Any:
    """A dispatcher that is a plain function, static method or class method, like the original."""
    found = inspect.getattr_static(owner, attribute)
    if isinstance(found, staticmethod):
        return staticmethod(_dispatcher(name, found.__func__))
    bound = getattr(owner, attribute)
    if inspect.ismethod(bound) and bound.__self__ is owner:  # a class method, perhaps inherited
        return staticmethod(_dispatcher(name, bound))
    return _dispatcher(name, bound)


def _dispatcher(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    here = _here

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        handler = _everywhere.get(name)
        for replaced, inner in here.get():
            if replaced == name:
                handler = inner
        return original(*args, **kwargs) if handler is None else handler(original, *args, **kwargs)

    return hidden_from_dynamo(dispatch)


def hidden_from_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from compiling `fn` and its callees when compiled code calls it after a graph break."""
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(fn.__code__, strategy)
    return fn
