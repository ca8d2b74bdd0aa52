"""Operators that a trace cannot take as they are: those that torch does not define, and asynchronous ones.

In: a graph. Out: the names of operators in it that torch does not define, and the modules that define them:
once another process has imported these, it knows the operators too.

In: a call in a trace. Out: a refusal if the operator only starts its work, as a collective of ``c10d`` does.
Python waits for it by a handle, and no trace sees that. Functional collectives have an operator that waits.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd._torch.fx import OF_TORCH, is_operator_overload
from retrograd.errors import Refusal

#: namespaces of operators that start work, or tell devices in which order to do it.
_STARTING = frozenset({"c10d", "streams"})
#: what they return in other namespaces, as schemas write it.
_HANDLES = ("__torch__.torch.classes.c10d.Work", "Future")


def refuse_asynchronous(targets: Iterable[Any]) -> None:
    """Refuse a call of an operator that only starts its work.

    Args:
        targets: what is called. An operator of higher order may have others among its arguments.

    Raises:
        Refusal: one of them starts work that somebody has to wait for.
    """
    for target in targets:
        if is_operator_overload(target) and _is_asynchronous(target):
            raise Refusal("asynchronous", f"it calls {target}, which Python has to wait for")


@functools.cache
def _is_asynchronous(operator: torch._ops.OpOverload) -> bool:
    kinds = [str(returned.type) for returned in operator._schema.returns]
    return operator.namespace in _STARTING or any(kind.startswith(_HANDLES) for kind in kinds)


class RefusingAsynchronous(TorchDispatchMode):
    """While open on this thread, such calls are refused before they start, whoever catches the error.

    Attributes:
        reason: why the first of them was refused; None if there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            refuse_asynchronous([func])
        except Refusal as refusal:
            self.reason = self.reason or str(refusal)
            raise
        return func(*args, **(kwargs or {}))


def custom_operators(graph: fx.Graph) -> Iterator[str]:
    """The names of the operators in a graph that torch does not define."""
    for node in graph.nodes:
        if is_operator_overload(node.target) and node.target.namespace not in OF_TORCH:
            yield node.target.name()


def defining_modules(graph: fx.Graph) -> list[str]:
    """The modules that define them, by name. An operator of the program's main file, or one of which nobody
    can tell where it is from, has none."""
    names = [_of_decorator(name) or _of_registration(name) for name in {*custom_operators(graph)}]
    return sorted({name for name in names if name is not None and name != "__main__"})


def _of_decorator(operator: str) -> str | None:
    """Where a function stands of which ``torch.library.custom_op`` has made the operator."""
    definition = OPDEFS.get(operator)
    return None if definition is None else definition._init_fn.__module__


#: where the dispatcher says that a kernel was registered.
_PLACE = re.compile(r"registered at (.*\.py):\d+")


def _of_registration(operator: str) -> str | None:
    """The module whose file registers it, or a kernel of it, with a ``torch.library.Library``."""
    files = set(_PLACE.findall(torch._C._dispatch_dump(operator)))
    for name, module in [*sys.modules.items()]:
        if getattr(module, "__file__", None) in files and name.partition(".")[0] != "torch":
            return name
    return None
