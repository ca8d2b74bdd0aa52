"""A context around a function, also one that is suspended in between.

In: a context manager that may be entered many times, and a function, generator function or coroutine
function. Out: a function of the same kind. A generator's caller must not find itself inside the context
while the generator is suspended, so it is entered anew each time that the generator goes on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any


def decorated(context: AbstractContextManager[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` inside `context`.

    Raises:
        TypeError: `fn` is an asynchronous generator function.
    """
    if inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"compiled_autograd cannot decorate the asynchronous generator {fn.__qualname__}\n"
            "  try    a with statement around the backward inside it"
        )
    if inspect.iscoroutinefunction(fn):
        return _coroutine(context, fn)
    return _generator(context, fn) if inspect.isgeneratorfunction(fn) else _plain(context, fn)


def _plain(context: AbstractContextManager[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return fn(*args, **kwargs)

    return run


def _coroutine(context: AbstractContextManager[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return await fn(*args, **kwargs)

    return run


def _generator(context: AbstractContextManager[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = fn(*args, **kwargs)
        resume, given = generator.send, None
        while True:
            try:
                with context:
                    value = resume(given)
            except StopIteration as stop:
                return stop.value
            try:
                resume, given = generator.send, (yield value)
            except GeneratorExit:
                with context:
                    generator.close()
                raise
            except BaseException as error:
                resume, given = generator.throw, error

    return run
