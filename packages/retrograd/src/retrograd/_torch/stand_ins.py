"""Real tensors, each with a traced stand-in, while a user's function runs on the stand-ins.

In: a trace in which a training step runs. Out: whatever torch is called with a real tensor is called with its
stand-in, made (as a new input of the graph) at the first use; where torch gives the stand-in back, the user's
code gets its real tensor. So dictionaries by tensor, ``is`` and attributes work as they do eagerly. Hooks of
real leaves hang from their stand-ins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch._functorch.utils as functorch_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from retrograd._torch import pytree
from retrograd._torch.engine import EngineRequest, Gateway, run_stock
from retrograd._torch.fakes import fake_of, why_not_fakeable
from retrograd._torch.functional import is_traced, storage_key, to_functional
from retrograd._torch.joint_tracing import JointTracer
from retrograd._torch.leaf_hooks import hooks_of, node_hooks
from retrograd._torch.operators import real_tensors, same_layout
from retrograd._torch.subclasses import is_wrapper
from retrograd._torch.trace_surroundings import eager_optimizers, one_thread, replaced_by

__all__ = ["StandIn", "StandIns", "StepRefusedError"]

#: by name: what changes a tensor in a way that no graph holds.
_CHANGES = {"set_", "resize_", "resize_as_", "resize_as_sparse_", "detach_", "share_memory_"}
_DATA_WRITTEN = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SWITCHED = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_REQUIRES_GRAD = {torch.Tensor.requires_grad_, _SWITCHED}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
#: what a stand-in would answer otherwise than its tensor.
_VALUES = {"tolist", "numpy", "__array__", "__repr__", "__format__", "__str__"}
_MEMORY = {"data_ptr", "untyped_storage", "storage", "_typed_storage", "__deepcopy__", "__reduce_ex__"}
_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})
_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class StepRefusedError(Exception):
    """The step does what a graph cannot hold: a code, and a sentence that begins with what it does."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class StandIn:
    """A real tensor in a trace.

    Attributes:
        real, fake, made: the tensor, the value of its placeholder, and what torch is called with.
        grad: its ``.grad`` when the trace began.
    """

    real: torch.Tensor
    fake: Any
    made: Any
    grad: torch.Tensor | None = None


