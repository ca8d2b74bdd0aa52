"""Keep operators whole that Dynamo takes apart before a backend sees them.

In: the calls of ``addcdiv``, ``addcmul_`` and the like that Dynamo meets while it traces for a backend that
wants eager kept. Out: one node of its graph for each. Products and sums made one after the other round
otherwise than the kernel that eager runs. Dynamo means to spare a tensor that is given as a number its
``.item()``; such a call is left to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import TensorVariable

from retrograd._torch.dynamo.keep_eager import keeps_eager
from retrograd._torch.patches import handle

_HANDLERS = "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers"
_FUNCTIONS = (torch.addcdiv, torch._foreach_lerp_)
_METHODS = tuple(
    f"torch._dynamo.variables.tensor:TensorVariable.method_{name}_" for name in ("add", "addcmul", "addcdiv")
)


def keep_operators_whole() -> None:
    """From here on, for backends that want eager kept."""
    handle(_HANDLERS, _handlers)
    for name in _METHODS:
        handle(name, _whole)


@functools.cache
def _handlers(original: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """What Dynamo does with functions that it knows."""
    known = original()
    return {**known, **{fn: functools.partial(_whole, known[fn]) for fn in _FUNCTIONS if fn in known}}


def _whole(original: Callable[..., Any], variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """None, by which Dynamo puts the call into its graph as it is, unless a tensor is given as a number."""
    numbers = [
        *kwargs.values(),
        *(args[2:] if getattr(variable, "value", None) is torch._foreach_lerp_ else ()),
    ]
    if any(isinstance(number, TensorVariable) for number in numbers) or not keeps_eager(tx):
        return original(variable, tx, *args, **kwargs)
    return None
