"""Stand before Dynamo's conversion of frames, for one compiled callable; guard what its guards leave open.

In: a function, a backend, and a `FrameWatch`. Out: the function as Dynamo compiles it, where the watch
decides which code runs as it is, and is told of conversions that failed: such a frame runs as Python runs it.
Dynamo asks a callback for every frame that it meets while the callable runs. The callback is ours, and passes
most frames on. That needs no patch of torch and no setting of the process: other callables of
``torch.compile`` and other threads have callbacks of their own.

More guards go among those that Dynamo is about to install, or has installed for code without a graph:

- for the sign of a zero: Dynamo compares numbers by ``==``, and ``0.0 == -0.0``;
- for an environment variable that was asked for and not found: a key that is missing leaves no guard;
- for hooks of modules that are set later, see `keep_eager`.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType
from typing import Any, Protocol

import torch
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from torch._dynamo.types import ConvertFrameReturn
from torch._guards import Guard, TracingContext

from retrograd._torch.dynamo.keep_eager import guard_module_hooks
from retrograd._torch.releases import frame_limits
from retrograd.process import ForkSafeLock

#: how often the conversion of one piece of code may fail: a first failure may be an accident, such as another
#: thread that changes what Dynamo has just looked at.
TRIES = 2

_OPTIMIZERS = torch.optim.__path__[0]


class FrameWatch(Protocol):
    """What a compiled callable has to say about the frames that Dynamo meets."""

    def runs_as_it_is(self, code: CodeType) -> bool:
        """Whether this code, with all that it calls, is left to Python."""

    def failed(self, code: CodeType, error: Exception) -> None:
        """The conversion of this code has failed; raises, or lets Python run it."""


class _Callback:
    """Dynamo's callback for frames, with a watch before it."""

    def __init__(self, convert: Any, watch: FrameWatch, are_numbers_exact: bool) -> None:
        functools.update_wrapper(self, convert)
        # The C code and the cache of compiled frames know a callback by these attributes.
        self._torchdynamo_orig_backend = convert._torchdynamo_orig_backend
        self.hooks = convert.hooks
        self._convert, self._watch, self._are_numbers_exact = convert, watch, are_numbers_exact
        self._failures: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
        self._lock = ForkSafeLock()

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> ConvertFrameReturn:
        code = frame.f_code
        if self._watch.runs_as_it_is(code):
            return _left_to_python(with_callees=True)
        if self._failures.get(code, 0) >= TRIES:
            return _left_to_python()
        try:
            with _exact_numbers() if self._are_numbers_exact else nullcontext():
                result: ConvertFrameReturn = self._convert(frame, cache_entry, frame_state)
            guard_environment(result.guarded_code)
            return result
        except FailOnRecompileLimitHit:  # the user has asked for this error
            raise
        except Exception as error:
            with self._lock:
                self._failures[code] = self._failures.get(code, 0) + 1
            self._watch.failed(code, error)
            return _left_to_python()


@contextmanager
def _exact_numbers() -> Iterator[None]:
    """Inside, Dynamo takes a number that changes for a new constant. As a symbol it would be computed with by
    the rules for real numbers: ``(x + 1e16) - 1e16`` is ``x`` then. Nor does it take ``addcdiv_`` and the
    like apart, which round otherwise in one piece. The lock is Dynamo's own."""
    with compile_lock, dynamo_config.patch(specialize_float=True, enable_dynamo_decompositions=False):
        yield


def _left_to_python(with_callees: bool = False) -> ConvertFrameReturn:
    """This frame is not compiled; others of the same code are asked about again."""
    callees = FrameAction.SKIP if with_callees else FrameAction.DEFAULT
    return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, callees), apply_to_code=False)


def compiled_frames(
    fn: Callable[..., Any],
    backend: Callable[..., Any],
    watch: FrameWatch,
    *,
    dynamic: bool | None,
    recompile_limit: int,
    are_numbers_exact: bool,
) -> Callable[..., Any]:
    """`fn` as ``torch.compile(fn, backend=backend, dynamic=dynamic)`` gives it, with `watch` before Dynamo.

    Args:
        fn, backend, dynamic: as ``torch.compile`` takes them.
        watch: is asked, and told.
        recompile_limit: heeded if torch takes it; else it is that of ``torch._dynamo.config``.
        are_numbers_exact: whether arithmetic of Python numbers that change from call to call must be
            Python's.
    """
    limits = frame_limits(eval_frame._optimize, recompile_limit)
    context: Any = torch._dynamo.optimize(backend=backend, dynamic=dynamic, **limits)
    context.callback = _Callback(context.callback, watch, are_numbers_exact)
    compiled: Callable[..., Any] = context(fn)
    return compiled


def is_optimizer_code(code: CodeType) -> bool:
    """Whether the code is that of torch's optimizers and schedulers."""
    return code.co_filename.startswith(_OPTIMIZERS)


def place_of(code: CodeType) -> str:
    """Where a function stands, for people; the function itself for the parts that Dynamo makes of it."""
    return f"{code.co_filename}:{code.co_firstlineno}"


def user_error_behind(error: Exception) -> Exception:
    """What a backend has raised, without Dynamo's wrapping."""
    inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else None
    return inner if isinstance(inner, Exception) else error


#: guards of Dynamo's that compare a value by ``==``.
_BY_VALUE = ("EQUALS_MATCH", "CONSTANT_MATCH")


def guard_what_dynamo_does_not(module_hooks: bool) -> None:
    """Add them; nothing happens where nobody compiles.

    Args:
        module_hooks: whether hooks of modules are among them.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    guards: Any = context.guards_context.dynamo_guards
    for guard in list(guards):
        if guard.inner_create_fn().__name__ in _BY_VALUE:
            guards.add(Guard(guard.originating_source, _SIGN_OF_ZERO))
        elif guard.name.endswith(".environ"):
            guards.add(Guard(guard.originating_source, _ENVIRONMENT))
    if module_hooks:
        guard_module_hooks(guards)


def _keeps(what: Callable[[Any], Any], text: str, builder: Any, guard: Guard) -> None:
    """Have `builder` guard on ``what(value)`` of the guarded value; None: there is nothing to guard."""
    before = what(builder.get(guard))
    if before is not None:
        parts = [f"{text} of {guard.name} as it was"]
        builder.get_guard_manager(guard).add_lambda_guard(
            lambda value: what(value) == before, parts, guard.user_stack
        )


def guard_environment(guarded_code: Any) -> None:
    """Add a guard to code of Dynamo's that asks for environment variables; None is no code."""
    manager = getattr(guarded_code, "guard_manager", None)
    if manager is not None and any(".environ" in part for part in manager.code_parts):
        before = _names_in_environment(os.environ)
        parts = ["names of os.environ as they were"]
        manager.root.add_lambda_guard(lambda _: _names_in_environment(os.environ) == before, parts, None)


def _sign_of_zero(value: Any) -> float | None:
    return math.copysign(1.0, value) if type(value) is float and value == 0.0 else None


def _names_in_environment(value: Any) -> frozenset[str] | None:
    return frozenset(value) if value is os.environ else None


_SIGN_OF_ZERO = functools.partial(_keeps, _sign_of_zero, "sign")
_ENVIRONMENT = functools.partial(_keeps, _names_in_environment, "names")
