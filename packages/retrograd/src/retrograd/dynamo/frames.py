"""Converts frames for one compiled callable: a callback before Dynamo, and the inputs of a backend behind it.

In: a function, a backend, and a `LeftToPython`. Out: the function as Dynamo compiles it. The watch decides
which code Python runs, and learns of conversions that failed: Python runs such a frame. Dynamo calls a
callback for every frame that it meets while the callable runs. The callback is ours, and passes most frames
on to Dynamo. That needs no patch of torch and no process-wide setting: other callables of ``torch.compile``
and other threads have callbacks of their own.

We add guards to those that Dynamo is about to install, or has installed for code without a graph:

- the sign of a zero: Dynamo compares numbers by ``==``, and ``0.0 == -0.0``;
- an environment variable that the program looked up in vain: Dynamo does not guard a missing key;
- the metadata of a gradient that an optimizer reads: Dynamo guards only whether there is one;
- the level of forward-mode differentiation: frames inside it are left to Python;
- module hooks that are set later, see `eager_breaks`;
- the choice of kernels, if the graph changes it: at the end of an ``sdpa_kernel`` block the graph restores
  the choice that Dynamo traced with.

In: the graph and example inputs that Dynamo calls a backend with. Out: `GraphInput` values with the fake
tensors that Dynamo traced with, so that we fake no tensor again; and guards, which Dynamo installs with its
own.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame, list_backends, register_backend
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import (
    FailOnRecompileLimitHit,
    RecompileError,
    Unsupported,
)
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GlobalStateSource, GradSource
from torch._dynamo.types import ConvertFrameReturn
from torch._guards import DuplicateInputs, Guard, TracingContext, detect_fake_mode
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from retrograd.dynamo.eager_breaks import guard_module_hooks
from retrograd.dynamo.left_to_python import LeftToPython
from retrograd.facts.patches import handled_here
from retrograd.facts.releases import frame_limits
from retrograd.process import ForkSafeLock
from retrograd.report import Report
from retrograd.runtime.kernels import kernel_choices
from retrograd.trace import hint_of, is_fake

#: How often the conversion of one code object may fail. A first failure may be an accident, such as another
#: thread that changes what Dynamo has just read.
TRIES = 2

#: Errors that the user has asked for, by a setting of Dynamo, ``fullgraph`` or ``mark_dynamic``. Dynamo
#: raises a graph break to its caller only then.
_ASKED_FOR = (FailOnRecompileLimitHit, RecompileError, Unsupported, ConstraintViolationError)


class _Callback:
    """Asks a watch about each frame before it calls Dynamo's own callback."""

    def __init__(self, convert: Any, watch: LeftToPython, are_numbers_exact: bool, is_whole: bool) -> None:
        functools.update_wrapper(self, convert)
        # Dynamo's C code and its cache of compiled frames identify a callback by these attributes.
        self._torchdynamo_orig_backend = convert._torchdynamo_orig_backend
        self.hooks = convert.hooks
        self._convert, self.watch = convert, watch
        self._are_numbers_exact, self._is_whole = are_numbers_exact, is_whole
        self._failures: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
        self._lock = ForkSafeLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies, and for pickles of compiled modules."""
        return type(self), (self._convert, self.watch, self._are_numbers_exact, self._is_whole)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> ConvertFrameReturn:
        code = frame.f_code
        if self.watch.runs_as_it_is(frame):
            return _left_to_python(with_callees=True)
        if self._failures.get(code, 0) >= TRIES:
            return _left_to_python()
        lazy: list[object] = []
        try:
            exactly = _exact_numbers() if self._are_numbers_exact else nullcontext()
            # a function that must be one graph is compiled in its first call
            in_eager = nullcontext() if self._is_whole else _lazy_modules_found(lazy)
            with (
                self.watch.compiling(code),
                exactly,
                _warnings_are_no_errors(),
                _without_known_warnings(),
                in_eager,
            ):
                result: ConvertFrameReturn = self._convert(frame, cache_entry, frame_state)
            guard_environment(result.guarded_code)
            if result.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY:
                self.watch.limited(code)
            return result
        except _ASKED_FOR:
            raise
        except Exception as error:
            if lazy:
                return _left_to_python(with_callees=True)  # the next call is compiled
            with self._lock:
                self._failures[code] = self._failures.get(code, 0) + 1
            self.watch.failed(code, error)
            return _left_to_python()


def _lazy_modules_found(found: list[object]) -> AbstractContextManager[None]:
    """Inside, a trace ends where Dynamo would initialise a lazy module, which goes into `found`. After a
    trace Dynamo sets the generators back, so the numbers of the initialisation would be drawn again."""

    def initialize(original: Callable[..., None], tx: Any, mod: Any, *args: Any) -> None:
        if hasattr(mod, "_initialize_hook"):
            found.append(mod)
            raise RuntimeError("a lazy module is initialised in eager")
        original(tx, mod, *args)

    return handled_here("torch._dynamo.variables.nn_module:initialize_lazy_module", initialize)


@contextmanager
def _warnings_are_no_errors() -> Iterator[None]:
    """Inside, no warning is raised as an error: Dynamo's trace emits warnings that the program does not, for
    example when it reads ``.grad``."""
    if not any(found[0] == "error" for found in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        for kind, *others in [*warnings.filters]:
            if kind == "error":
                warnings.filters.remove((kind, *others))  # type: ignore[attr-defined]
        yield


#: How warnings of Dynamo's begin that say nothing here: profiler ranges do not matter to results, and the
#: report lists where Dynamo divides a program.
_NO_NEWS = ("Profiler function", "Profiler record function", "Graph break from `Tensor.item()`")
_WARN_OF_NOTHING = [
    logging.getLogger(f"torch._dynamo.variables.{name}") for name in ("ctx_manager", "tensor", "torch")
]


@contextmanager
def _without_known_warnings() -> Iterator[None]:
    """Inside, Dynamo does not log the warnings that say nothing here, as far as this thread causes them."""
    here = threading.get_ident()

    def is_news(record: logging.LogRecord) -> bool:
        return record.thread != here or not str(record.msg).startswith(_NO_NEWS)

    for log in _WARN_OF_NOTHING:
        log.addFilter(is_news)
    try:
        yield
    finally:
        for log in _WARN_OF_NOTHING:
            log.removeFilter(is_news)


@contextmanager
def _exact_numbers() -> Iterator[None]:
    """Inside, Dynamo treats a number that changes as a new constant. It would compute with a symbol by the
    rules of real numbers, where ``(x + 1e16) - 1e16`` is ``x``. Nor does it decompose ``addcdiv_`` and the
    like, because the fused kernels round differently. The lock is Dynamo's own."""
    with (
        compile_lock,
        dynamo_config.patch(specialize_float=True, enable_dynamo_decompositions=False),
        _unseen_by_optimizers(),
    ):
        yield


