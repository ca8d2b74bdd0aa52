"""Intercept a traced function's calls of torch: check each call, trace it and record it.

In: the function's calls of torch, and its `FirstRun`. Out: traced results; after the first call that cannot
be traced, real ones. Or an error that handlers in user code do not catch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.functional import multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from retrograd.errors import Refusal, not_representable
from retrograd.graph.operator_effects import around_collecting, collecting_refused
from retrograd.runtime import pytree
from retrograd.runtime.subclass import is_wrapper
from retrograd.trace.closure_tensors import ClosureTensors
from retrograd.trace.first_run import SYMBOLIC, Abandoned, FirstRun

#: Attributes of input tensors that no guard compares, and that a trace's own tensors do not have.
_STATE = ("grad", "grad_fn", "is_leaf", "_base", "_version", "retains_grad", "_backward_hooks", "_grad")
_UNGUARDED = {getattr(torch.Tensor, name).__get__: name for name in _STATE}
#: Functions, by name, that return a text of the elements or a handle of the storage.
_LOOKS = {"__repr__", "__str__", "__format__", "untyped_storage", "storage", "_typed_storage"}


class Watched(ClosureTensors):
    """While open, each call of torch is traced, as in `ClosureTensors`.

    A call that cannot be traced runs eagerly, as does every later one.

    Args:
        lift, is_exact: as in `ClosureTensors`.
        first: the run of the function's Python; None if an error of the trace abandons the run.

    Attributes:
        stopped: the first error that stopped tracing; None while tracing works.
    """

    stopped: Exception | None

    def __init__(
        self, lift: Callable[[torch.Tensor], torch.Tensor], first: FirstRun | None, is_exact: bool
    ) -> None:
        super().__init__(lift, is_exact)
        self._first, self.stopped = first, None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = self._first
        if first is not None and first.is_computing:
            return func(*args, **(kwargs or {}))
        if first is not None and first.is_eager:
            return first.call(func, args, kwargs or {})
        try:
            _refuse_layouts(func, pytree.tree_leaves((args, kwargs)))
            if first is not None:
                _refuse_looks(first, func, args)
            _refuse_slow_path(first, func, args, kwargs or {})
            result = super().__torch_function__(func, types, args, kwargs)
            _refuse_layouts(None, pytree.tree_leaves(result))
            if first is not None:
                _refuse_unknown_sizes(result)
        except Exception as error:
            self.stop(error)
            assert first is not None
            return first.call(func, args, kwargs or {})
        if first is not None:
            first.record(func, args, kwargs or {}, result)
        return result

    def stop(self, error: Exception) -> None:
        """Stop tracing.

        Raises:
            Abandoned: the run cannot continue eagerly either.
        """
        self.stopped = self.stopped or error
        if self._first is None:
            raise Abandoned(error) from error
        self._first.go_on_eagerly(error)

    def given_to_function(self, original: Callable[[Any], Any], args: Sequence[Any]) -> Any:
        """As in `ClosureTensors`."""
        first = self._first
        if first is not None and first.hides("it calls a custom autograd.Function"):
            return original(tuple(map(first.real, args)))
        return super().given_to_function(original, args)

    def collecting(self, original: Callable[..., Any], *args: Any) -> Any:
        """As in `ClosureTensors`."""
        if self._first is None or not self._first.is_eager:
            self.stop(collecting_refused())
        return original(*args)


class _Abandoning(TorchFunctionMode):
    error: Exception | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, SYMBOLIC):
                _refuse_unknown_sizes(result)
            return result
        except Exception as error:
            self.stop(error)

    def stop(self, error: Exception) -> NoReturn:
        self.error = self.error or error
        raise Abandoned(error) from error


@contextmanager
def errors_uncaught() -> Iterator[None]:
    """Run user code in a trace, such as the backward of a custom ``autograd.Function``.

    Its handlers do not see errors of the trace. If user code swallows one nevertheless, for example by
    returning from a ``finally``, we raise it at the end.

    Raises:
        Exception: the error of the trace.
    """
    watching = _Abandoning()
    try:
        with watching, around_collecting(lambda *_: watching.stop(collecting_refused())):
            yield
    except Abandoned as abandoned:
        raise abandoned.error from abandoned.error.__cause__
    if watching.error is not None:
        raise watching.error


def _refuse_looks(first: FirstRun, func: Any, args: Sequence[Any]) -> None:
    """Refuse a call whose result depends on more than a trace knows or a guard compares.

    Raises:
        Refusal: this is such a call.
    """
    name = getattr(func, "__name__", "")
    if name in _LOOKS:
        raise not_representable(f"it looks at the elements or the memory of a tensor ({name})")
    if name != "__get__" or (attribute := _UNGUARDED.get(func)) is None:
        return
    given = first.given(args[0])
    if given is None:
        is_refused = attribute in ("grad_fn", "_version")
    elif attribute == "is_leaf":
        is_refused = not given.is_leaf
    else:
        is_refused = attribute in ("grad", "_grad", "_version") or func(given) is not None
    if is_refused:
        raise not_representable(f"it reads {attribute} of a tensor")


def _refuse_slow_path(first: FirstRun | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse attention in a module of torch that would take another path in eager: its *fast path* serves
    inference only, sets padding to zero, and is not taken while a trace follows the calls.

    Raises:
        Refusal: the module may take it.
    """
    if func is not multi_head_attention_forward or kwargs.get("training", True):
        return
    given = (*args, *kwargs.values())
    is_differentiated = any(isinstance(one, torch.Tensor) and one.requires_grad for one in given)
    if torch.backends.mha.get_fastpath_enabled() and not (torch.is_grad_enabled() and is_differentiated):
        text = "it calls an attention module that has a fast path for inference, which "
        text += "torch.backends.mha.set_fastpath_enabled(False) turns off"
        if first is not None:
            first.hides(text)  # the module has chosen its path already
        raise not_representable(text)


#: Functions, by name, that make a non-strided tensor. Some abort the process if they receive a traced tensor.
_UNSTRIDED = re.compile(r"_?sparse_|to_(sparse|mkldnn)|quantize_per_|_make_per_.*quant")
_STRIDED = (torch.strided, torch.jagged)


def _refuse_layouts(func: Any, leaves: Sequence[Any]) -> None:
    """Refuse sparse, nested and quantized tensors: fakes of them have no gradients.

    Raises:
        Refusal: `func` makes such a tensor, judging by its name, or one is among `leaves`.
    """
    name = "" if func is None else getattr(func, "__name__", "")
    if _UNSTRIDED.match(name) and name != "sparse_dim":
        raise Refusal("layout", f"it calls {name}: a graph has strided tensors only")
    for leaf in leaves:
        is_other = isinstance(leaf, torch.layout) and leaf not in _STRIDED
        if isinstance(leaf, torch.Tensor) and not is_wrapper(leaf):
            is_other = leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested
        if is_other:
            raise Refusal("layout", "it computes with a tensor that is sparse, nested, quantized or opaque")


def _refuse_unknown_sizes(result: Any) -> None:
    """Refuse a data-dependent number, because the function may branch on it unseen.

    Raises:
        Refusal: `result` is or contains such a number.
    """
    for leaf in pytree.tree_leaves(result):
        number = leaf.shape if isinstance(leaf, torch.Tensor) and leaf._has_symbolic_sizes_strides else leaf
        if isinstance(number, (*SYMBOLIC, torch.Size)) and free_unbacked_symbols(number):
            raise Refusal("data-dependent", "it reads a number or a shape that depends on elements")
