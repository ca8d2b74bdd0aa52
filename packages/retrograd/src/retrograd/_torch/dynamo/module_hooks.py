"""Notice hooks of modules that are set after Dynamo has traced a call of the module.

In: the guards that Dynamo is about to install, among them those for modules without hooks, which it leaves
open to save time. Out: one more guard for the whole frame, as long as nobody in the process has set a hook
of a module; from then on, one for each module. A guard on a module is dear: Dynamo no longer skips the
parts of a module that did not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._guards import Guard
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle

from retrograd._torch.patches import handle

#: hooks of modules that were set in this process. Those before the first look count, whatever they hang from.
_set = 0

_SETTERS = ("register_forward", "register_full_backward", "register_backward", "register_module_")

_OF_ALL_MODULES: tuple[Mapping[int, Any], ...] = (
    *(all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks),
    *(all_modules._global_backward_hooks, all_modules._global_backward_pre_hooks),
)


def count_module_hooks() -> None:
    """From here on every hook of a module is counted when it is set."""
    global _set
    _set = RemovableHandle.next_id
    handle("torch.utils.hooks:RemovableHandle.__init__", _made)


def _made(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Count a hook if it is one of a module: all kinds are set by functions of one file of torch's."""
    global _set
    setter = sys._getframe(2)
    if setter.f_globals is vars(all_modules) and setter.f_code.co_name.startswith(_SETTERS):
        _set += 1
    original(*args, **kwargs)


def guard_module_hooks(guards: Any) -> None:
    """Add guards where `guards` says that a module had no hooks. Dynamo guards the hooks that it has seen."""
    found = [guard for guard in guards if guard.inner_create_fn().__name__ == "EMPTY_NN_MODULE_HOOKS_DICT"]
    if found and not _set:
        guards.add(Guard(found[0].originating_source, _nobody_sets_any))
    elif found:
        guards.update([Guard(guard.originating_source, GuardBuilder.SEQUENCE_LENGTH) for guard in found])
        guards.add(Guard(found[0].originating_source, _as_many_of_all_modules))


def _nobody_sets_any(builder: Any, guard: Guard) -> None:
    parts = ["nobody has set a hook of a module"]
    builder.guard_manager.root.add_lambda_guard(lambda _: not _set, parts, guard.user_stack)


def _as_many_of_all_modules(builder: Any, guard: Guard) -> None:
    before = [*map(tuple, _OF_ALL_MODULES)]
    parts = ["the hooks of all modules"]
    builder.guard_manager.root.add_lambda_guard(
        lambda _: [*map(tuple, _OF_ALL_MODULES)] == before, parts, guard.user_stack
    )