def _unseen_by_optimizers() -> AbstractContextManager[None]:
    """Inside, torch does not say that it compiles. It would say so on all threads, and an optimizer that
    makes an eager step on another thread would compute as when it is compiled."""
    if not hasattr(torch.compiler, "_compile_session_context"):
        return nullcontext()
    return handled_here("torch.compiler:_compile_session_context", lambda original: nullcontext())


def _left_to_python(with_callees: bool = False) -> ConvertFrameReturn:
    """Leave this frame to Python. Dynamo asks again about other frames of the same code."""
    callees = FrameAction.SKIP if with_callees else FrameAction.DEFAULT
    return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, callees), apply_to_code=False)


def compiled_frames(
    fn: Callable[..., Any],
    backend: Callable[..., Any],
    watch: LeftToPython,
    *,
    fullgraph: bool = False,
    dynamic: bool | None,
    recompile_limit: int | None = None,
    are_numbers_exact: bool,
) -> Callable[..., Any]:
    """Compile `fn` as ``torch.compile(fn, backend=backend, dynamic=dynamic)`` does, with `watch` before
    Dynamo.

    Args:
        fn, backend: as ``torch.compile`` takes them.
        watch: is asked about frames and receives failures.
        fullgraph, dynamic: as ``torch.compile`` takes them.
        recompile_limit: the limit of this callable alone, if torch supports that. Otherwise, and by default,
            the limit of ``torch._dynamo.config`` applies.
        are_numbers_exact: whether arithmetic with Python numbers that change from call to call must equal
            Python's.
    """
    limits = {} if recompile_limit is None else frame_limits(eval_frame._optimize, recompile_limit)
    context: Any = torch._dynamo.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **limits)
    if not hasattr(context, "callback"):  # if TORCHDYNAMO_DISABLE=1
        watch.switched_off()
        return fn
    context.callback = _Callback(context.callback, watch, are_numbers_exact, fullgraph)
    compiled: Callable[..., Any] = context(fn)
    return compiled


