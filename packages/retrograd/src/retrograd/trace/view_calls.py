"""Record the calls that made a view.

In: a view, and another view that it was made from. Out: the calls in between, as eager made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.graph.view_calls import ViewCalls


class _Recording(TorchDispatchMode):
    """Inside, calls are recorded with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


def calls_between(
    base: torch.Tensor, view: torch.Tensor, varies: Callable[[torch.SymInt], Any]
) -> ViewCalls | None:
    """The calls that made `view` from `base`, another view of the same memory. None if torch does not know
    them, or if they count from the start of the memory, as ``as_strided`` does.

    `varies` is called for each symbolic number, in order.
    """
    before, calls = _calls(base), _calls(view)
    if before is None or calls is None or [*map(str, before)] != [*map(str, calls[: len(before)])]:
        return None
    calls = calls[len(before) :]
    if any("as_strided" in str(operator) for operator, *_ in calls):
        return None

    def written(arg: Any) -> Any:
        return (varies(arg), ...)[1] if isinstance(arg, torch.SymInt) else arg

    return ViewCalls(map_aggregate(tuple(calls), written))


def _calls(view: torch.Tensor) -> list[Any] | None:
    """The calls that made `view` from its base. None if the shape was changed in place afterwards."""
    if view._base is None:
        return None
    recording = _Recording()
    with torch.no_grad(), recording:
        made = view._view_func_unsafe(view._base)
    if _place(made) != _place(view):
        return None
    found = []
    ends = [args[0] for _, args, _, _ in recording.calls[1:]] + [view]
    for (operator, args, options, results), end in zip(recording.calls, ends, strict=True):
        is_one = isinstance(results, torch.Tensor)
        index = None if is_one else [*map(_place, results)].index(_place(end))
        found.append((operator, tuple(args[1:]), dict(options), index))
    return found


def _place(tensor: torch.Tensor) -> list[str]:
    return [*map(str, (*tensor.shape, *tensor.stride(), tensor.storage_offset()))]
