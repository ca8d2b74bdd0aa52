"""Preserves the hooks of the module that ``torch.compile`` returns, if the backend asks for eager behaviour.

In: attributes that are set on torch's wrapper, and copies and pickles of it. Out: the same, except that
attributes that ``nn.Module`` stores for the wrapper itself stay on the wrapper. Torch passes every attribute
on to the inner module. So the flag for full backward hooks goes there, while the hook stays on the wrapper
and is never called. A copy of a stock wrapper has no hooks at all.

In: a wrapper that compiled code calls. Out: a graph break around the call if the wrapper has hooks, else a
guard that it gets none. Dynamo itself traces the inner module instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.misc import DelayGraphBreakVariable

from retrograd.aot.modules import HOOKS_OF_A_MODULE
from retrograd.dynamo.eager_breaks import backend_keeps_eager, keeps_eager
from retrograd.facts.patches import handle

#: Describes how Dynamo was called. It is a closure, which cannot be pickled.
_SETTINGS = "get_compiler_config"


def keep_hooks_of_wrappers() -> None:
    """Install the patches. They affect only backends that ask to preserve eager behaviour."""
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
    """Replaces Dynamo's translation of a module."""
    if type(value) is not OptimizedModule or builder.source is None or not keeps_eager(builder.tx):
        return original(builder, value)
    for name in HOOKS_OF_A_MODULE:
        install_guard(AttrSource(builder.source, name).make_guard(GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT))
    if any(getattr(value, name) for name in HOOKS_OF_A_MODULE):
        return DelayGraphBreakVariable(
            source=builder.source, msg="The wrapper of a compiled module has hooks, which run around it."
        )
    return original(builder, value)