def report_behind(module: Any) -> Report | None:
    """What was compiled for a module that `compiled_frames` made, or for a copy of one; None for others."""
    callback = getattr(getattr(module, "dynamo_ctx", None), "callback", None)
    return callback.watch.report if isinstance(callback, _Callback) else None


_TENSOR_MATCH = GuardBuilder.TENSOR_MATCH
#: Dynamo's guards that compare a value by ``==``
_BY_VALUE = ("EQUALS_MATCH", "CONSTANT_MATCH")


def guard_what_dynamo_does_not(gm: fx.GraphModule, inputs: Sequence[GraphInput], module_hooks: bool) -> None:
    """Add our guards to Dynamo's. Does nothing outside of a compilation.

    Args:
        gm: the graph.
        inputs: of the graph.
        module_hooks: whether to guard module hooks.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    guards: Any = context.guards_context.dynamo_guards
    guards.add(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
    compared = {guard.originating_source for guard in guards if guard.inner_create_fn() is _TENSOR_MATCH}
    for item in inputs:
        if isinstance(item.source, GradSource) and item.source not in compared:
            guards.add(item.source.make_guard(_TENSOR_MATCH))
    for guard in list(guards):
        if guard.inner_create_fn().__name__ in _BY_VALUE:
            guards.add(Guard(guard.originating_source, _SIGN_OF_ZERO))
        elif guard.name.endswith(".environ"):
            guards.add(Guard(guard.originating_source, _ENVIRONMENT))
    if gm.graph.find_nodes(op="call_function", target=torch.nn.attention._sdpa_kernel):
        guards.add(Guard(GlobalStateSource(), _guard_kernels))
    if module_hooks:
        guard_module_hooks(guards)


def _guard_kernels(builder: Any, guard: Guard) -> None:
    before, parts = kernel_choices(), ["the choice of kernels"]
    builder.guard_manager.root.add_lambda_guard(lambda _: kernel_choices() == before, parts, guard.user_stack)


def _keeps(what: Callable[[Any], Any], text: str, builder: Any, guard: Guard) -> None:
    """Guard on ``what(value)`` of the guarded value. If that is None now, there is nothing to guard."""
    before = what(builder.get(guard))
    if before is not None:
        parts = [f"{text} of {guard.name} as it was"]
        builder.get_guard_manager(guard).add_lambda_guard(
            lambda value: what(value) == before, parts, guard.user_stack
        )


def guard_environment(guarded_code: Any) -> None:
    """Guard the names of environment variables, if Dynamo's code looks some up. `guarded_code` may be
    None."""
    manager = getattr(guarded_code, "guard_manager", None)
    if manager is not None and any(".environ" in part for part in manager.code_parts):
        before = _names_in_environment(os.environ)
        parts = ["names of os.environ as they were"]
        manager.root.add_lambda_guard(lambda _: _names_in_environment(os.environ) == before, parts, None)


def _sign_of_zero(value: Any) -> float | None:
    return math.copysign(1.0, value) if type(value) is float and value == 0.0 else None


def _names_in_environment(value: Any) -> frozenset[bytes | str] | None:
    """The names of all environment variables; None if `value` is not ``os.environ``. We compare the names in
    each call, so we do not decode them, as iteration would."""
    return frozenset(getattr(value, "_data", value)) if value is os.environ else None


_SIGN_OF_ZERO = functools.partial(_keeps, _sign_of_zero, "sign")
_ENVIRONMENT = functools.partial(_keeps, _names_in_environment, "names")


# the inputs of a backend


class GraphInput:
    """One input of a graph that Dynamo made. A tensor for which Dynamo has no fake stays real.

    Attributes:
        name: the expression by which the program reaches it (``L['x']``), or the placeholder's name.
        value: Dynamo's fake tensor, a symbolic number, or a constant.
        given: the real tensor, if Dynamo passed it; else `value`.
        source: Dynamo's source, for guards; None if there is none.
        is_parameter: whether it is an ``nn.Parameter``.
        is_static: whether Dynamo says that it stays the same from call to call.
    """

    def __init__(self, node: fx.Node, given: Any) -> None:
        self.given = self.value = given
        if isinstance(given, torch.Tensor) and not is_fake(given):
            self.value = node.meta.get("example_value", given)
        argument = node.meta.get("grapharg")
        source = getattr(node, "_dynamo_source", None) or getattr(argument, "source", None)
        self.name: str = node.name if source is None else source.name
        # the program's value may be a number, not a tensor
        self.source = None if getattr(argument, "pass_arg_as_tensor", False) else source
        is_marked = bool(getattr(given, "_is_param", False))
        self.is_parameter = is_marked or isinstance(given, torch.nn.Parameter)
        self.is_static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def fake_mode_for(example_inputs: Sequence[Any]) -> Any:
    """The fake mode of the current compilation; None outside of one."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return detect_fake_mode(list(example_inputs))


