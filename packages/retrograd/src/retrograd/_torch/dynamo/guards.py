"""Guards for what Dynamo's own guards leave open.

In: the guards that Dynamo is about to install, while it has a graph compiled, or has installed for code
without a graph. Out: more guards among them:

- for the sign of a zero: Dynamo compares numbers by ``==``, and ``0.0 == -0.0``;
- for an environment variable that was asked for and not found: a key that is missing leaves no guard;
- for hooks of modules that are set later, see `module_hooks`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

from torch._guards import Guard, TracingContext

from retrograd._torch.dynamo.module_hooks import guard_module_hooks

#: guards of Dynamo's that compare a value by ``==``.
_BY_VALUE = ("EQUALS_MATCH", "CONSTANT_MATCH")


def guard_what_dynamo_does_not(module_hooks: bool) -> None:
    """Add them; nothing happens where nobody compiles.

    Args:
        module_hooks: whether hooks of modules are among them.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    guards: Any = context.guards_context.dynamo_guards
    for guard in list(guards):
        if guard.inner_create_fn().__name__ in _BY_VALUE:
            guards.add(Guard(guard.originating_source, _SIGN_OF_ZERO))
        elif guard.name.endswith(".environ"):
            guards.add(Guard(guard.originating_source, _ENVIRONMENT))
    if module_hooks:
        guard_module_hooks(guards)


def _keeps(what: Callable[[Any], Any], text: str, builder: Any, guard: Guard) -> None:
    """Have `builder` guard on ``what(value)`` of the guarded value; None: there is nothing to guard."""
    before = what(builder.get(guard))
    if before is not None:
        parts = [f"{text} of {guard.name} as it was"]
        builder.get_guard_manager(guard).add_lambda_guard(
            lambda value: what(value) == before, parts, guard.user_stack
        )


def guard_environment(guarded_code: Any) -> None:
    """Add a guard to code of Dynamo's that asks for environment variables; None is no code."""
    manager = getattr(guarded_code, "guard_manager", None)
    if manager is not None and any(".environ" in part for part in manager.code_parts):
        before = _names_in_environment(os.environ)
        parts = ["names of os.environ as they were"]
        manager.root.add_lambda_guard(lambda _: _names_in_environment(os.environ) == before, parts, None)


def _sign_of_zero(value: Any) -> float | None:
    return math.copysign(1.0, value) if type(value) is float and value == 0.0 else None


def _names_in_environment(value: Any) -> frozenset[str] | None:
    return frozenset(value) if value is os.environ else None


_SIGN_OF_ZERO = functools.partial(_keeps, _sign_of_zero, "sign")
_ENVIRONMENT = functools.partial(_keeps, _names_in_environment, "names")
