"""versions: what a result depends on besides the program.

In: nothing, or a range of releases. Out: versions of torch, Python, gradparity and of what the subjects use,
as texts; whether the installed torch is in the range.
"""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("gradparity", "retrograd", "triton", "numpy")


def is_within(span: str, version: str | None = None) -> bool:
    """Whether `version`, by default torch's, is in `span`: "2.11..2.13", "2.14.." or "..2.13"; ends count.

    Raises:
        ValueError: `span` is no range.
    """
    found = re.fullmatch(r"(\d+\.\d+|)\.\.(\d+\.\d+|)", span)
    if found is None:
        raise ValueError(f"{span!r} is no range of releases like 2.11..2.13, 2.14.. or ..2.13")
    first, last = found.groups()
    release = _release(version or torch.__version__)
    return (not first or _release(first) <= release) and (not last or release <= _release(last))


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


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
