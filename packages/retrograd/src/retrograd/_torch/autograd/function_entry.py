"""The shortest way to apply an ``autograd.Function``.

In: a Function without ``setup_context``. Out: its ``apply`` below the checks for functorch transforms, for
callers that know that none is active.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def entry_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` calls when no transform is active: torch's C++, bound to the class."""
    entry: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return entry
