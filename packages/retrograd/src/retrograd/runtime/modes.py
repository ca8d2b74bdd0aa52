"""Thread modes that affect operations or compiled code, and random number generators.

In: nothing. Out: `ThreadModes`, to compare and restore; blocks and functions that run under chosen modes; the
reason why nothing can be captured, or no compiled code may run, under the current modes; generator states.
Eager restores grad mode and autocast before each node of a backward (``ThreadLocalStateGuard`` in
``Engine::thread_main``). So a hook that leaves them switched affects only the rest of its own node.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    pop_dynamic_layer_stack_and_undo_to_depth,
)
from torch._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._contextlib import context_decorator as context_decorator
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode

from retrograd import process
from retrograd.facts.patches import hidden_from_dynamo
from retrograd.graph.fx import real_tensors
from retrograd.process import ForkSafeLock, restore_after_errors, restore_saved
from retrograd.runtime.kernels import KernelChoices, choose_kernels, kernel_choices
from retrograd.runtime.streams import user_code_in_order

P = ParamSpec("P")
T = TypeVar("T")

#: Device type and dtype of each enabled autocast.
Autocast = tuple[tuple[str, torch.dtype], ...]
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")

#: Modules whose saved-tensor hooks (torch's and ours) return every value unchanged.
_HARMLESS_HOOKS = ("torch.utils.checkpoint", "torch.autograd.graph", "retrograd")


class ThreadModes(NamedTuple):
    """The modes of a thread at one moment.

    Attributes:
        grad: whether autograd records.
        autocast: the enabled autocasts.
        autocast_caches: whether autocast caches casts of parameters.
        deterministic: whether operations without a deterministic form raise (2), warn (1), or neither (0).
        dtype, device: the defaults for new tensors.
        kernels: the process-wide choices between kernels; None, to restore nothing.
    """

    grad: bool
    autocast: Autocast = ()
    autocast_caches: bool = True
    deterministic: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kernels: KernelChoices | None = None

    @staticmethod
    def now() -> ThreadModes:
        """The modes of this thread."""
        autocast = ThreadModes.autocast_now()
        deterministic = torch._C._get_deterministic_algorithms()
        return ThreadModes(
            torch.is_grad_enabled(),
            autocast,
            torch.is_autocast_cache_enabled() if autocast else True,
            2 - torch._C._get_deterministic_algorithms_warn_only() if deterministic else 0,
            torch.get_default_dtype(),
            _default_device(),
            kernel_choices(),
        )

    @staticmethod
    def autocast_now() -> Autocast:
        """The enabled autocasts of this thread."""
        if not torch._C._is_any_autocast_enabled():
            return ()
        devices = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
        return tuple((device, torch.get_autocast_dtype(device)) for device in devices)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, these modes are active, except `deterministic`. The default dtype and the choices of
        kernels are process-wide, so we set them only if they have changed since."""
        with ExitStack() as modes:
            if torch.get_default_dtype() is not self.dtype:
                modes.enter_context(
                    _process_wide(torch.get_default_dtype, torch.set_default_dtype, self.dtype)
                )
            if self.kernels not in (None, kernel_choices()):
                modes.enter_context(_process_wide(kernel_choices, choose_kernels, self.kernels))
            if _default_device() != self.device:
                modes.enter_context(torch.device(self.device))
            modes.enter_context(torch.set_grad_enabled(self.grad))
            modes.enter_context(autocast_off())
            modes.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(self.autocast_caches)
            for device, dtype in self.autocast:
                modes.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=self.autocast_caches))
            yield

    def has_same_defaults(self) -> bool:
        """Whether new tensors have the dtype and device now that they have under these modes."""
        return self.dtype is torch.get_default_dtype() and self.device == _default_device()

    def difference(self, now: ThreadModes) -> str:
        """The first mode that differs in `now`, with both values."""
        name, old, new = next(
            found for found in zip(self._fields, self, now, strict=True) if found[1] != found[2]
        )
        return f"{_NAMES.get(name, name)} was {_readable(old)}, now {_readable(new)}"


#: Held while a process-wide mode is switched, so that no thread restores another thread's temporary value.
_another_mode = ForkSafeLock()


@contextmanager
def _process_wide(get: Callable[[], T], set_to: Callable[[T], object], value: T) -> Iterator[None]:
    with _another_mode:
        before = get()
        set_to(value)
        try:
            yield
        finally:
            set_to(before)


def _default_device() -> str:
    return str(torch.get_default_device()) if torch._C._len_torch_function_stack() else "cpu"


_NAMES = {
    "kernels": "choice of kernels",
    "grad": "grad mode",
    "deterministic": "deterministic algorithms",
    "dtype": "default dtype",
}
_LEVELS = ("off", "warn only", "on")


