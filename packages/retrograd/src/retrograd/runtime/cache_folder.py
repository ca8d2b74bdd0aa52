"""Finds a usable folder for Inductor's cache.

In: the environment. Out: Inductor's folder; or a temporary one instead, with one warning. torch reads the
folder when Dynamo is imported, so this module imports nothing from torch.
"""

from __future__ import annotations

import atexit
import getpass
import os
import shutil
import tempfile
import warnings

from retrograd.errors import FallbackWarning, Reason, Refusal

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def folder_in_use() -> str:
    """Inductor's folder. If it cannot be created or written, this process and its children use a temporary
    one instead.

    Raises:
        Refusal: a temporary folder cannot be created either.
    """
    folder = os.path.abspath(os.environ.get(_VARIABLE) or _default())
    try:
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return folder
        why = "it cannot be written"
    except OSError as error:
        why = error.strerror or str(error)
    try:
        made = tempfile.mkdtemp(prefix="retrograd-")
    except OSError as error:
        raise Refusal("cache-unusable", f"{folder} cannot be used ({why}), nor any other: {error}") from error
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    os.environ[_VARIABLE] = made
    reason = Reason(
        "cache-unusable",
        f"[cache-unusable] compiled code is kept for this process only: {folder} cannot be used ({why})",
        "backends.inductor",
        way_out=f"{_VARIABLE}, with a folder that can be made and written",
    )
    warnings.warn(str(reason), FallbackWarning, stacklevel=2)
    return made


def _default() -> str:
    """torch's default folder."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{''.join(map(_plain, user))}")


def _plain(letter: str) -> str:
    return "_" if letter in '\\/:*?"<>|' else letter
