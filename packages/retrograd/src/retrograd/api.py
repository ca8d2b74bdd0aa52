"""The public API: contexts, the process-wide switch, compiled callables, the report, reset.

In: the user's choices. Out: `CompiledAutograd` contexts, compiled callables and `Report` values.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from retrograd.aot import AotFunction, AotModule
from retrograd.aot.partition_cache import expect
from retrograd.backends.background import wait_for_all
from retrograd.backends.registry import InductorBackend, find_backend
from retrograd.config import Config, check, checked
from retrograd.dynamo import config_of
from retrograd.dynamo.backend import ConfiguredBackend
from retrograd.dynamo.compiled_forwards import watch_compiled_forwards
from retrograd.dynamo.frames import compiled_frames, report_behind
from retrograd.dynamo.left_to_python import LeftToPython
from retrograd.dynamo.step import CompiledStep
from retrograd.errors import OptionError, name_of
from retrograd.live.contexts import (
    claim,
    enter,
    is_anything_open,
    leave,
    living,
    open_gateway,
    set_process_wide,
)
from retrograd.live.session import Session
from retrograd.probe import check_supported
from retrograd.process import forget_everything
from retrograd.report import Report, process_report, running
from retrograd.runtime.modes import context_decorator
from retrograd.runtime.streams import side_streams


class CompiledAutograd:
    """A context, also usable as a decorator, that compiles every backward of this thread inside it.

    `compiled_autograd` makes it. It may be entered repeatedly, nested, and shared by threads. Each thread and
    each asyncio task enters separately. Of nested contexts the innermost applies, including contexts of stock
    compiled autograd.
    """

    @checked(config=(Config, "a retrograd.Config; retrograd.compiled_autograd() makes contexts"))
    def __init__(self, config: Config, place: Hashable = None) -> None:
        self.config = config
        self.report = Report(above=process_report)
        self._session = Session(config, self.report, is_paced=True, place=place)

    def __reduce__(self) -> Any:
        """A copy or a pickle holds the options. Nobody has entered it, and it shares no code."""
        return CompiledAutograd, (self.config,)

    def __enter__(self) -> CompiledAutograd:
        check_supported()
        enter(self, self._session)
        return self

    def __exit__(self, *error: object) -> None:
        leave(self)

    @checked(fn=(callable, "a function; as a decorator it has parentheses: @compiled_autograd()"))
    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `fn` (a function, generator function or coroutine function) in this context. A generator
        leaves the context whenever it is suspended, so that its caller is not inside, and enters it on each
        resume.

        Raises:
            TypeError: `fn` is an asynchronous generator function.
            RuntimeError: `fn` is a class.
        """
        if inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"compiled_autograd cannot decorate the asynchronous generator {fn.__qualname__}\n"
                "  try    a with statement around the backward inside it"
            )
        if not inspect.iscoroutinefunction(fn):
            return context_decorator(lambda: self, fn)

        @functools.wraps(fn)
        async def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await fn(*args, **kwargs)

        return run

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all contexts have finished their background compilation (``background=True``,
        ``compile_timeout``).

        Args:
            timeout: how many seconds to wait; None waits without a limit.

        Returns:
            Whether all code is ready. If so, the next backward runs it.
        """
        return wait_for_all(timeout)

    def explain(self) -> Report:
        """What this context captured, what it did not capture, and why."""
        return self.report


@checked()
def compiled_autograd(  # noqa: PLR0913 - as many parameters as there are choices
    backend: str | Callable[..., Any] = "inductor",
    *,
    strict: bool = False,
    dynamic: bool | None = None,
    recompile_limit: int = 8,
    opaque: Iterable[str] = (),
    regions: bool | int = True,
    background: bool = False,
    cudagraphs: bool = False,
    compile_timeout: float | None = None,
) -> CompiledAutograd:
    """Compile every backward that runs inside the returned context.

    Args:
        backend: ``"inductor"``; ``"eager"`` (interprets the captured calls; gradients equal eager's bit for
            bit); ``"aten"`` (interprets the traced ATen graph); or a callable
            ``(gm, example_inputs) -> callable`` that receives the ATen graph of each segment.
        strict: raise an error if something cannot be captured or compiled, instead of running it eagerly.
        dynamic: None: sizes are static until they change; True: symbolic from the start; False: always
            static.
        recompile_limit: how often one segment may be lowered. After that it is interpreted.
        opaque: names of autograd nodes, such as ``"MulBackward0"``, that run as opaque calls.
        regions: compile repeated structure, such as the layers of a deep model, once instead of once per
            copy, where that is profitable. A number is the smallest profitable size, in autograd nodes. False
            turns this off.
        background: compile on another thread. Until the code is ready, backwards run interpreted, as in
            eager; `CompiledAutograd.wait` waits for the code. Under ``torch.use_deterministic_algorithms``
            the first backward waits.
        compile_timeout: like `background`, but only for segments that take more seconds than this to compile.
            None: backwards wait.
        cudagraphs: record compiled segments as CUDA graphs, and replay them where that is safe. The report
            says why a segment is not recorded.

    Returns:
        A context manager, also usable as a decorator.

    Under ``torch.compiler.set_stance("force_eager")`` every backward runs on the stock engine without a
    warning, even if `strict` is set. Under ``"eager_on_recompile"``, segments without code for their inputs
    are interpreted. Under ``"fail_on_recompile"``, they raise `LoweringError`.

    Raises:
        OptionError: an option has a value that is not allowed.
        UnsupportedTorchError: on entry, if torch does not offer the engine's protocol.
        ContextError: on exit, if this thread or task has not entered the context.

    Example:
        >>> with retrograd.compiled_autograd(backend="eager"):
        ...     loss.backward()
    """
    config = Config(**locals())  # every parameter is an option
    find_backend(backend)
    watch_compiled_forwards(is_anything_open)
    side_streams.watch()
    caller = sys._getframe(2)  # a loop may call this once a step; calls at one place share what we learned
    return CompiledAutograd(config, (caller.f_code, caller.f_lineno))


@checked(target=(lambda target: target is None or callable(target), "a module, or a function"))
def compile(
    target: Any = None,
    /,
    *,
    backend: str | Callable[..., Any] = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a module or function by ``torch.compile(backend="retrograd")``, and its backward by the live
    path.

    A backward belongs to the callable if it reaches an output of one of its calls, at any time and on any
    thread. Everything else in that backward is compiled with it. Other backwards are unaffected. An open
    `compiled_autograd` context, or `enable`, takes precedence. When the callable is deleted, it no longer
    owns any backward.

    If Dynamo fails on a frame, Python runs that frame, and the report says why; with `fullgraph` or
    ``"strict"`` this is an error. With ``backend="eager"``, Python numbers and torch's optimizers compute as
    in eager.

    Args:
        target: a module, which is not modified, or a function. Without it, the result is a decorator.
        backend: as in `compiled_autograd`, for forward and backward.
        fullgraph, dynamic, mode: as in ``torch.compile``.
        options: as in ``torch.compile(backend="retrograd", options=...)``, without ``"backend"``;
            see ``retrograd.dynamo.list_options()``. ``"strict"``, ``"regions"``, ``"cudagraphs"`` and
            ``"compile_timeout"`` also apply to the live path.

    Returns:
        What ``torch.compile`` returns: for a module, a module. ``retrograd.explain`` of it reports what was
        compiled for it. Callables with equal settings share code, which the first of them reports.

    Raises:
        OptionError: an unknown mode or option, or a value that is not allowed.
        UnsupportedTorchError: torch does not offer the engine's protocol.

    Example:
        >>> model = retrograd.compile(model, backend="inductor")
        >>> loss_of(model(x)).backward()
    """
    if target is None:
        return functools.partial(compile, **{name: it for name, it in locals().items() if name != "target"})
    if options is not None and "backend" in options:
        raise OptionError("options", f"got 'backend': {options['backend']!r}", "backend= beside options")
    chosen = {**(options or {}), "backend": backend}
    config = config_of(mode, chosen)
    live = replace(config, backend=backend, dynamic=dynamic)
    report = Report(above=process_report)
    session = Session(live, report, is_paced=True)
    check_supported()
    if isinstance(target, torch.nn.Module) and isinstance(find_backend(backend), InductorBackend):
        expect(target)
    watch_compiled_forwards(is_anything_open)
    side_streams.watch()
    watch = LeftToPython(name_of(target), replace(config, strict=config.strict or fullgraph), report)
    compiled: Any = compiled_frames(
        target,
        ConfiguredBackend(config, chosen, (mode, dynamic, fullgraph)),
        watch,
        fullgraph=fullgraph,
        dynamic=dynamic,
        are_numbers_exact=watch.computes_like_eager,
    )
    if compiled is not target:
        compiled = _owning(compiled, session, report)
        _reports[compiled] = report
    return compiled


