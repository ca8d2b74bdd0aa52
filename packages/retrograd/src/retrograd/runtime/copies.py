"""How the functions that compile themselves are copied and pickled.

In: what was made of a function and the options. Out: what ``__reduce__`` returns, without compiled code.
"""

from __future__ import annotations

import operator
import pkgutil
import sys
from typing import Any


def reduced(made: Any) -> tuple[Any, ...]:
    """By name, if the name of ``made.fn`` leads to `made`, as after decoration: a copy is `made` itself, as a
    copy of a function is. Otherwise the function and the options, and a copy compiles itself again.
    """
    module, name = getattr(made.fn, "__module__", ""), getattr(made.fn, "__qualname__", "")
    try:  # nothing is imported here: a function's module need not be a module that others can import
        is_named = operator.attrgetter(name)(sys.modules[module]) is made
    except (KeyError, AttributeError):  # also of a local function
        is_named = False
    return (pkgutil.resolve_name, (f"{module}:{name}",)) if is_named else (type(made), (made.fn, made.config))
