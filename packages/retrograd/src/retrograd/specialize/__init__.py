"""Code for each kind of call: found again by a key and a guard, made where there is none, bounded.

In: what a call is like, and a function that captures and compiles for it. Out: the code, or the reason for
which the call runs as eager runs it. ``aot.function`` and the graphs of Dynamo share this mechanism.
"""

from __future__ import annotations

from retrograd.specialize.callable import (
    MOST_FAILURES,
    Guard,
    GuardedCache,
    Specialized,
    Variant,
    why_failed,
)
from retrograd.specialize.guard import CallGuard, MemoryGuard, guard_as_traced

__all__ = [
    "MOST_FAILURES",
    "CallGuard",
    "Guard",
    "GuardedCache",
    "MemoryGuard",
    "Specialized",
    "Variant",
    "guard_as_traced",
    "why_failed",
]