def _readable(mode: Any) -> str:
    if isinstance(mode, bool):
        return "on" if mode else "off"
    if isinstance(mode, tuple):
        return ", ".join(f"{dtype} on {device}" for device, dtype in mode) or "off"
    return _LEVELS[mode] if isinstance(mode, int) else str(mode)


# blocks and functions under chosen modes


#: Inside, autocast is off, as if it had never been on; stock does the same for compiled code. Our graphs
#: contain the casts that autocast made, so we compile and run them without autocast.
autocast_off = torch._C._DisableAutocast


#: Inside, no ``__torch_function__`` of a class or mode is called. Eager's C++ calls none either.
torch_functions_off = torch._C.DisableTorchFunction


def without_torch_functions(fn: Callable[P, T]) -> Callable[P, T]:
    """Return `fn` wrapped in `torch_functions_off`."""
    return context_decorator(functools.partial(torch_functions_off), fn)  # a class is ambiguous there


def undifferentiated(code: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return `code` wrapped to run below autograd and without autocast. Autograd then records nothing, while
    operators that query grad mode see the caller's."""
    below = torch._C._AutoDispatchBelowAutograd

    def run(args: list[Any]) -> Any:
        with below(), autocast_off():
            return code(args)

    return run


def without_autocast(fn: Callable[P, T]) -> Callable[P, T]:
    """Return `fn` wrapped in `autocast_off`."""
    return context_decorator(functools.partial(autocast_off), fn)


def as_if_autocast(dtype: torch.dtype | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `fn`, an operation of a traced backward, under the current autocast, as eager would.

    Eager casts a gradient back to the dtype of its forward value after each node. A traced graph no longer
    has these casts; `dtype` is the dtype that the result had. If it is unknown, we run without autocast.
    """
    if not torch._C._is_any_autocast_enabled():
        return fn(*args, **kwargs)
    if dtype is None:
        with autocast_off():
            return fn(*args, **kwargs)
    result = fn(*args, **kwargs)
    return result.to(dtype) if result.dtype != dtype else result


# user code that leaves modes switched

#: The modes that user code may leave switched: grad mode, then autocast per device.
KeptModes = tuple[bool, ...]
_KEPT_DEVICES = ("cpu", "cuda")
_NO_AUTOCAST = (False,) * len(_KEPT_DEVICES)


def _kept_modes() -> KeptModes:
    if not torch._C._is_any_autocast_enabled():  # fast path for the common case
        return torch.is_grad_enabled(), *_NO_AUTOCAST
    return torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _KEPT_DEVICES)


def _switch(now: KeptModes, to: KeptModes) -> None:
    torch.set_grad_enabled(to[0])
    for device, is_on, on in zip(_KEPT_DEVICES, now[1:], to[1:], strict=True):
        if is_on != on:
            torch.set_autocast_enabled(device, on)


def _switches() -> tuple[Any, ...]:
    """This thread's state that our blocks, or torch's, may switch."""
    return (
        torch._C._get_torch_function_state(),  # type: ignore[attr-defined]
        torch._C._is_multithreading_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        get_dynamic_layer_stack_depth(),
        _autocast_settings(),
        _kept_modes(),
    )


def _autocast_settings() -> tuple[Any, ...]:
    """What a ``torch.autocast`` block sets besides the modes: how many blocks there are, each device's dtype,
    and whether casts are cached. Casts of weights are kept until the outermost block ends."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth, torch.is_autocast_cache_enabled(), *map(torch.get_autocast_dtype, _KEPT_DEVICES)


def _switch_back(before: tuple[Any, ...]) -> None:
    functions, multithreading, dispatching, taking_over, levels, (depth, caches, *dtypes), kept = before
    torch._C._set_torch_function_state(functions)  # type: ignore[attr-defined]
    torch._C._set_multithreading_enabled(multithreading)
    while torch._C._len_torch_dispatch_stack() > dispatching:
        _pop_mode()
    while torch._C._len_torch_function_stack() > taking_over:
        torch._C._pop_torch_function_stack()
    pop_dynamic_layer_stack_and_undo_to_depth(levels)
    while _autocast_settings()[0] > depth:
        if not torch.autocast_decrement_nesting():
            torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(caches)
    for device, dtype in zip(_KEPT_DEVICES, dtypes, strict=True):
        torch.set_autocast_dtype(device, dtype)
    _switch(_kept_modes(), kept)


restore_after_errors(_switches, _switch_back)
process.dynamo_switch = get_eval_frame_callback, set_eval_frame
hidden_from_dynamo(restore_saved)  # an error may have left Dynamo switched on


class ModesKept:
    """Restores grad mode and autocast at the end of a block.

    Args:
        switched_to: the modes inside; None to leave them as they are outside.

    Attributes:
        left: the modes at the end of the block; None if unchanged.
    """

    __slots__ = ("_before", "_switched_to", "left")

    def __init__(self, switched_to: KeptModes | None = None) -> None:
        self._switched_to = switched_to
        self.left: KeptModes | None = None

    def __enter__(self) -> ModesKept:
        self._before = _kept_modes()
        if self._switched_to is not None:
            _switch(self._before, self._switched_to)
        return self

    def __exit__(self, *error: object) -> None:
        if (now := _kept_modes()) != self._before:
            self.left = now
            _switch(now, self._before)


class UserCode(ModesKept):
    """Calls user code, one call after another, and restores modes after each."""

    __slots__ = ()

    def call(self, fn: Callable[..., T], args: Sequence[Any]) -> T:
        """Return ``fn(*args)``."""
        self.left = None
        with self, user_code_in_order():
            return fn(*args)


# reasons against compiled code under the current modes


def compile_stance() -> str:
    """The stance of ``torch.compiler.set_stance``. Under ``force_eager``, none of our code runs. Under
    ``eager_on_recompile``, we interpret whatever would need new code. Under ``fail_on_recompile``, we raise
    instead. The other stances concern only Dynamo."""
    return eval_frame._stance.stance


def are_modes_plain() -> bool:
    """Whether no mode observes or intercepts the operations that run now."""
    return (
        not is_forward_mode()
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._autograd._profiler_enabled()
    )


#: Why we compile nothing in forward mode: a code and a sentence.
FORWARD_MODE = ("forward-ad", "forward-mode differentiation is active")
#: Why we compile no forward while the user's hooks are set.
SAVED_HOOKS = ("saved-tensor-hooks", "saved-tensor hooks see, and may change, exactly what eager saves")


def is_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def why_interpreted_now(args: Sequence[Any]) -> str | None:
    """The active mode that compiled code would bypass; None if there is none."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)] if is_forward_mode() else ()
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        return "forward-mode AD: an argument has a tangent"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a functorch transform is active"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode is active"
    if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return "grad mode: only eager's own nodes leave eager's history behind"
    return None


def why_not_capturable_now(has_seen_functions: bool = False) -> tuple[str, str] | None:
    """Why a function must run eagerly in this call: a code and a sentence; None if it need not.

    Args:
        has_seen_functions: whether the active TorchFunctionModes have already seen the operations, as for a
            graph of Dynamo's.
    """
    if compile_stance() == "force_eager":
        return "force-eager", ""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.maybe_current_level() is not None:
        return "dispatch-mode", "a dispatch mode or functorch transform is active"
    if (
        not has_seen_functions
        and torch._C._len_torch_function_stack()
        and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
    ):
        return "function-mode", "a TorchFunctionMode is active, which may take operations over"
    if is_forward_mode():
        return FORWARD_MODE
    if torch.is_anomaly_enabled():
        return "anomaly-mode", "anomaly mode looks at the result of every autograd node"
    return SAVED_HOOKS if are_saved_hooks_set() else None


def are_saved_hooks_set() -> bool:
    """Whether the user has set saved-tensor hooks on this thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not (getattr(hooks[0], "__module__", "") or "").startswith(_HARMLESS_HOOKS)


def way_out_of(code: str) -> str:
    """What a user can do about a reason of `why_not_capturable_now`."""
    way_out = "call it outside of that"
    if code != SAVED_HOOKS[0]:
        return way_out
    return f"{way_out}, or compile only the backward, by retrograd.compiled_autograd(): it calls these hooks"


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, no active mode of the user's program sees what we trace and compile during a backward."""
    with ExitStack() as left, _disable_current_modes():
        for _ in range(torch._C._len_torch_function_stack()):
            left.enter_context(_pop_mode_temporarily())
        yield


def generator_states(devices: Iterable[torch.device] | None = None) -> dict[torch.device, Any]:
    """The states of these devices' default generators; None means the CPU, and CUDA if it is in use."""
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]
    cuda, cpu = torch.cuda.get_rng_state, torch.random.get_rng_state
    return {device: cuda(device) if device.type == "cuda" else cpu() for device in devices}


def seeds_and_states() -> tuple[Any, ...]:
    """A comparable fingerprint of the default generators: the CPU's state, and the seed of CUDA if in use."""
    seeds = torch.cuda.initial_seed() if torch.cuda.is_initialized() else None
    with real_tensors():
        state = torch.random.get_rng_state()
        return ctypes.string_at(state.data_ptr(), state.numel()), seeds


@contextmanager
def with_generator_states(states: dict[torch.device, Any]) -> Iterator[None]:
    """Inside, the default generators are in `states`; afterwards their earlier states are restored."""
    before = generator_states(states)
    try:
        restore_generator_states(states)
        yield
    finally:
        restore_generator_states(before)


def restore_generator_states(states: dict[torch.device, Any]) -> None:
    """Set generators to states from `generator_states`."""
    for device, state in states.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.random.set_rng_state(state)
