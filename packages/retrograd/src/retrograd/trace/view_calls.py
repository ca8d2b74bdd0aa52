"""Record the calls that made a view.

In: a view, and another view that it was made from. Out: the calls in between, as eager made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import map_aggregate

from retrograd.graph.operator_effects import Watch
from retrograd.graph.view_calls import ViewCalls


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
    found: list[Any] = []
    with torch.no_grad():
        with Watch(lambda *call: found.append(call)):
            made = view._view_func_unsafe(view._base)
        if _place(made) != _place(view):
            return None
        ends = [args[0] for _, args, _ in found[1:]] + [view]
        return [_written(call, _place(end)) for call, end in zip(found, ends, strict=True)]


def _written(call: tuple[Any, Any, Any], place: list[str]) -> Any:
    """As in `ViewCalls`, for the result that shows the memory as `place` says."""
    operator, args, options = call
    results = operator(*args, **options)
    index = None if isinstance(results, torch.Tensor) else [*map(_place, results)].index(place)
    return operator, tuple(args[1:]), dict(options), index


def _place(tensor: torch.Tensor) -> list[str]:
    return [*map(str, (*tensor.shape, *tensor.stride(), tensor.storage_offset()))]
