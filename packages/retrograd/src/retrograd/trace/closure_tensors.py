"""Tensors that a function reaches by itself become inputs of its trace.

In: each call of torch that a traced function makes. Out: the same call, with the tensors of closures, globals
and attributes replaced, and with the kernel that eager runs where torch's Python form of it differs. A call
that no trace can hold is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, has_torch_function

from retrograd.errors import Refusal, not_representable
from retrograd.facts import functions, is_of_family
from retrograd.facts.patches import handled_here
from retrograd.graph.operator_effects import around_collecting, collecting_refused
from retrograd.runtime import pytree
from retrograd.runtime.subclass import without_symbols
from retrograd.trace.functional import is_traced

#: By name, because the live path may have replaced some of these.
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_CHANGES = {
    torch.Tensor.detach_: "detach_",
    torch.Tensor.resize_: "resize_",
    torch.Tensor.resize_as_: "resize_as_",
    torch.Tensor.set_: "set_",
    torch.Tensor.data.__set__: "assigning to .data",  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__: "assigning to .grad",  # type: ignore[union-attr]
}
#: `torch.FloatTensor` and similar constructors call it to make a new tensor.
_LIFT = torch.ops.aten.lift_fresh.default
#: `torch.tensor` calls it for a symbolic number. It does nothing to a tensor without history.
_DETACH = torch.Tensor.detach_
_TEXT = "torch._subclasses.functional_tensor:FunctionalTensor.__repr__"
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class ClosureTensors(TorchFunctionMode):
    """While open, each real tensor that reaches torch is replaced by `lift` of it, always the same one.

    A symbolic exponent is replaced by its value, which adds a guard.

    Args:
        lift: as above.
        is_exact: whether results must be bitwise equal to eager's.

    Attributes:
        bared: tensors whose ``.data`` was read.
        strided: results of ``as_strided`` and similar calls, each with the tensor the call was made on.
        reads_offsets: whether anything depended on a tensor's storage offset.
    """

    def __init__(self, lift: Callable[[torch.Tensor], torch.Tensor], is_exact: bool = False) -> None:
        super().__init__()
        self._lift, self._is_exact = _outside_of_transforms(lift), is_exact
        self.bared: list[torch.Tensor] = []
        self.strided: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.reads_offsets = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        self.reads_offsets |= name == "storage_offset" or _is_given_offset(name, args, kwargs or {})
        if _is_functionalizing():
            raise not_representable("it calls torch.func.functionalize, which takes a trace's tensors apart")
        if name in _HOOKS:
            raise Refusal("hook-in-trace", f"it calls Tensor.{func.__name__}")
        if name in functions("casts_inside") and torch._C._is_any_autocast_enabled():
            raise not_representable(f"it calls {name} under autocast, whose kernel casts inside")
        if name in functions("refuses_elements"):
            raise not_representable(f"it calls {name}, which looks at elements to refuse them")
        if func in _CHANGES and not (func is _DETACH and not args[0].requires_grad):
            raise Refusal("tensor-changed", f"it changes a tensor by {_CHANGES[func]}")
        kwargs = kwargs or {}
        if func == _DATA:
            self.bared.append(args[0])
        if name in functions("has_exponent"):
            args, kwargs = without_symbols((args, kwargs))
        given = () if func is _LIFT else pytree.tree_leaves((args, kwargs))
        free = [leaf for leaf in given if _is_free(leaf)]
        if free:
            args, kwargs = pytree.tree_map(self._replaced, (args, kwargs))
        if self._is_exact and is_of_family("python_form_rounds", name):
            result = _called_in_c(name, func, args, kwargs)
        else:
            result = _called(name, func, args, kwargs)
        if name in functions("offset"):
            self.strided.append((result, args[0] if args else kwargs["input"]))
        # An in-place operation must return the tensor object that the function holds: the function may store
        # it.
        return next((leaf for leaf in free if self._lift(leaf) is result), result)

    def _replaced(self, leaf: Any) -> Any:
        return self._lift(leaf) if _is_free(leaf) else leaf

    def given_to_function(self, original: Callable[[Any], Any], args: Sequence[Any]) -> Any:
        """Replace the arguments of a custom ``autograd.Function``, whose call no mode intercepts."""
        return original(tuple(map(self._replaced, args)))

    def collecting(self, original: Callable[..., Any], *args: Any) -> Any:
        """Refuse: a process group is about to coalesce operations."""
        raise collecting_refused()

    def __enter__(self) -> Any:
        self._around = ExitStack()
        handled = handled_here("torch._functorch.utils:unwrap_dead_wrappers", self.given_to_function)
        self._around.enter_context(handled)
        self._around.enter_context(handled_here(_TEXT, _text))
        self._around.enter_context(around_collecting(self.collecting))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.close()


def _text(original: Callable[[Any], str], tensor: Any) -> str:
    # torch's own errors show arguments as well, where no mode is active
    return torch.Tensor.__repr__(tensor) if has_torch_function((tensor,)) else original(tensor)


def _called(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if name == "one_hot":
        _check_classes(*args, **kwargs)
    if name == "_assert_async" and len(args) == 1:  # torch drops an assertion without text: this is eager's
        args = (*args, "Expected Tensor with single nonzero value, but got zero")
    if is_of_family("python_form_differs", name) or (name == "dropout" and not _drops(*args, **kwargs)):
        with suppress(RuntimeError), no_python_dispatcher():  # some reject symbolic sizes
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _called_in_c(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        with no_python_dispatcher():
            return func(*args, **kwargs)
    except RuntimeError as error:
        raise not_representable(f"the kernel of {name} takes no symbolic sizes") from error


def _drops(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> bool:
    """Whether a dropout sets some elements to zero. Otherwise it draws nothing. In evaluation, and if `p` is
    0, it returns its input itself; torch's Python form copies it."""
    return bool(training and train and 0 < p < 1)


def _check_classes(labels: torch.Tensor | None = None, num_classes: int = -1, **named: torch.Tensor) -> None:
    """Trace the checks of the ``one_hot`` kernel, which torch's form for tensors without values omits."""
    labels = next(iter(named.values())) if labels is None else labels
    if num_classes != -1:
        check = torch.ops.aten._assert_async.msg
        check((labels >= 0).all(), "Class values must be non-negative.")
        check((labels < num_classes).all(), "Class values must be smaller than num_classes.")


def _outside_of_transforms(lift: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`lift`, called with all transforms of ``torch.func`` suspended: the lifted tensor existed before they
    were entered."""

    def lift_outside(tensor: torch.Tensor) -> torch.Tensor:
        if torch._C._functorch.maybe_current_level() is None:
            return lift(tensor)
        with temporarily_clear_interpreter_stack():
            return lift(tensor)

    return lift_outside


def _is_functionalizing() -> bool:
    """Whether a call is made inside ``torch.func.functionalize``."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Functionalize for level in levels)


def _is_given_offset(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """True if a call passes an explicit storage offset, so that the tensor's own offset matters."""
    place = functions("offset").get(name)
    return place is not None and (place < len(args) or kwargs.get("storage_offset") is not None)


def _is_free(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_traced(leaf)
