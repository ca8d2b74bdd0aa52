"""Operators that torch does not define.

In: a graph. Out: the names of such operators in it, and the modules that define them: once another process
has imported these, it knows the operators too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS

from retrograd._torch.fx import OF_TORCH, is_operator_overload


def is_registered(name: str, overload: str) -> bool:
    """Whether torch's dispatcher knows an operator of this name, such as ``aten::add``, and overload.

    Raises:
        RuntimeError: these are no names.
    """
    return torch._C._dispatch_has_kernel(name if overload == "default" else f"{name}.{overload}")


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