#: The report of each callable that `compile` returned.
_reports: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()


def _owning(compiled: Any, session: Session, report: Report) -> Any:
    """`compiled`, whose backwards `session` runs for as long as `compiled` exists."""
    if isinstance(compiled, torch.nn.Module):
        compiled.forward = _claiming(compiled.forward, session, report)
    else:
        compiled = _claiming(compiled, session, report)
    living.add(session)
    open_gateway()
    weakref.finalize(compiled, living.discard, session).atexit = False
    return compiled


def _claiming(call: Callable[..., Any], session: Session, report: Report) -> Callable[..., Any]:
    """Wrap `call` to mark its outputs, so that their backwards belong to `session`. `report` is told what
    falls back in a call."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return call(*args, **kwargs)
        before = running.get()
        running.set(report)
        try:
            outputs = call(*args, **kwargs)
        finally:
            running.set(before)
        claim(outputs, session)
        return outputs

    return run


def enable(backend: str | Callable[..., Any] = "inductor", **options: Any) -> None:
    """Compile every backward of this process, on all threads, including threads that start later.

    A context that is open on a thread takes precedence there. A second call replaces the earlier setting.

    Args:
        backend: as in `compiled_autograd`.
        options: the other arguments of `compiled_autograd`.

    Raises:
        OptionError: an option has a value that is not allowed.
        UnsupportedTorchError: torch does not offer the engine's protocol.

    Example:
        >>> retrograd.enable(backend="eager")
        >>> loss.backward()
        >>> retrograd.disable()
    """
    config = compiled_autograd(backend, **options).config
    check_supported()
    set_process_wide(Session(config, process_report, is_paced=True))


def disable() -> None:
    """Undo `enable`. Open contexts stay open. Without `enable` this does nothing."""
    set_process_wide(None)


def explain(
    fn: Callable[..., Any] | None = None,
    /,
    *args: Any,
    backend: str | Callable[..., Any] = "eager",
    **kwargs: Any,
) -> Report:
    """Report what was captured and compiled, and what ran eagerly and why.

    The report lists backwards with their segments, opaque calls, guards and recompiles, and the graphs that
    were compiled ahead of time.

    Args:
        fn: what `compile`, `compile_step`, `aot.function` or `aot.module` returned, without arguments: we
            report on it and do not call it. Or a function that runs backwards: we call it inside a new
            context. Without `fn`, the report covers the whole process so far.
        args, kwargs: the arguments for `fn`.
        backend: as in `compiled_autograd`.

    Returns:
        The report. ``print(report)`` shows a summary, ``print(report.details())`` all of it,
        ``report.print_readable()`` the graphs; ``report.save_html(path)`` writes a page. Of what
        `compile_step` returned, it is the report of the pieces; ``step.explain()`` also counts the steps.

    Raises:
        OptionError: `fn` cannot be called with these arguments, and `compile` did not return it.
    """
    if fn is None:
        return process_report
    check("fn", fn, (callable, "a function that runs backwards"))
    if not args and not kwargs and (report := _report_of(fn)) is not None:
        return report
    _check_call(fn, args, kwargs)
    with compiled_autograd(backend) as context:
        fn(*args, **kwargs)
    return context.report


def _report_of(fn: Any) -> Report | None:
    """The report of a callable that we have made, or of a copy of it that has compiled something."""
    own = fn.compiled if isinstance(fn, AotModule) else getattr(fn, "__func__", fn)
    if isinstance(own, CompiledStep):
        return own.explain().pieces
    if isinstance(own, AotFunction):
        return own.explain()
    with contextlib.suppress(TypeError):  # no weak reference to it is possible: `compile` did not return it
        if fn in _reports:
            return _reports[fn]
    report = report_behind(fn)
    return report if report and (report.graphs or report.fallbacks) else None


def _check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Check that `explain` can call `fn`. A wrapper of a module takes any arguments, so we never call a
    module without some.

    Raises:
        OptionError: it cannot.
    """
    inner = getattr(fn, "_orig_mod", fn)
    try:
        with contextlib.suppress(ValueError):  # functions of C have no signature
            inspect.signature(getattr(inner, "forward", inner)).bind(*args, **kwargs)
        if args or kwargs or not isinstance(fn, torch.nn.Module):
            return
        found = "a module of which there is no report, and no arguments"
    except TypeError as error:
        found = f"it cannot be called with these arguments: {error}"
    raise OptionError(
        "fn",
        found,
        "a function that runs backwards, and its arguments: retrograd.explain(train_step, x, y); "
        "or what retrograd.compile returned: retrograd.explain(compiled); a copy of that which shares the "
        "original's code has no report. retrograd.explain() also shows what torch.compile made",
    )


def reset() -> None:
    """Forget all captures, plans, reports and counters, and repeat warnings that were already given.

    What `enable` set stays set, and open contexts stay open: their next backwards are captured again.
    """
    forget_everything()
