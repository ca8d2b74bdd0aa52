"""The calls that make a view.

In: calls that `trace.view_calls` recorded. Out: the same view of another tensor, with the autograd nodes
that eager makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate


@dataclass(frozen=True, eq=False)
class ViewCalls:
    """Makes a view of another view.

    Attributes:
        calls: for each, the operator, its arguments after the first, its options, and the index of the view
            among the results; None if it returns one tensor. ``...`` stands for a number that varies.
    """

    calls: tuple[tuple[Any, tuple[Any, ...], dict[str, Any], int | None], ...]

    def __call__(self, base: torch.Tensor, number: Any = None) -> torch.Tensor:
        """The view of `base`. `number` is called for each number that varies, in order."""

        def filled(arg: Any) -> Any:
            return number(arg) if arg is ... else arg

        for operator, args, options, index in self.calls:
            made = operator(base, *map_aggregate(args, filled), **map_aggregate(options, filled))
            base = made if index is None else made[index]
        return base