class Watcher(Protocol):
    """Somebody who looks at what Python does."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def looking(self) -> AbstractContextManager[None]: ...


class StandIns(TorchFunctionMode):
    """While open, torch sees stand-ins.

    Args:
        tracer: makes the placeholders. fake_mode: of the trace.
        symbolic: by id of a tensor, which of its dimensions are symbolic.
        watcher: looks at the user's Python; told when torch's runs.

    Attributes:
        found: the stand-ins, in the order of the graph's placeholders.
        spent: outputs whose graphs a backward has used up.
    """

    def __init__(
        self,
        tracer: JointTracer,
        fake_mode: FakeTensorMode,
        symbolic: dict[int, frozenset[int]],
        watcher: Watcher,
    ) -> None:
        super().__init__()
        self._watcher = watcher
        self._tracer, self._fake_mode, self._symbolic = tracer, fake_mode, symbolic
        self._thread, self._inside, self._below = threading.get_ident(), 0, 0
        self.found: list[StandIn] = []
        self._by_real: dict[int, StandIn] = {}
        self._by_made: dict[int, StandIn] = {}
        self.spent: list[Any] = []

    def of(self, real: torch.Tensor) -> StandIn:
        """The stand-in of a real tensor.

        Raises:
            StepRefusedError: it cannot have one.
        """
        known = self._by_real.get(id(real))
        if known is not None:
            return known
        with torch._C.DisableTorchFunction():  # also if it was not torch that asked, above the mode
            return self._stand_in(real)

    def behind(self, made: Any) -> StandIn | None:
        """The stand-in that `made` is; None if it is none."""
        return self._by_made.get(id(made))

    def _stand_in(self, real: torch.Tensor) -> StandIn:
        with real_tensors():
            _refuse_odd(real)
            fake = fake_of(
                self._fake_mode, real, f"tensor_{len(self.found)}", self._symbolic.get(id(real), ())
            )
            grad = real.grad if real.is_leaf else None
            hooks, waiting = hooks_of(real)
            differentiable = real.requires_grad
        placeholder = self._tracer.placeholder(f"tensor_{len(self.found)}", fake)
        made = to_functional(placeholder)
        entry = StandIn(real, fake, made, grad)
        self.found.append(entry)
        self._by_real[id(real)] = self._by_made[id(made)] = entry
        if differentiable:
            made.requires_grad_(True)
        if isinstance(real, torch.nn.Parameter):
            made._is_param = True
        if grad is not None:
            made.grad = self.of(grad).made
        for hook in hooks:
            made.register_hook(hook)
        for hook in waiting:
            made.register_post_accumulate_grad_hook(_of_real(hook, real))
        return entry

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._below or threading.get_ident() != self._thread:
            return func(*args, **(kwargs or {}))
        self._inside += 1
        self._watcher.pause()
        try:
            args, kwargs = self._replaced((args, kwargs or {}))
            if func == _DATA_WRITTEN and _is_own_data(*args):
                return None
            self._refuse(func, args, kwargs)
            if func is torch.Tensor.backward:
                return self._backward(*args, **(kwargs or {}))
            return self._given_back(func(*args, **(kwargs or {})))
        finally:
            self._inside -= 1
            self._watcher.resume()

    def _backward(
        self,
        tensor: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def _replaced(self, values: Any) -> Any:
        """`values`, nested in tuples, lists and dictionaries, with stand-ins."""
        kind = type(values)
        if kind is tuple or kind is list:
            return kind(map(self._replaced, values))
        if kind is dict:
            return {key: self._replaced(value) for key, value in values.items()}
        if isinstance(values, torch.Tensor):
            return self._stood_in_for(values)
        return values if kind in _ATOMS else pytree.tree_map(self._stood_in_for, values)

    def _stood_in_for(self, value: Any) -> Any:
        if type(value) is FunctionalTensor:
            return value
        if isinstance(value, torch.Tensor) and not is_traced(value):
            return self.of(value).made
        return value

    def _given_back(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            entry = self._by_made.get(id(result))
            return result if entry is None else entry.real
        if type(result) in (tuple, list):
            return type(result)(map(self._given_back, result))
        return result

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        name = getattr(func, "__name__", "")
        if name in _CHANGES or func == _DATA_WRITTEN:
            what = "assigning to .data" if func == _DATA_WRITTEN else name
            raise StepRefusedError("tensor-changed", f"changes a tensor by {what}")
        if name in _VALUES:
            raise StepRefusedError("reads-values", f"reads the values of a tensor ({name})")
        if name in _MEMORY or func == _VERSION:
            raise StepRefusedError("reads-memory", "asks for the memory or the version of a tensor")
        if args and isinstance(args[0], torch.Tensor) and (entry := self.behind(args[0])) is not None:
            if name in _HOOKS:
                raise StepRefusedError("registers-hook", f"calls {name} of a tensor that outlives it")
            if func in _REQUIRES_GRAD:
                wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
                if bool(wanted) != entry.made.requires_grad:
                    raise StepRefusedError("tensor-changed", "switches requires_grad of a tensor")

    @contextmanager
    def running(self) -> Iterator[None]:
        """The mode itself, and what else of torch has to know: the engine, Functions, optimizers."""
        with ExitStack() as stack:
            for module in Gateway._modules:
                stack.enter_context(replaced_by(module, "_engine_run_backward", self._run_backward))
            stack.enter_context(
                replaced_by(functorch_utils, "unwrap_dead_wrappers", self._arguments_of_functions)
            )
            stack.enter_context(replaced_by(FunctionalTensorMode, "__torch_dispatch__", self._dispatch))
            stack.enter_context(replaced_by(saved_tensors_hooks, "__enter__", self._enter_saved_hooks))
            stack.enter_context(eager_optimizers(self._thread))
            stack.enter_context(self)
            yield

    def _run_backward(self, prior: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return prior(*args, **kwargs)
        args, kwargs = self._replaced((args, kwargs))
        request = EngineRequest.of(*args, **kwargs)
        if not request.keep_graph:
            self.spent.extend(request.tensors)
        with self._above(), one_thread():
            return run_stock(request)

    @contextmanager
    def _above(self) -> Iterator[None]:
        """Around what calls user code: torch may have called us below the mode."""
        was_inside, self._inside = self._inside, 0
        with ExitStack() as stack:
            if was_inside:
                stack.enter_context(self)
            stack.enter_context(self._watcher.looking())
            try:
                yield
            finally:
                self._inside = was_inside

    def _enter_saved_hooks(self, prior: Callable[..., Any], hooks: Any) -> Any:
        """Hooks on saved tensors are user code, which torch calls inside of operations."""
        if threading.get_ident() != self._thread:
            return prior(hooks)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook
        hooks.pack_hook, hooks.unpack_hook = self._called_above(pack), self._called_above(unpack)
        try:
            return prior(hooks)  # torch keeps what it finds now
        finally:
            hooks.pack_hook, hooks.unpack_hook = pack, unpack

    def _called_above(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: Any) -> Any:
            with self._above():
                return hook(value)

        return call

    def _dispatch(self, prior: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Every operation of the trace comes by here."""
        if threading.get_ident() != self._thread:
            return prior(*args, **kwargs)
        self._watcher.pause()
        self._below += 1  # what torch computes with there is its own
        try:
            if _draws_in_place(args[1]):
                with self._tracer.noting(draws_in_place=True):
                    return prior(*args, **kwargs)
            return prior(*args, **kwargs)
        finally:
            self._below -= 1
            self._watcher.resume()

    def _arguments_of_functions(self, prior: Callable[..., Any], args: Any) -> Any:
        args = prior(args)
        if threading.get_ident() != self._thread:
            return args
        return type(args)(map(self._stood_in_for, args))


def _refuse_odd(real: torch.Tensor) -> None:
    if why := why_not_fakeable(real):
        raise StepRefusedError("input", f"uses a {why}")
    if is_wrapper(real):
        raise StepRefusedError("input", f"uses a tensor subclass, {type(real).__name__}")
    if real.requires_grad and not real.is_leaf:
        raise StepRefusedError("history", "uses a tensor with a history that began outside")
    if real.requires_grad and (hooked := node_hooks(real)):
        raise StepRefusedError("node-hooks", f"has a leaf whose accumulation has {hooked} hooks of its own")


def _draws_in_place(func: Any) -> bool:
    """Whether an operator fills a tensor with random numbers: in the order of its memory, which the
    functional one does not know."""
    return torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable


def _is_own_data(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether an assignment to ``.data`` gives a tensor what it has: the end of ``p.data -= x``."""
    return storage_key(tensor) == storage_key(value) and same_layout(tensor, value)


def _of_real(hook: Callable[..., Any], real: torch.Tensor) -> Callable[..., Any]:
    """A post-accumulate-grad hook, called with the real leaf."""
    return lambda _: hook(real)
