"""Reads the tables of facts, which are TOML files in this folder.

In: the name of a file, without its ending. Out: its contents.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def read_table(name: str) -> dict[str, Any]:
    """The contents of the file, which is read once."""
    return tomllib.loads(resources.files(__package__).joinpath(f"{name}.toml").read_text("utf-8"))
