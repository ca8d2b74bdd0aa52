"""The tables of facts, which are TOML files beside this module.

In: the name of a file, without its ending. Out: what stands in it.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def read_table(name: str) -> dict[str, Any]:
    """What stands in the file; it is read once."""
    return tomllib.loads(resources.files(__package__).joinpath(f"{name}.toml").read_text("utf-8"))
