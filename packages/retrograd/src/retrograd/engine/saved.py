"""The tensors that autograd nodes have saved: read, and exchanged for others.

In: nodes of an autograd graph. Out: their saved tensors, by the attributes through which torch shows them
(``torch/csrc/autograd/python_saved_variable_hooks.h``). A tensor is exchanged by hooks on its place: its
history stays, and nothing that was in memory for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from retrograd.engine.function_code import reads_saved_tensors
from retrograd.engine.nodes import versions_of
from retrograd.runtime.modes import without_torch_functions

_RAW = "_raw_saved_"
#: the names of torch's own nodes: they save tensors nowhere else. Nodes of Functions, of operators in other
#: libraries, and of changes through views do.
_OWN = re.compile(r"\w+Backward\d+|torch::autograd::(AccumulateGrad|CopyBackwards)")


def saved_name(node: Any, hook: Callable[..., Any], packed: Any) -> str | None:
    """Under which name `node` gives the tensor that was packed into `packed`; None if it cannot be told."""
    names = [
        f"_saved_{attribute}"
        for attribute, place, raw in _saved(node)
        # Lists of saved tensors are left out: torch reads them as a whole only.
        if place is None and raw.unpack_hook is hook and raw.data is packed
    ]
    if len(names) > 1 and not (isinstance(packed, torch.Tensor) and len(set(node.next_functions)) == 1):
        return None  # tensors of different history may have been packed into one value
    return names[0] if names else None


class AsSaved:
    """Inside, tensors have the versions that they had when this was made: what user code has changed in place
    since can be released, though not read."""

    def __init__(self, values: Sequence[Any]) -> None:
        versions = zip(values, versions_of(values), strict=True)
        self._before = [(value, version) for value, version in versions if version is not None]
        self._now: list[tuple[torch.Tensor, int]] = []

    @without_torch_functions
    def __enter__(self) -> None:
        changed = [(value, version) for value, version in self._before if value._version != version]
        self._now = [(value, value._version) for value, _ in changed]
        _set_versions(changed)

    @without_torch_functions
    def __exit__(self, *error: object) -> None:
        _set_versions(self._now)


def _set_versions(pairs: Sequence[tuple[torch.Tensor, int]]) -> None:
    if pairs:
        torch._C._autograd._unsafe_set_version_counter(*map(tuple, zip(*pairs, strict=True)))


def saves_tensors(node: Any) -> bool:
    """Whether `node` keeps tensors that it reads, and so cannot run when they are freed. A Function that asks
    for them cannot either if there are none. What is an attribute of its context is never freed. The
    node of a change through a view frees the operation that it stands for."""
    if node.name().endswith("CopySlices"):
        return True
    function = getattr(node, "_forward_cls", None)
    reads = None if function is None else reads_saved_tensors(function)
    return any(raw.data is not None for _, _, raw in _saved(node)) if reads is None else reads


def saved_tensors_of(node: Any) -> list[tuple[str, int | None, torch.Tensor]] | None:
    """The tensors that a node has saved, each with its attribute, and its place if that is a list; None if it
    may have some elsewhere, or if a user's hooks have packed one.

    Raises:
        RuntimeError: one was changed in place since.
    """
    if hasattr(node, "apply") or not _OWN.fullmatch(node.name()):
        return None
    found = []
    for attribute, place, raw in _saved(node):
        if raw.unpack_hook is not None:
            return None
        value = getattr(node, f"_saved_{attribute}")
        tensor = value if place is None else value[place]
        if tensor is not None:
            found.append((attribute, place, tensor))
    return found


def kept_by(node: Any) -> Iterator[torch.Tensor]:
    """The tensors whose versions a node checks when it runs: all that it has saved, read or not, or that a
    Function asks its context for. What hooks have packed is not checked."""
    function = getattr(node, "_forward_cls", None)
    if function is None or reads_saved_tensors(function):
        for _, _, raw in _saved(node):
            if raw.unpack_hook is None and raw.data is not None:
                yield raw.data


def put_in_place(node: Any, attribute: str, place: int | None, value: torch.Tensor) -> None:
    """Have the node read `value` where it has saved another tensor; its history stays that of the other."""
    raw = getattr(node, _RAW + attribute)
    (raw if place is None else raw[place]).register_hooks(lambda _: None, lambda _: value)


def _saved(node: Any) -> Iterator[tuple[str, int | None, Any]]:
    """What holds each saved tensor, with its attribute, and its place if that is a list."""
    for name in dir(node):
        if name.startswith(_RAW):
            found = getattr(node, name)
            each = enumerate(found) if isinstance(found, tuple) else [(None, found)]
            yield from ((name.removeprefix(_RAW), place, raw) for place, raw in each)
