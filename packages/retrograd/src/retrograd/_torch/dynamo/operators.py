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
from torch._dynamo import config as dynamo_config
from torch._dynamo.variables import TensorVariable

from retrograd._torch.dynamo.keep_eager import keeps_eager
from retrograd._torch.patches import handle

_HANDLERS = "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers"
_METHOD = "torch._dynamo.variables.tensor:TensorVariable.call_method"
_FUNCTIONS = (torch.addcdiv, torch._foreach_lerp_)
_METHODS = frozenset({"add_", "addcmul_", "addcdiv_"})


def keep_operators_whole() -> None:
    """From here on, for backends that want eager kept."""
    handle(_HANDLERS, _handlers)
    handle(_METHOD, _call_method)


@functools.cache
def _handlers(original: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """What Dynamo does with functions that it knows. None puts the call into its graph as it is."""
    known = original()

    def whole(fn: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _is_kept(tx, args[2:], kwargs, fn) else known[fn](variable, tx, *args, **kwargs)

    return {**known, **{fn: functools.partial(whole, fn) for fn in _FUNCTIONS if fn in known}}


def _call_method(original: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What Dynamo makes of a method of a tensor."""
    if name not in _METHODS or not _is_kept(tx, (), kwargs):
        return original(variable, tx, name, args, kwargs)
    with dynamo_config.patch(enable_dynamo_decompositions=False):
        return original(variable, tx, name, args, kwargs)


def _is_kept(tx: Any, behind: Any, kwargs: Any, fn: Any = None) -> bool:
    """Whether no tensor is given as a number; of ``_foreach_lerp_``, that is among the arguments `behind`."""
    numbers = [*kwargs.values(), *(behind if fn is torch._foreach_lerp_ else ())]
    return not any(isinstance(number, TensorVariable) for number in numbers) and keeps_eager(tx)
