"""How the functions that compile themselves are copied and pickled.

In: what was made of a function and the options. Out: what ``__reduce__`` returns, without compiled code.
"""

from __future__ import annotations

import pkgutil
from typing import Any


def reduced(made: Any) -> tuple[Any, ...]:
    """By name, if the name of ``made.fn`` leads to `made`, as after decoration: a copy is `made` itself, as a
    copy of a function is. Otherwise the function and the options, and a copy compiles itself again.
    """
    name = f"{getattr(made.fn, '__module__', '')}:{getattr(made.fn, '__qualname__', '')}"
    try:
        is_named = pkgutil.resolve_name(name) is made
    except (ValueError, ImportError, AttributeError):  # a local function, or a name that leads nowhere
        is_named = False
    return (pkgutil.resolve_name, (name,)) if is_named else (type(made), (made.fn, made.config))
