"""The compiler object that the engine calls while it walks a new structure.

In: the engine's calls, whose signatures differ by release, with our placeholder tensors for all lifted
values. Out: the same calls in one form to a recorder, with the recorder's values.

The engine never computes with a placeholder but only passes it on, so one empty CPU tensor per value is
enough: no fake tensors, no proxies. Source: ``torch/csrc/dynamo/python_compiled_autograd.cpp`` and the
Python side of each release in ``torch/_dynamo/compiled_autograd.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import compiled_autograd as stock
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from retrograd.engine.collection import runtime_wrapper
from retrograd.engine.leaf_order import OrderedLeaves, is_a
from retrograd.engine.stock_aot import is_aot_node, read_aot_backward
from retrograd.errors import Refusal
from retrograd.facts.releases import accumulated
from retrograd.graph.backward_graph import AotCall, HookKind
from retrograd.runtime.tensor import zeros_of_slot

Value = Any  # a value of the recorder (an FX node); None means an undefined gradient


class EngineProtocol:
    """One capture, as the engine sees it.

    A failing call must not raise at once: inside a node, the engine has swapped the node's saved tensors for
    our placeholders, and an exception would leave them there. So we store the exception, return placeholders
    with which the engine can continue, and raise before the next node, where nothing is swapped.

    Args:
        recorder: receives all calls (see ``live.capture.recorder``); lists of values are gradients. The
            artifact that its ``finish`` returns goes into the engine's cache.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._values: dict[int, Value] = {}
        self._kept: list[torch.Tensor] = []
        self._symbols: dict[Any, Value] = {}
        self._failure: Exception | None = None
        self._modes = contextlib.ExitStack()

    # values and placeholders

    def _stand_in(self, value: Value) -> torch.Tensor | None:
        if value is None:
            return None
        if self._symbols:
            with unset_fake_temporarily():
                tensor = _EMPTY.detach()
        else:
            tensor = _EMPTY.detach()
        self._values[id(tensor)] = value
        self._kept.append(tensor)
        return tensor

    def _answer(self, wanted: Sequence[Any], record: Callable[..., Sequence[Value]], *args: Any) -> list[Any]:
        """Placeholders for the results of `record`, called with the values behind `args`. After a failure,
        meaningless placeholders wherever `wanted` is true."""
        if self._failure is None:
            try:
                return [self._stand_in(value) for value in record(*map(self._read, args))]
            except Exception as error:
                self._failure = error
        return [self._stand_in(_NOTHING) if want else None for want in wanted]

    def _answer_one(self, record: Callable[..., Value], *args: Any) -> torch.Tensor | None:
        """`_answer` for a single result."""
        stand_in: torch.Tensor | None = self._answer((True,), lambda *read: [record(*read)], *args)[0]
        return stand_in

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _read(self, argument: Any) -> Any:
        kind = type(argument)
        if kind in _PLAIN:
            return argument
        if kind is list or kind is tuple:
            return kind(map(self._read, argument))
        if isinstance(argument, torch.Tensor):
            try:
                return self._values[id(argument)]
            except KeyError:
                raise LookupError("the engine passed a tensor that it had not lifted") from None
        if isinstance(argument, (torch.SymInt, torch.SymFloat)):
            try:
                return self._symbols[_symbol(argument)]
            except KeyError:
                raise LookupError(f"the engine computed with a lifted size: {argument}") from None
        return argument

    # the engine's calls, in the order of their first appearance in a capture

    def begin_capture(
        self, inputs: list[torch.Tensor], sizes: Sequence[int], scalars: list[Any], origins: Any, *_: Any
    ) -> tuple[str, list[Any], list[Any], list[Any]]:
        values = self._recorder.begin(len(inputs), len(sizes), len(scalars))
        if not sizes and not scalars:
            return "0", [self._stand_in(value) for value in values[0]], [], []
        numbers, env = _symbolic([*sizes, *scalars])
        for number, value in zip(numbers, [*values[1], *values[2]], strict=True):
            self._symbols[_symbol(number)] = value
        # The engine makes zeros of a symbolic size for an undefined gradient of a custom Function.
        self._modes.enter_context(FakeTensorMode(shape_env=env, allow_non_fake_inputs=True))
        stand_ins = [self._stand_in(value) for value in values[0]]
        return "0", stand_ins, numbers[: len(sizes)], numbers[len(sizes) :]

    def set_node_origin(self, name: str, index: int, function: Any) -> None:
        self._raise_failure()
        self._recorder.enter_node(index, name)

    def bind_function(
        self, name: str, fn: Callable[..., Any], is_custom_function: bool, is_traceable: bool
    ) -> str:
        # C++ binds it once per process (a static), so we must share the registry with stock.
        bound = stock.ops.add(name, fn, is_custom_function, is_traceable)
        # A traceable one promises that all its state is in saved tensors and that it has no side effects.
        if is_custom_function and not is_traceable:
            _cpp_functions.add(bound)
        return bound

    def apply_functional(self, name: str, grads: list[Any], args: Any, metadata: Sequence[Any]) -> list[Any]:
        wanted = [entry is not None for entry in metadata]
        is_cpp = name in _cpp_functions
        return self._answer(
            wanted, self._recorder.node, name, _bound(name), list(grads), tuple(args), wanted, is_cpp
        )

    def validate_outputs(self, _: Any, outputs: list[Any], args: Any, metadata: Any) -> list[Any]:
        wanted = [output is not None for output in outputs]
        if not any(wanted):
            return outputs
        fn = _bound("validate_outputs")
        return self._answer(wanted, self._recorder.validate, fn, list(outputs), tuple(args))

    def call_copy_slices_prologue(self, inputs: Any, *geometry: Any) -> list[Any]:
        record = self._recorder.copy_slices_prologue
        return self._answer(
            (True, True, True), record, list(inputs), tuple(geometry[:3]), tuple(geometry[3:])
        )

    def call_copy_slices_epilogue(self, needs: Any, result: Any, grads: Any, grad_slice: Any) -> list[Any]:
        record = self._recorder.copy_slices_epilogue
        return self._answer(needs, record, list(needs), result, list(grads), grad_slice)

    def proxy_call_backward(
        self,
        grads: Any,
        metadata: Any,
        saved: Any,
        context: int,
        ctx: Any,
        _state: int | None,
        objects: Sequence[int] = (),
    ) -> tuple[Any, ...]:
        wanted = [entry is not None for entry in metadata]

        def recorded() -> list[Value]:
            # An undefined gradient arrives as None; if the Function materializes gradients, it arrives as
            # zeros that the engine made.
            made = [isinstance(grad, torch.Tensor) and id(grad) not in self._values for grad in grads]
            values = [None if zero else self._read(grad) for zero, grad in zip(made, grads, strict=True)]
            zeros = tuple(map(self._read_zeros, grads, values))
            read = self._read(list(saved))
            note = "backward of a compiled forward" if is_a(ctx, OrderedLeaves) else ""
            if is_aot_node(ctx):
                sizes = self._read(list(ctx._get_compiled_autograd_symints()))
                make_zeros = None if self._symbols else functools.partial(zeros_of_slot, ctx)
                call = AotCall(context, values, sizes, read, objects, wanted, make_zeros)
                try:
                    return self._recorder.aot_backward(read_aot_backward(ctx), call)
                except Refusal as reason:
                    note = f"AOT backward as one call: {reason}"
            return self._recorder.function(context, values, read, wanted, zeros, note)

        return tuple(self._answer(wanted, recorded))

    def _read_zeros(self, grad: Any, value: Value) -> Value:
        """For a gradient that is always undefined: the metadata of the zeros that the engine made, or () if
        it made none. None for a gradient that a node produces."""
        if value is not None:
            return None
        if grad is None:
            return ()
        return self._read(tuple(grad.shape)), grad.dtype, grad.device, grad.layout

    def accumulate(self, old: Any, new: Any) -> torch.Tensor | None:
        return self._answer_one(self._recorder.add, old, new)

    def accumulate_grad(self, variable: Any, *rest: Any) -> torch.Tensor | None:
        grad, has_post_hooks, is_answered = accumulated(rest)
        result = self._answer_one(self._recorder.accumulate, variable, grad, has_post_hooks)
        return result if is_answered else None

    def tensor_pre_hook(self, grads: list[Any], hook: int, slot: int) -> list[Any]:
        return self._tensor_hook(HookKind.TENSOR_PRE, grads, hook, slot)

    def cpp_tensor_pre_hook(self, grads: list[Any], hook: int, slot: int) -> list[Any]:
        return self._tensor_hook(HookKind.RETAIN_GRAD, grads, hook, slot)

    def _tensor_hook(self, kind: HookKind, grads: list[Any], hook: int, slot: int) -> list[Any]:
        changed = self._answer_one(self._recorder.tensor_hook, kind, grads[slot], slot, hook)
        return [changed if i == slot else grad for i, grad in enumerate(grads)]

    def pre_hook(self, grads: Any, hook: int) -> list[Any]:
        return self._answer(grads, self._recorder.node_pre_hook, list(grads), hook)

    def post_hook(self, outputs: Any, grads: Any, hook: int) -> list[Any]:
        record = self._recorder.node_post_hook
        return self._answer([True] * len(outputs), record, list(outputs), list(grads), hook)

    def post_acc_grad_hook(self, variable: Any, hook: int) -> list[Any]:
        self._answer_one(self._recorder.post_accumulate_hook, variable, hook)
        return [variable]

    def unpack_hook(self, hook: int, packed: int) -> torch.Tensor | None:
        return self._answer_one(self._recorder.unpack, hook, packed)

    def bind_backward_state(self, index: int) -> Any:
        self._failure = NotImplementedError("BackwardState of a forward compiled under compiled autograd")
        return BackwardState()

    def log_compile_reasons(self, reasons: list[str]) -> None:
        """Ignored: verbose logging of stock. We report reasons ourselves."""

    def end_capture(self, outputs: Any) -> tuple[Callable[..., Any], Any]:
        self._modes.close()
        self._raise_failure()
        return runtime_wrapper, self._recorder.finish(self._read(list(outputs)))

    def close(self) -> None:
        """Exit the modes that the capture entered. Both the engine and `collect` call this."""
        self._modes.close()


