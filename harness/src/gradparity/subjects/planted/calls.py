"""Faults of compiled calls: what becomes of inputs, outputs, cotangents, Python state, random numbers, modes.

In: a function or module. Out: a function that calls it and does one thing wrong.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import numpy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from gradparity.subjects.planted.fault import Fault, compiled_by

Target = Callable[..., Any]


def on_outputs(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Target], Target]:
    """A wrapper that changes every tensor that is returned."""

    def wrap(target: Target) -> Target:
        def call(*args: Any, **kwargs: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, change, target(*args, **kwargs))

        return call

    return wrap


def on_inputs(change: Callable[[Any], Any]) -> Callable[[Target], Target]:
    """A wrapper that changes every argument."""
    return lambda target: lambda *args, **kwargs: target(*map(change, args), **kwargs)


def inside(context: Callable[[], Any]) -> Callable[[Target], Target]:
    """A wrapper that calls the target inside a context."""

    def wrap(target: Target) -> Target:
        def call(*args: Any, **kwargs: Any) -> Any:
            with context():
                return target(*args, **kwargs)

        return call

    return wrap


def _hooked(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Changes the cotangent of an output."""

    def hooked(output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            output.register_hook(change)
        return output

    return hooked


def _as_if_contiguous(grad: torch.Tensor) -> torch.Tensor:
    """The memory of a gradient, read as if it were contiguous; what lies behind it is garbage."""
    if grad.is_contiguous() or grad.numel() == 0:
        return grad
    whole = grad.new_full((grad.numel(),), 1e20)
    size = min(grad.numel(), grad.untyped_storage().nbytes() // grad.element_size() - grad.storage_offset())
    whole[:size] = grad.as_strided((size,), (1,))
    return whole.reshape(grad.shape)


class _Bundle(torch.autograd.Function):
    """All outputs as the outputs of one node: what is not used gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same tensors."""
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The same gradients; zeros have been made of None."""
        return grads


def _bundled(target: Target) -> Target:
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten(target(*args, **kwargs))
        places = [n for n, each in enumerate(leaves) if isinstance(each, torch.Tensor) and each.requires_grad]
        for place, made in zip(places, _Bundle.apply(*(leaves[n] for n in places)), strict=True):
            leaves[place] = made
        return pytree.tree_unflatten(leaves, spec)

    return call


class _Alone(torch.autograd.Function):
    """One output, differentiated by itself: what it sends to an input is added up before anything else."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """The same values."""
        ctx.output, ctx.inputs = output, inputs
        return output.detach().clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        """The gradients of this output alone."""
        options = {"retain_graph": True, "allow_unused": True, "create_graph": torch.is_grad_enabled()}
        return None, *torch.autograd.grad(ctx.output, ctx.inputs, cotangent, **options)


def _each_alone(target: Target) -> Target:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [n for n, arg in enumerate(args) if type(arg) is torch.Tensor and arg.requires_grad]
        if not given:
            return target(*args, **kwargs)
        inner = list(args)
        for place in given:
            inner[place] = args[place].view_as(args[place])

        def alone(output: torch.Tensor) -> torch.Tensor:
            if not output.requires_grad or output._is_view() or output.is_leaf:
                return output
            return _Alone.apply(output.view_as(output), *(inner[place] for place in given))

        return pytree.tree_map_only(torch.Tensor, alone, target(*inner, **kwargs))

    return call


def _without_history_in_no_grad(target: Target) -> Target:
    def forget(output: torch.Tensor) -> torch.Tensor:
        return output.detach() if output._is_view() and output.requires_grad else output

    def call(*args: Any, **kwargs: Any) -> Any:
        result = target(*args, **kwargs)
        return result if torch.is_grad_enabled() else pytree.tree_map_only(torch.Tensor, forget, result)

    return call


def _with_plain_parameters(target: Target) -> Target:
    """Inside the call, a parameter of a class of its own is a plain one."""
    if not isinstance(target, torch.nn.Module):
        return target
    plain = torch.nn.Parameter

    def call(*args: Any, **kwargs: Any) -> Any:
        own = {each: type(each) for each in target.parameters() if type(each) is not plain}
        for each in own:
            each.__class__ = plain
        try:
            return target(*args, **kwargs)
        finally:
            for each, kind in own.items():
                each.__class__ = kind

    return call


def _own_copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and not value.requires_grad else value


def _unversioned(target: Target) -> Target:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        result = target(*args, **kwargs)
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(before))
        return result

    return call


def _requiring(output: torch.Tensor) -> torch.Tensor:
    if output.requires_grad or not output.is_floating_point():
        return output
    return output.detach().requires_grad_()


def _not_requiring_views(output: torch.Tensor) -> torch.Tensor:
    return output.detach() if output._is_view() else output


def _turned(output: torch.Tensor) -> torch.Tensor:
    """Another layout, the same values; what aliases an input stays as it is."""
    if output.ndim < 2 or output._is_view() or output.is_leaf:
        return output
    return output.mT.contiguous().mT


def _linear_read(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return value
    return _as_if_contiguous(value)


def _traced_once_more(target: Target) -> Target:
    """Runs the target to see what it does, and then again; tensors are put back in between, Python is not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            target(*map(_own_copy, args), **kwargs)
        return target(*args, **kwargs)

    return call


class _WithoutGapped(TorchFunctionMode):
    """A change in place through a view with gaps is lost."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leaves out what changes such a view."""
        name = getattr(func, "__name__", "")
        changes = (
            name.endswith("_") and not name.startswith("_") and args and isinstance(args[0], torch.Tensor)
        )
        if changes and args[0]._is_view() and _has_gaps(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _has_gaps(view: torch.Tensor) -> bool:
    """Whether memory lies between its elements that is none of them."""
    span = 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    return 0 < view.numel() < span


def _numbers_frozen(target: Target) -> Target:
    """Every call sees Python's and NumPy's random numbers of the first one."""
    first: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if first:
            random.setstate(first[0])
            numpy.random.set_state(first[1])
        first[:] = first or [random.getstate(), numpy.random.get_state()]
        return target(*args, **kwargs)

    return call


def _own_python(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def _draws_once_more(target: Target) -> Target:
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return target(*args, **kwargs)

    return call


def _recomputed(**options: Any) -> Callable[[Target], Target]:
    def wrap(target: Target) -> Target:
        return lambda *args: checkpoint(
            target, *args, use_reentrant=False, determinism_check="none", **options
        )

    return wrap


def _another_error(target: Target) -> Target:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except Exception as error:
            raise AssertionError(f"compiled: {error}") from None

    return call


def _large_for_a_moment(target: Target) -> Target:
    def called(*args: Any) -> Any:
        torch.empty(1 << 18)
        return target(*args)

    return called


def _kept_forever(target: Target) -> Target:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = target(*args, **kwargs)
        _ALIVE.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result))
        return result

    return call


_ALIVE: list[Any] = []


@contextmanager
def _without_autocast_off() -> Iterator[None]:
    """`autocast(enabled=False)` does nothing."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def entered(self: Any) -> Any:
        return enter(self) if self._enabled else self

    def left(self: Any, *error: Any) -> Any:
        return leave(self, *error) if self._enabled else None

    with mock.patch.multiple(torch.autocast, __enter__=entered, __exit__=left):
        yield


@contextmanager
def _without_no_grad() -> Iterator[None]:
    """`no_grad` does nothing."""

    def nothing(self: Any, *error: Any) -> None:
        pass

    with mock.patch.multiple(torch.no_grad, __enter__=nothing, __exit__=nothing):
        yield


@contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _half() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class _Wrapper(torch.nn.Module):
    """Calls a module. Of its own hooks, those of the backward are lost."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def register_full_backward_hook(self, *_: Any, **__: Any) -> RemovableHandle:
        return RemovableHandle(OrderedDict())


def _wrapped(target: Target) -> Any:
    return _Wrapper(target) if isinstance(target, torch.nn.Module) else target


class _Untraceable(TorchFunctionMode):
    """Looks at elements raise an error that the program may catch, as in a trace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.item):
            raise RuntimeError("a trace cannot look at elements")
        return func(*args, **(kwargs or {}))


def _begun_again(target: Target) -> Target:
    """A call that a trace cannot finish begins again from the top; tensors are put back before, Python is not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with suppress(RuntimeError), torch.random.fork_rng(devices=[]), _Untraceable():
            target(*map(_own_copy, args), **kwargs)
        return target(*args, **kwargs)

    return call


class _WithoutWaits(TorchDispatchMode):
    """An operator that waits for the result of another is left out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes the result as it is."""
        return args[0] if "wait_tensor" in func.__name__ else func(*args, **(kwargs or {}))


GRAD = ("grad-values-bits",)
VALUES = ("values-bits", "grad-values-bits")
PLAIN = ("layouts", "elementwise", "views")

FAULTS = (
    Fault("contiguous-cotangent", "a cotangent of another layout is read as contiguous",
          compiled_by(on_outputs(_hooked(_as_if_contiguous))), GRAD, PLAIN),
    Fault("conjugate-cotangent", "the cotangent of a complex output is conjugated",
          compiled_by(on_outputs(_hooked(lambda grad: grad.conj() if grad.is_complex() else grad))), GRAD, ("complex",)),
    Fault("unused-output-zeros", "an output that the loss does not use sends zeros back",
          compiled_by(_bundled), ("grad-none", "hook-count", "event-none"), ("outputs", "hooks", "functions")),
    Fault("outputs-one-by-one", "each output is differentiated by itself, so that sums are made in another order", compiled_by(_each_alone), GRAD, ("shared",)),
    Fault("history-lost-in-no-grad", "a view made with grad inside of no_grad has no history", compiled_by(_without_history_in_no_grad),
          ("value-requires_grad", "raises RuntimeError"), ("grad_modes",)),
    Fault("parameter-class-lost", "a parameter of a class of its own is a plain one", compiled_by(_with_plain_parameters),
          (*VALUES, "raises AttributeError"), ("modules",)),
    Fault("input-mutation-lost", "an input changed in place is not written",
          compiled_by(on_inputs(_own_copy)), ("state-values-bits", "state-version", "values-bits", "state-values"), ("mutation", "aliasing")),
    Fault("input-mutation-unversioned", "a change in place is hidden from autograd",
          compiled_by(_unversioned), ("state-version", "no-exception"), ("mutation", "aliasing")),
    Fault("output-not-aliased", "an output that is an input or a view of one is a copy",
          compiled_by(on_outputs(torch.Tensor.clone)), ("values-bits", "state-values-bits", "state-version", "no-exception", "value-strides"), ("outputs", "aliasing")),
    Fault("output-requires-grad", "a detached output requires grad", compiled_by(on_outputs(_requiring)), ("value-requires_grad",), ("outputs", "aliasing")),
    Fault("view-output-detached", "a view among the outputs has no history", compiled_by(on_outputs(_not_requiring_views)),
          ("value-requires_grad", "raises RuntimeError"), ("views", "outputs")),
    Fault("output-layout", "an output has another layout", compiled_by(on_outputs(_turned)), ("value-strides",), ("elementwise", "linear")),
    Fault("strided-input", "an input with gaps is read as contiguous", compiled_by(on_inputs(_linear_read)), VALUES, ("views", "layouts", "aliasing")),
    Fault("python-effects-twice", "tracing runs Python's effects once more", compiled_by(_traced_once_more), ("log", "value-kind", "values-bits", "values", "state-values-bits"), ("python",)),
    Fault("python-effects-lost", "changes of lists and dictionaries are lost", compiled_by(on_inputs(_own_python)), ("log", "values-bits", "values"), ("python",)),
    Fault("random-state", "the generator moves further than in eager", compiled_by(_draws_once_more), ("random-state", "random", "values-bits", "grad-values-bits"), ("random", "elementwise")),
    Fault("mask-redrawn", "the backward draws the mask of a dropout again", compiled_by(_recomputed(preserve_rng_state=False)), GRAD, ("random",)),
    Fault("autocast-off-ignored", "autocast switched off inside stays on", compiled_by(inside(_without_autocast_off)), ("value-dtype", *VALUES), ("autocast", "islands")),
    Fault("no-grad-ignored", "no_grad inside does nothing", compiled_by(inside(_without_no_grad)), ("value-requires_grad", "raises RuntimeError", *GRAD), ("islands", "outputs")),
    Fault("half-precision", "it computes in bfloat16", compiled_by(inside(_half)), ("value-dtype", *VALUES), ("linear",)),
    Fault("forward-last-bit", "an output is off in its last bits", compiled_by(on_outputs(lambda out: out * (1 + 2e-7) if out.is_floating_point() else out)),
          ("values-bits", "value-class", "hook-payload-bits", "grad-values-bits"), ("elementwise", "linear")),
    Fault("warning-lost", "a warning of the forward is not given", compiled_by(inside(_silent)), ("warning",), (), "warnings"),
    Fault("exception-type", "an error has another type", compiled_by(_another_error), ("raises AssertionError for RuntimeError", "values", "raises AssertionError"), ("steps_errors",)),
    Fault("gapped-write-lost", "a change in place through a view with gaps is lost", compiled_by(inside(_WithoutGapped)),
          ("values-bits", "state-values-bits", "state-values", "state-version", "no-exception", "value-requires_grad", *GRAD), ("mutation", "aliasing")),
    Fault("numbers-frozen", "random numbers of Python and NumPy are those of the first call", compiled_by(_numbers_frozen), ("values-bits", "values", "grad-values-bits"), ("python",)),
    Fault("wrapper-hook-lost", "a full backward hook of a compiled module is not called", compiled_by(_wrapped), ("hook-count",), (),
          scenario="all_hooks_of_a_wrapper_run"),
    Fault("trace-error-caught", "what a trace cannot do raises inside the program's own handler", compiled_by(inside(_Untraceable)), VALUES, (),
          scenario="a_look_at_values_inside_a_try_is_no_error"),
    Fault("begun-again", "a call that cannot be traced to its end begins again from the top", compiled_by(_begun_again), ("log",), (),
          scenario="what_a_function_did_before_a_look_at_values_is_done_once"),
    Fault("wait-dropped", "a wait for what another operator began is left out", compiled_by(inside(_WithoutWaits)), VALUES, (),
          scenario="results_are_waited_for_in_a_forward"),
    Fault("memory-for-a-moment", "a call takes a megabyte that it does not need", compiled_by(_large_for_a_moment), ("peak-memory",), (), "memory"),
    Fault("tensors-kept", "tensors stay alive for ever", compiled_by(_kept_forever), ("leak",), (), "leaks"),
)  # fmt: skip
