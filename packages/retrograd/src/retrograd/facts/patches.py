"""Every attribute of torch that this package replaces: one table, one mechanism.

In: a name of the table and a handler for it. Out: from then on torch's attribute is a dispatcher, for good;
it calls the handler of this thread, else the handler of the process, else the original. Nothing is ever put
back, so that nobody can put back too much, or at the wrong time, while another thread is inside. Whatever a
handler does for one thread only, it decides by state of that thread.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from retrograd.facts import read_table
from retrograd.process import ForkSafeLock, restore_after_errors

#: is given the original and the arguments of a call, and answers it.
Handler = Callable[..., Any]

#: where a process group begins to collect what is started; of builds with ``torch.distributed``.
COLLECTING = "torch._C._distributed_c10d:ProcessGroup._start_coalescing"

#: what is replaced (``module:attribute``): why there is no other way, or which repair of a fault it is.
TABLE: Mapping[str, Mapping[str, str]] = read_table("patches")["patches"]


class _ThreadHandlers(threading.local):
    """The handlers of this thread by name, innermost last."""

    def __init__(self) -> None:
        self.stacks: dict[str, list[Handler]] = {}


_here = _ThreadHandlers()


def _put_handlers_back(before: dict[str, int]) -> None:
    for name, stack in _here.stacks.copy().items():
        del stack[before.get(name, 0) :]


restore_after_errors(
    lambda: {name: len(stack) for name, stack in _here.stacks.copy().items() if stack}, _put_handlers_back
)
_everywhere: dict[str, Handler] = {}
_replaced: set[str] = set()
_lock = ForkSafeLock()


def handle(name: str, handler: Handler) -> None:
    """From here on `handler` answers calls of `name`, on every thread."""
    _replace(name)
    _everywhere[name] = handler


@contextmanager
def handled_here(name: str, handler: Handler) -> Iterator[None]:
    """Inside, `handler` answers calls of `name` on this thread."""
    _replace(name)
    stack = _here.stacks.setdefault(name, [])
    stack.append(handler)
    try:
        yield
    finally:
        if handler in stack:  # an error may have come between
            stack.remove(handler)


def owner_and_attribute(name: str) -> tuple[Any, str]:
    """The object whose attribute is replaced, and the name of the attribute.

    Raises:
        ImportError, AttributeError: this torch has no such thing.
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
    """A dispatcher that is a plain function, a static method or a class method, as the original is."""
    found = inspect.getattr_static(owner, attribute)
    if isinstance(found, staticmethod):
        return staticmethod(_dispatcher(name, found.__func__))
    bound = getattr(owner, attribute)
    if inspect.ismethod(bound) and bound.__self__ is owner:  # a class method, perhaps inherited
        return staticmethod(_dispatcher(name, bound))
    return _dispatcher(name, bound)


def _dispatcher(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    stacks = _here

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        stack = stacks.stacks.get(name)
        handler = stack[-1] if stack else _everywhere.get(name)
        return original(*args, **kwargs) if handler is None else handler(original, *args, **kwargs)

    return hidden_from_dynamo(dispatch)


def hidden_from_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which Dynamo does not compile, nor what it calls, where compiled code calls it after a break."""
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(fn.__code__, strategy)
    return fn
