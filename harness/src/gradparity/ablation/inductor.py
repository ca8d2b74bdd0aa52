"""Which part of Inductor breaks a case, by torch's own bisector.

In: a question that is asked again and again: does the case agree now? Out: the subsystem, and the pass or the
operator whose lowering, left out, makes it agree.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TARGET = re.compile(r"aten\.\w+(?:\.\w+)?|prims\.\w+(?:\.\w+)?|inductor_\w+")


@dataclass(frozen=True)
class Part:
    """A subsystem of Inductor, such as "lowerings", and what was bisected in it: an operator, a pass."""

    subsystem: str
    operator: str = ""

    def describe(self) -> str:
        """ "lowerings: aten.sin.default"."""
        return ": ".join(text for text in (self.subsystem, self.operator) if text)


def bisected(agrees: Callable[[], bool]) -> Part | None:
    """Runs the question under ever fewer passes and lowerings. None if nothing in Inductor changes the
    answer, or this torch has no bisector.
    """
    try:
        from torch._inductor.compiler_bisector import CompilerBisector
    except ImportError:
        return None
    with contextlib.redirect_stdout(io.StringIO()), _without_caches():
        found = CompilerBisector.do_bisect(agrees)
    if found is None or found.backend != "inductor" or not found.subsystem:
        return None
    told = TARGET.search(str(found.debug_info or ""))
    return Part(str(found.subsystem), told.group(0) if told else _one_line(found.debug_info))


def _without_caches() -> contextlib.AbstractContextManager[None]:
    """A cached graph would answer for one that was compiled otherwise."""
    settings: Any = torch.compiler.config
    context: contextlib.AbstractContextManager[None] = settings.patch(force_disable_caches=True)
    return context


def _one_line(text: object) -> str:
    return " ".join(str(text or "").split())[:120]
