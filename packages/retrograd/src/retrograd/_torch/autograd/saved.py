"""The tensors that autograd nodes have saved: read, and exchanged for others.

In: nodes of an autograd graph. Out: their saved tensors, by the attributes through which torch shows them
(``torch/csrc/autograd/python_saved_variable_hooks.h``). A tensor is exchanged by hooks on its place: its
history stays, and nothing that was in memory for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

_RAW = "_raw_saved_"
#: the names of torch's own nodes: they save tensors nowhere else. Nodes of Functions, of operators in other
#: libraries, and of changes through views do.
_OWN = re.compile(r"\w+Backward\d+|torch::autograd::(AccumulateGrad|CopyBackwards)")


def saved_tensors_of(node: Any) -> list[tuple[str, int | None, torch.Tensor]] | None:
    """The tensors that a node has saved, each with its attribute, and its place if that is a list; None if it
    may have some elsewhere, or if a user's hooks have packed one.

    Raises:
        RuntimeError: one was changed in place since.
    """
    if hasattr(node, "apply") or not _OWN.fullmatch(node.name()):
        return None
    found = []
    for attribute in _attributes(node):
        for place, raw in _places(getattr(node, _RAW + attribute)):
            if raw.unpack_hook is not None:
                return None
            value = getattr(node, f"_saved_{attribute}")
            tensor = value if place is None else value[place]
            if tensor is not None:
                found.append((attribute, place, tensor))
    return found


def put_in_place(node: Any, attribute: str, place: int | None, value: torch.Tensor) -> None:
    """Have the node read `value` where it has saved another tensor; its history stays that of the other."""
    for number, raw in _places(getattr(node, _RAW + attribute)):
        if number == place:
            raw.register_hooks(lambda _: None, lambda _: value)


def _attributes(node: Any) -> list[str]:
    return [name.removeprefix(_RAW) for name in dir(node) if name.startswith(_RAW)]


def _places(raw: Any) -> Iterator[tuple[int | None, Any]]:
    if isinstance(raw, tuple):
        yield from enumerate(raw)
    else:
        yield None, raw
