"""Passes over a joint graph of ATen operators: ``pass(gm, example_inputs, **kw) -> gm``.

Each has a file, named for its effect. `run` applies and checks them. A pass that changes results calls
``gm.recompile()`` itself. The others leave that to `run`, because the old code still computes the right
results.
"""

from __future__ import annotations

from retrograd.errors import OptionError
from retrograd.passes.aten.accumulate_in_fp32 import accumulate_in_fp32
from retrograd.passes.aten.clip_gradients import clip_gradients
from retrograd.passes.aten.fold_constants import fold_constants
from retrograd.passes.aten.merge_common_subexpressions import merge_common_subexpressions
from retrograd.passes.aten.normalise_views import normalise_views
from retrograd.passes.aten.order_collectives import order_collectives
from retrograd.passes.aten.recompute_by_policy import recompute_by_policy
from retrograd.passes.aten.remove_dead_code import remove_dead_code
from retrograd.passes.aten.run import AnyPass, JointPass, PassReport, pass_name, run_passes

__all__ = [
    "NUMERICS_PRESERVING",
    "OPT_IN",
    "AnyPass",
    "JointPass",
    "PassReport",
    "accumulate_in_fp32",
    "clip_gradients",
    "fold_constants",
    "merge_common_subexpressions",
    "normalise_views",
    "order_collectives",
    "pass_name",
    "pass_named",
    "recompute_by_policy",
    "remove_dead_code",
    "run_passes",
]

#: these give bitwise the same results. This is the order in which they are applied.
NUMERICS_PRESERVING: tuple[JointPass, ...] = (
    fold_constants,
    normalise_views,
    merge_common_subexpressions,
    remove_dead_code,
    order_collectives,
)
#: these change results, or need arguments, which `functools.partial` gives them.
OPT_IN: tuple[AnyPass, ...] = (recompute_by_policy, accumulate_in_fp32, clip_gradients)


def pass_named(name: str) -> AnyPass:
    """The pass of that name.

    Raises:
        OptionError: there is none.
    """
    known: dict[str, AnyPass] = {pass_name(one): one for one in (*NUMERICS_PRESERVING, *OPT_IN)}
    if name not in known:
        raise OptionError("passes", f"unknown pass {name!r}", f"one of {', '.join(known)}, or a callable")
    return known[name]
