"""Finds the user's line that called us.

In: the stack of this thread. Out: the innermost line outside of torch, contextlib and us, for warnings and
reports.
"""

from __future__ import annotations

import os
import sys
from types import FrameType


def users_level() -> int:
    """The ``stacklevel`` with which a warning from the caller shows the user's line."""
    return _users_frame(sys._getframe(1))[1]


def users_line() -> str:
    """The user's line, such as ``train.py:31``; empty if no user's code is running."""
    frame, _ = _users_frame(sys._getframe(1))
    return "" if _is_ours(frame) else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _users_frame(frame: FrameType) -> tuple[FrameType, int]:
    level = 1
    while frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    return frame, level


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name == "contextlib" or name.startswith(("retrograd.", "torch."))
