"""Is a folder a safe place to read compiled code from?

In: a path. Out: why not, or None. Inductor keeps graphs on disk as pickles, and reading a pickle runs what it
says: whoever can write to the folder can run code in this process.
"""

from __future__ import annotations

import os
import stat


def why_not_trusted(folder: str) -> str | None:
    """Why nothing that is pickled should be read from `folder`; None if it is this user's own (or root's)."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        found = os.stat(folder)
    except OSError as error:
        return f"it cannot be examined: {error.strerror}"
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, not to this one ({os.geteuid()})"
    if found.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    return None
