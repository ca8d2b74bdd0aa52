"""Facts about operators: which are custom, which may raise at run time, and which only start their work.

In: a graph. Out: the names of its operators that torch does not define, and the modules that define them. A
process that imports these modules knows the operators too.

In: a call of an operator. Out: the errors that it may raise at run time although it does not raise on fake
tensors.

In: a call in a trace. Out: a refusal if the operator only starts its work, as a collective of ``c10d`` does.
Python waits for such work through a handle, which no trace sees. Functional collectives have an operator that
waits.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.errors import Refusal
from retrograd.facts import fact, is_of_family
from retrograd.facts.patches import COLLECTING, Handler, handled_here
from retrograd.graph.fx import OF_TORCH, is_operator_overload, schema_of

#: Namespaces of operators that start asynchronous work, or order it on devices.
_STARTING = frozenset({"c10d", "streams"})
#: Return types, as schemas write them, of such operators in other namespaces.
_HANDLES = ("__torch__.torch.classes.c10d.Work", "Future")


def refuse_asynchronous(targets: Iterable[Any]) -> None:
    """Refuse a call of an operator that only starts its work.

    Args:
        targets: the call's target, and arguments that may be targets: a higher-order operator may receive
            operators.

    Raises:
        Refusal: one of them starts work for which the caller must wait.
    """
    for target in targets:
        if is_operator_overload(target) and _is_asynchronous(target):
            raise Refusal("asynchronous", f"it calls {target}, which Python has to wait for")


@functools.cache
def _is_asynchronous(operator: torch._ops.OpOverload) -> bool:
    kinds = [str(returned.type) for returned in operator._schema.returns]
    return operator.namespace in _STARTING or any(kind.startswith(_HANDLES) for kind in kinds)


def around_collecting(handler: Handler) -> AbstractContextManager[None]:
    """Inside, `handler` runs before a process group of this thread starts to coalesce, as in
    ``batch_isend_irecv``.

    No operator call shows that a group coalesces, and after an error nothing would end it.
    """
    return handled_here(COLLECTING, handler) if torch.distributed.is_available() else nullcontext()


def collecting_refused() -> Refusal:
    """The reason why a trace cannot continue where a process group starts to coalesce."""
    return Refusal("asynchronous", "a process group collects what it starts, and Python has to wait for it")


class Watch(TorchDispatchMode):
    """While open, calls `see` with each operator, its arguments and keyword arguments, before it runs."""

    def __init__(self, see: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self._see = see

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def asynchronous_refused() -> Iterator[None]:
    """Inside, on this thread, a call that only starts its work is refused before it starts.

    Raises:
        Refusal: there was such a call, and its caller did not catch the refusal.
    """

    def collecting(*_: Any) -> Any:
        raise collecting_refused()

    with around_collecting(collecting), Watch(lambda func, *_: refuse_asynchronous([func])):
        yield


def is_registered(name: str, overload: str) -> bool:
    """True if torch's dispatcher knows an operator with this name, such as ``aten::add``, and overload.

    Raises:
        RuntimeError: the name is not well formed.
    """
    return torch._C._dispatch_has_kernel(name if overload == "default" else f"{name}.{overload}")


def custom_operators(graph: fx.Graph) -> Iterator[str]:
    """The names of the operators in a graph that torch does not define."""
    for node in graph.nodes:
        if is_operator_overload(node.target) and node.target.namespace not in OF_TORCH:
            yield node.target.name()


def defining_modules(graph: fx.Graph) -> list[str]:
    """The names of the modules that define the graph's custom operators.

    Operators defined in ``__main__``, or with an unknown origin, are left out.
    """
    names = [_of_decorator(name) or _of_registration(name) for name in {*custom_operators(graph)}]
    return sorted({name for name in names if name is not None and name != "__main__"})


def _of_decorator(operator: str) -> str | None:
    """The module of the function from which ``torch.library.custom_op`` made the operator."""
    definition = OPDEFS.get(operator)
    return None if definition is None else definition._init_fn.__module__


#: Where a kernel was registered, in the dispatcher's dump.
_PLACE = re.compile(r"registered at (.*\.py):\d+")


def _of_registration(operator: str) -> str | None:
    """The module whose file registers the operator, or a kernel for it, with a ``torch.library.Library``."""
    files = set(_PLACE.findall(torch._C._dispatch_dump(operator)))
    for name, module in [*sys.modules.items()]:
        if getattr(module, "__file__", None) in files and name.partition(".")[0] != "torch":
            return name
    return None


class Errors(NamedTuple):
    """The errors that a call may raise at run time.

    Attributes:
        classes: the classes of the errors.
        heeds_finally: whether a ``finally`` that re-raises the error counts as code that catches it. Every
            forward of ``transformers`` runs inside a ``finally``, so this is set only for factorisations and
            assertions.
    """

    classes: tuple[type[Exception], ...]
    heeds_finally: bool


OF_CHECKS = Errors((RuntimeError, AssertionError), heeds_finally=True)
OF_VALUES = Errors((RuntimeError, IndexError, ValueError), heeds_finally=False)
OF_THE_USER = Errors((Exception,), heeds_finally=False)

#: Arguments that hold indices, counts or labels.
_PLACES = frozenset({"index", "indices", "target", "targets", "offsets", "lengths", "repeats", "sorter"})


def errors_by_value(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Errors | None:
    """The errors that a call may raise at run time depending on the values of its tensors; None if there are
    none."""
    if not is_operator_overload(operator):
        return None
    if operator.namespace not in OF_TORCH:
        return OF_THE_USER
    name, schema = operator._schema.name.partition("::")[2], schema_of(operator)
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    raises = fact("raises", operator)
    if raises in ("check", "only") or given.get("check_errors") is True:
        return OF_CHECKS
    is_of_no_range = name == "histc" and given.get("min", 0) == given.get("max", 0)
    divisor = args[1] if len(args) > 1 and is_of_family("divides", name) else None
    if raises == "value" or is_of_no_range or (_is_whole(divisor) and not _is_fraction(args[0])):
        return OF_VALUES
    places = [each for key in _PLACES & given.keys() for each in _listed(given[key])]
    return OF_VALUES if any(map(_is_whole, places)) else None


def _is_fraction(value: Any) -> bool:
    """True for a floating-point or complex number or tensor, whose division by zero raises no error."""
    is_tensor = isinstance(value, torch.Tensor)
    return value.is_floating_point() or value.is_complex() if is_tensor else isinstance(value, float)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _is_whole(value: Any) -> bool:
    """True for an integer tensor whose kernel checks its values. Kernels on a GPU raise no error for them."""
    if not isinstance(value, torch.Tensor) or value.device.type == "cuda":
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
