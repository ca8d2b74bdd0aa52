"""Flags at the end of a subject's name, which stand for options of retrograd.

In: "retrograd-live:inductor+cudagraphs". Out: the backend, "inductor", and the options, `cudagraphs=True`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FLAGS: Mapping[str, Mapping[str, Any]] = {
    "cudagraphs": {"cudagraphs": True},
    "regions": {"regions": 1},
}
"""By flag, the options that it adds. Regions begin at one autograd node, so that small programs have some."""


def flagged(names: Iterable[str]) -> list[str]:
    """Each name with each flag."""
    return [f"{name}+{flag}" for name in names for flag in FLAGS]


def without_flags(name: str) -> str:
    """The name in front of its flags, if all of them are known; else the whole name."""
    head, colon, rest = name.partition(":")
    backend, *flags = rest.split("+")
    return f"{head}{colon}{backend}" if flags and FLAGS.keys() >= set(flags) else name


def backend_and_options(name: str) -> tuple[str, dict[str, Any]]:
    """What stands behind the colon, and the options of the flags behind it. Raises KeyError for an unknown
    flag."""
    backend, *flags = name.partition(":")[2].split("+")
    return backend, {key: value for flag in flags for key, value in FLAGS[flag].items()}
