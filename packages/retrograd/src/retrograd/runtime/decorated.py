"""What all functions that compile themselves share with the function of which they are made.

In: a function and the options. Out: its name, signature and documentation; binding to `self`, if defined in a
class; and copies and pickles, without compiled code.
"""

from __future__ import annotations

import functools
import inspect
import operator
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from retrograd.config import Config
from retrograd.errors import name_of

_BOUND_ALREADY = (staticmethod, types.MethodType)


class Decorated:
    """A callable that stands in place of a function.

    Attributes:
        fn: the function.
        config: the options.
    """

    __call__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any], config: Config) -> None:
        updated = ("__dict__",) if isinstance(fn, types.FunctionType) else ()
        functools.update_wrapper(self, fn, updated=updated)
        self.__name__: str = name_of(fn)
        self.fn, self.config = fn, config
        self._is_method = hasattr(type(fn), "__get__") and not isinstance(fn, _BOUND_ALREADY)

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        """A bound method, if this is an attribute of a class and `fn` would be one there."""
        if owner is None or not self._is_method:
            return self
        if torch.compiler.is_dynamo_compiling():  # Dynamo inlines the function, and cannot make a MethodType
            return self.fn.__get__(owner, cls)
        return types.MethodType(self._function if isinstance(owner, torch.nn.Module) else self, owner)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        """This callable as a function, with its attributes. Dynamo asks in which file the function of a
        module's method is defined."""

        @functools.wraps(self.fn)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        public = [name for name, found in inspect.getmembers(type(self), callable) if name[0] != "_"]
        vars(method).update(vars(self), **{name: getattr(self, name) for name in public})
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, if the name of `fn` leads to this, as after decoration: a copy is this object itself, as a
        copy of a function is. Otherwise `fn` and the options, and a copy compiles itself again.
        """
        module, name = getattr(self.fn, "__module__", ""), getattr(self.fn, "__qualname__", "")
        try:  # nothing is imported here: a function's module need not be a module that others can import
            is_named = operator.attrgetter(name)(sys.modules[module]) is self
        except (KeyError, AttributeError):  # also of a local function
            is_named = False
        if is_named:
            return pkgutil.resolve_name, (f"{module}:{name}",)
        return type(self), (self.fn, self.config)


# Compiled alone, this frame would look up the attribute that it is called for, and never end.
set_code_exec_strategy(
    Decorated.__get__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
)