def graph_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[GraphInput]:
    """The inputs of `gm`."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [GraphInput(node, given) for node, given in zip(placeholders, example_inputs, strict=True)]


def fake_of_attribute(mode: Any, tensor: torch.Tensor) -> Any:
    """The fake of a tensor that the graph itself holds; the same one in each call. Its sizes are static."""
    return tensor if is_fake(tensor) else mode.from_tensor(tensor, static_shapes=True)


def why_not_as_given(item: GraphInput) -> str | None:
    """What Dynamo's trace changed on a fake, so that it no longer describes the input; None if nothing."""
    fake, given = item.value, item.given
    if not isinstance(given, torch.Tensor) or fake is given:
        return None
    if fake.dim() != given.dim() or fake.dtype != given.dtype or fake.device != given.device:
        return "its dimensions, dtype or device"
    if [*map(hint_of, fake.shape)] != [*map(hint_of, given.shape)]:
        return "its sizes"
    strides = zip(fake.shape, map(hint_of, fake.stride()), given.stride(), strict=True)
    if any(hint_of(size) not in (0, 1) and one != other for size, one, other in strides):
        return "its strides"
    return None


@contextmanager
def traced_in(mode: Any) -> Iterator[None]:
    """Inside, torch's tracing context names `mode`.

    For its backends, Dynamo prepares another mode with the same shape environment. The two modes must not
    mix.
    """
    if TracingContext.try_get() is None:
        yield
        return
    with TracingContext.patch(fake_mode=mode):
        yield


def guard_same(first: GraphInput, second: GraphInput) -> None:
    """Have Dynamo recompile if the two inputs are not the same tensor."""
    context = TracingContext.try_get()
    if context is not None and first.source is not None and second.source not in (None, first.source):
        guards: list[Any] = context.guards_context.aotautograd_guards
        guards.append(DuplicateInputs(first.source, second.source))


#: By a part of Dynamo's text, why it ends a graph where the live path goes on.
_IN_OUR_WORDS = {
    "backward() call": "backward(), which Dynamo leaves to the autograd engine",
    "Module-level backwards hooks": "a module with backward hooks, which Dynamo leaves to Python",
}


def why_ended(gm: fx.GraphModule) -> str:
    """Why Dynamo ended the graph where it did, and where; empty if the graph is complete."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", True):
        return ""
    text, *more = map(str.strip, str(reason.reason).strip().splitlines())
    explained = [line.removeprefix("Explanation:") for line in more if line.startswith("Explanation:")]
    own_words = next((ours for theirs, ours in _IN_OUR_WORDS.items() if theirs in text), None)
    text = own_words or ": ".join(part.strip(". ") for part in [text, *explained] if part.strip(". "))
    stack = [*(reason.user_stack or ())]
    places = [f"{frame.filename}:{frame.lineno}" for frame in stack]
    own = [place for place in places if not place.startswith(torch.__path__[0])]
    if places and places[-1] not in own:
        text += f", in torch's own code at {places[-1]}"
    return f"{text} ({own[-1]})" if own else text


def grad_mode_left(gm: fx.GraphModule) -> bool | None:
    """The grad mode after the graph has run; None if the graph does not set it."""
    switches = [node for node in gm.graph.nodes if node.target is torch._C._set_grad_enabled]
    return bool(switches[-1].args[0]) if switches else None


def register_once(name: str, backend: Callable[..., Any]) -> None:
    """Register `backend` with ``torch.compile``, unless an installed distribution has done so."""
    if name not in list_backends(exclude_tags=None):
        register_backend(backend, name)
