"""Kinds of statements: what a policy weighs.

In: a scope. Out: statements of the kinds that the policy prefers. Most kinds are a table of rows; the others
have a grammar of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gradparity.generate.draft import Scope
from gradparity.generate.kinds import (
    braids,
    functions,
    islands,
    modules,
    operators,
    python_state,
    samples,
    stacks,
    transforms,
)
from gradparity.generate.rows import TABLES, add_from, add_overwritten

Maker = Callable[[Scope], bool]
TRIES = 6

KINDS: dict[str, Maker] = {
    **{name: partial(add_from, table=name) for name in TABLES},
    "overwritten": add_overwritten,
    "braid": braids.braid,
    "function": functions.apply_function,
    "no_grad": islands.no_grad,
    "autocast": islands.autocast,
    "checkpoint": islands.checkpointed,
    "hook_inside": islands.hook_inside,
    "stack": stacks.stack,
    "break": islands.graph_break,
    "module": modules.call_module,
    "transform": transforms.transformed,
    "higher_order": transforms.higher_order,
    "custom_op": operators.custom_operator,
    "subclass": operators.wrapped_input,
    "python": python_state.python_state,
    "sample": samples.sample_of_op_db,
}
"""By name: adds one statement (or a few that belong together), and says whether it could."""


def grow(scope: Scope, count: int) -> None:
    """Adds about so many statements of the kinds that the policy prefers."""
    for _ in range(count):
        for _ in range(TRIES):
            if KINDS[scope.chance.weighted(scope.draft.policy.kinds)](scope):
                break
