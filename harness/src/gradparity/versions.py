"""versions: what a result depends on besides the program.

In: nothing. Out: versions of torch, Python, gradparity and of what the subjects use, as texts.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("gradparity", "retrograd", "triton", "numpy")


def versions() -> dict[str, str]:
    """By name, the version; packages that are not installed are left out."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
