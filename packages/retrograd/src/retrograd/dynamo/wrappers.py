"""The module that ``torch.compile`` returns, where the backend wants eager kept: it keeps all of its hooks.

In: what torch's wrapper does when an attribute is set and when it is copied or pickled. Out: the same, except
that what ``nn.Module`` keeps for the wrapper itself stays with the wrapper. Torch hands every attribute on to
the inner module. So it puts the flag for full backward hooks there, leaves the hook with the wrapper, and
never calls it. A copy of a wrapper has no hooks at all.

In: a wrapper that compiled code calls. Out: a break of the graph around a call of one that has hooks, and a
guard that one without hooks gets none. Dynamo itself traces the inner module instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.misc import DelayGraphBreakVariable

from retrograd.dynamo.eager_breaks import HOOKS_OF_A_MODULE, backend_keeps_eager, keeps_eager
from retrograd.facts.patches import handle

#: says how Dynamo was called. It is a closure, which nobody can pickle.
_SETTINGS = "get_compiler_config"


def keep_hooks_of_wrappers() -> None:
    """From here on, for backends that want eager kept."""
    handle("torch._dynamo.eval_frame:OptimizedModule.__setattr__", _set_attribute)
    handle("torch._dynamo.eval_frame:OptimizedModule.__reduce__", _reduced)
    handle("torch._dynamo.variables.builder:VariableBuilder.wrap_module", _wrap_module)


def _is_kept(wrapper: Any) -> bool:
    context = vars(wrapper).get("dynamo_ctx")
    return context is not None and backend_keeps_eager(context.callback)


def _set_attribute(original: Callable[..., None], wrapper: Any, name: str, value: Any) -> None:
    if name in vars(wrapper) and name.startswith("_") and _is_kept(wrapper):
        nn.Module.__setattr__(wrapper, name, value)
    else:
        original(wrapper, name, value)


def _reduced(original: Callable[..., Any], wrapper: Any) -> Any:
    made = original(wrapper)
    if not _is_kept(wrapper):
        return made
    state = wrapper.__getstate__()
    state.pop(_SETTINGS, None)
    return (*made, state)


def _wrap_module(original: Callable[..., Any], builder: Any, value: nn.Module) -> Any:
    """What Dynamo makes of a module that it meets."""
    if type(value) is not OptimizedModule or builder.source is None or not keeps_eager(builder.tx):
        return original(builder, value)
    for name in HOOKS_OF_A_MODULE:
        install_guard(AttrSource(builder.source, name).make_guard(GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT))
    if any(getattr(value, name) for name in HOOKS_OF_A_MODULE):
        return DelayGraphBreakVariable(
            source=builder.source, msg="The wrapper of a compiled module has hooks, which run around it."
        )
    return original(builder, value)
