"""The object that the engine talks to when it meets a new structure, for torch 2.11 to 2.13.

In: the engine's calls, whose forms differ by release, with placeholder tensors of ours for everything
lifted. Out: the same calls in one form to a `Recorder`, with the recorder's own values.

The engine never computes with a placeholder; it only passes it on, so an empty CPU tensor per value is
enough: no fake tensors, no proxies. Source: ``torch/csrc/dynamo/python_compiled_autograd.cpp`` and the
Python side of each release in ``torch/_dynamo/compiled_autograd.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._dynamo import compiled_autograd as stock
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from retrograd._torch.collect import runtime_wrapper
from retrograd.graph.hook_kind import HookKind

__all__ = ["EngineProtocol", "Recorder", "Value"]

Value = Any  # a value of the recorder (an FX node); None is an undefined gradient


class Recorder(Protocol):
    """What the protocol tells. Lists of values are gradients; None in them is an undefined gradient."""

    def begin(self, inputs: int, sizes: int, scalars: int) -> tuple[list[Value], list[Value], list[Value]]: ...
    def enter_node(self, index: int, name: str, is_function: bool) -> None: ...
    def node(self, name: str, fn: Callable[..., Any], grads: list[Value], args: Any, wanted: list[bool]) -> list[Value]: ...
    def cpp_function(self, name: str, fn: Callable[..., Any], grads: list[Value], args: Any, wanted: list[bool]) -> list[Value]: ...
    def validate(self, fn: Callable[..., Any], outputs: list[Value], args: Any) -> list[Value]: ...
    def copy_slices_prologue(self, grads: list[Value], base: Any, view: Any) -> list[Value]: ...
    def copy_slices_epilogue(self, needs: list[bool], result: Value, grads: list[Value], slice_: Value) -> list[Value]: ...
    def function(self, context: int, grads: list[Value], saved: list[Value], wanted: list[bool], materializes: bool | None) -> list[Value]: ...
    def add(self, old: Value, new: Value) -> Value: ...
    def accumulate(self, variable: Value, grad: Value, has_post_hooks: bool) -> Value: ...
    def tensor_hook(self, kind: HookKind, grads: list[Value], hook: int, slot: int) -> list[Value]: ...
    def node_pre_hook(self, grads: list[Value], hook: int) -> list[Value]: ...
    def node_post_hook(self, outputs: list[Value], grads: list[Value], hook: int) -> list[Value]: ...
    def post_accumulate_hook(self, variable: Value, hook: int) -> None: ...
    def unpack(self, hook: int, packed: int) -> Value: ...
    def finish(self, outputs: list[Value]) -> Any: ...


class EngineProtocol:
    """One capture, as the engine sees it.

    Args:
        recorder: is told everything; the artifact it returns from ``finish`` goes into the engine's cache.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._values: dict[int, Value] = {}
        self._kept: list[torch.Tensor] = []
        self._symbols: dict[Any, Value] = {}

    # values and placeholders

    def _stand_in(self, value: Value) -> torch.Tensor | None:
        if value is None:
            return None
        tensor = torch.empty(0, device="cpu")
        self._values[id(tensor)] = value
        self._kept.append(tensor)
        return tensor

    def _stand_ins(self, values: Sequence[Value]) -> list[torch.Tensor | None]:
        return [self._stand_in(value) for value in values]

    def _read(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            try:
                return self._values[id(argument)]
            except KeyError:
                raise LookupError("the engine passed a tensor that it had not lifted") from None
        if isinstance(argument, (torch.SymInt, torch.SymFloat)):
            try:
                return self._symbols[argument.node.expr]
            except KeyError:
                raise LookupError(f"the engine computed with a lifted size: {argument}") from None
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(self._read, argument)) if type(argument) in (list, tuple) else argument
        return argument

    def _read_list(self, arguments: Sequence[Any]) -> list[Value]:
        return [self._read(argument) for argument in arguments]

    # the engine's calls, in the order of their first appearance in a capture

    def begin_capture(
        self, inputs: list[torch.Tensor], sizes: Sequence[int], scalars: list[Any], origins: Any, *_: Any
    ) -> tuple[str, list[Any], list[Any], list[Any]]:
        values = self._recorder.begin(len(inputs), len(sizes), len(scalars))
        symbols = _Symbols() if sizes or scalars else None
        fake_sizes = [symbols.integer(size) for size in sizes] if symbols else []
        fake_scalars = [symbols.number(scalar) for scalar in scalars] if symbols else []
        for fake, value in zip([*fake_sizes, *fake_scalars], [*values[1], *values[2]], strict=True):
            self._symbols[fake.node.expr] = value
        return "0", self._stand_ins(values[0]), fake_sizes, fake_scalars

    def set_node_origin(self, name: str, index: int, function: Any) -> None:
        self._recorder.enter_node(index, name, function is not None)

    def bind_function(
        self, name: str, fn: Callable[..., Any], is_custom_function: bool, is_traceable: bool
    ) -> str:
        # Bound once per process by a static in C++: the registry must be the one that stock uses too.
        bound = stock.ops.add(name, fn, is_custom_function, is_traceable)
        if is_custom_function:
            _cpp_functions.add(bound)
        return bound

    def apply_functional(self, name: str, grads: list[Any], args: Any, metadata: Sequence[Any]) -> list[Any]:
        wanted = [entry is not None for entry in metadata]
        record = self._recorder.cpp_function if name in _cpp_functions else self._recorder.node
        values = record(name, _bound(name), self._read_list(grads), self._read(tuple(args)), wanted)
        return self._stand_ins(values)

    def validate_outputs(self, _: Any, outputs: list[Any], args: Any, metadata: Any) -> list[Any]:
        values = self._read_list(outputs)
        if all(value is None for value in values):
            return outputs
        fn = _bound("validate_outputs")
        return self._stand_ins(self._recorder.validate(fn, values, self._read(tuple(args))))

    def call_copy_slices_prologue(self, inputs: Any, *geometry: Any) -> list[Any]:
        base, view = self._read(tuple(geometry[:3])), self._read(tuple(geometry[3:]))
        return self._stand_ins(self._recorder.copy_slices_prologue(self._read_list(inputs), base, view))

    def call_copy_slices_epilogue(self, needs: Any, result: Any, grads: Any, grad_slice: Any) -> list[Any]:
        values = self._recorder.copy_slices_epilogue(
            list(needs), self._read(result), self._read_list(grads), self._read(grad_slice)
        )
        return self._stand_ins(values)

    def proxy_call_backward(
        self, grads: Any, metadata: Any, saved: Any, context: int, ctx: Any, state: int | None, *_: Any
    ) -> tuple[Any, ...]:
        wanted = [entry is not None for entry in metadata]
        # An undefined gradient arrives as None, or as zeros of the engine's own making if the Function wants them.
        zeros = [isinstance(grad, torch.Tensor) and id(grad) not in self._values for grad in grads]
        values = [None if made else self._read(grad) for made, grad in zip(zeros, grads, strict=True)]
        materializes = any(zeros) if None in values else None
        results = self._recorder.function(context, values, self._read_list(saved), wanted, materializes)
        return tuple(self._stand_ins(results))

    def accumulate(self, old: Any, new: Any) -> torch.Tensor | None:
        return self._stand_in(self._recorder.add(self._read(old), self._read(new)))

    def accumulate_grad(self, variable: Any, *rest: Any) -> torch.Tensor | None:
        # 2.11 and 2.12: (grad, has_post_hooks), returns nothing; 2.13: (old .grad, grad, has_post_hooks).
        *old, grad, has_post_hooks = rest
        value = self._recorder.accumulate(self._read(variable), self._read(grad), bool(has_post_hooks))
        return self._stand_in(value) if old else None

    def tensor_pre_hook(self, grads: list[Any], hook: int, slot: int) -> list[Any]:
        return self._tensor_hook(HookKind.TENSOR_PRE, grads, hook, slot)

    def cpp_tensor_pre_hook(self, grads: list[Any], hook: int, slot: int) -> list[Any]:
        return self._tensor_hook(HookKind.RETAIN_GRAD, grads, hook, slot)

    def _tensor_hook(self, kind: HookKind, grads: list[Any], hook: int, slot: int) -> list[Any]:
        values = self._recorder.tensor_hook(kind, self._read_list(grads), hook, slot)
        return [self._stand_in(value) if i == slot else grads[i] for i, value in enumerate(values)]

    def pre_hook(self, grads: Any, hook: int) -> list[Any]:
        return self._stand_ins(self._recorder.node_pre_hook(self._read_list(grads), hook))

    def post_hook(self, outputs: Any, grads: Any, hook: int) -> list[Any]:
        values = self._recorder.node_post_hook(self._read_list(outputs), self._read_list(grads), hook)
        return self._stand_ins(values)

    def post_acc_grad_hook(self, variable: Any, hook: int) -> list[Any]:
        self._recorder.post_accumulate_hook(self._read(variable), hook)
        return [variable]

    def unpack_hook(self, hook: int, packed: int) -> torch.Tensor | None:
        return self._stand_in(self._recorder.unpack(hook, packed))

    def bind_backward_state(self, index: int) -> Any:
        raise NotImplementedError("BackwardState of a forward compiled with compiled autograd's hooks")

    def log_compile_reasons(self, reasons: list[str]) -> None:
        """Verbose logging of stock; ours says why in its own words."""

    def end_capture(self, outputs: Any) -> tuple[Callable[..., Any], Any]:
        artifact = self._recorder.finish(self._read_list(outputs))
        return runtime_wrapper, artifact

    def close(self) -> None:
        self._kept.clear()
        self._values.clear()


class _Symbols:
    """Symbolic numbers that the engine may pass on in place of lifted sizes and scalars."""

    def __init__(self) -> None:
        self._env = ShapeEnv(specialize_zero_one=False, duck_shape=False)

    def integer(self, _: int) -> torch.SymInt:
        return self._env.create_unbacked_symint()

    def number(self, value: float) -> torch.SymInt | torch.SymFloat:
        return self.integer(value) if isinstance(value, int) else self._env.create_unbacked_symfloat()


#: names under which C++ autograd functions were bound.
_cpp_functions: set[str] = set()


def _bound(name: str) -> Callable[..., Any]:
    """The functional form of a node, as C++ gave it, without Dynamo's wrapping."""
    op = stock.ops.get(name)
    return getattr(op, "fn", op)


