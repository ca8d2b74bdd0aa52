"""Import every module of a package, in an environment that holds what its wheel declares and nothing else.

In: the package's name, and names of optional packages that are absent there. Out: an error that names each
other package that a module imports and that is not installed.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys


def absent(name: str) -> dict[str, list[str]]:
    """The packages that modules of `name` import and that are not installed, with these modules."""
    found: dict[str, list[str]] = {}
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        if not module.name.endswith(".__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                found.setdefault(str(error.name), []).append(module.name)
    return found


if __name__ == "__main__":
    package, *optional = sys.argv[1:]
    assert absent(package).keys() == {*optional}, absent(package)