#: Types that `_read` returns unchanged. It checks these first, since most arguments have them.
_PLAIN = frozenset({int, bool, float, type(None)})

#: We make all placeholders from this one: the engine only distinguishes them.
_EMPTY = torch.empty(0, device="cpu")

#: The value of a placeholder that we make after a failure.
_NOTHING = object()


def _symbol(number: Any) -> Any:
    """The symbol behind a symbolic number."""
    return number.node.expr


def _symbolic(numbers: Sequence[Any]) -> tuple[list[Any], ShapeEnv]:
    """Symbolic numbers that the engine passes on in place of lifted sizes and scalars.

    They have hints: a few C++ checks compare sizes while the engine walks, and need an answer. We ignore the
    guards that such checks create, since segments are guarded when they are lowered.
    """
    env, made = ShapeEnv(specialize_zero_one=False, duck_shape=False), list[Any]()
    for i, number in enumerate(numbers):
        source = LocalSource(f"lifted_{i}")
        if isinstance(number, int):
            made.append(env.create_unspecified_symint_and_symbol(number, source, DimDynamic.DYNAMIC))
        else:
            symbol = env.create_unspecified_symbol(number, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            made.append(env.create_symfloatnode(symbol, hint=number, source=source))
    return made, env


#: The names of bound C++ autograd functions that are not traceable.
_cpp_functions: set[str] = set()


def _bound(name: str) -> Callable[..., Any]:
    """The functional form of a node as C++ passed it, without Dynamo's wrapper."""
    op = stock.ops.get(name)
    return getattr(op, "fn", op)
