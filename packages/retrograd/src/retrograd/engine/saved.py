"""Reads the tensors that autograd nodes have saved, and replaces them.

In: nodes of an autograd graph. Out: their saved tensors, read through torch's ``_saved_*`` attributes
(``torch/csrc/autograd/python_saved_variable_hooks.h``). To replace a tensor, we register hooks on its saved
variable: the history stays, and the memory is freed.
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
#: The names of torch's own nodes, whose saved tensors are all in these attributes. Nodes of Functions, of
#: operators in other libraries, and of in-place changes through views save tensors in other places too.
_OWN = re.compile(r"\w+Backward\d+|torch::autograd::(AccumulateGrad|CopyBackwards)")


def saved_name(node: Any, hook: Callable[..., Any], packed: Any) -> str | None:
    """The attribute of `node` that returns the tensor packed into `packed`; None if it is ambiguous."""
    names = [
        f"_saved_{attribute}"
        for attribute, place, raw in _saved(node)
        # Lists of saved tensors are excluded: torch can only read such a list as one.
        if place is None and raw.unpack_hook is hook and raw.data is packed
    ]
    if len(names) > 1 and not (isinstance(packed, torch.Tensor) and len(set(node.next_functions)) == 1):
        return None  # tensors with different histories may have been packed into one value
    return names[0] if names else None


class AsSaved:
    """Inside, tensors have the given versions: by default, those that they had when this object was made.
    Saved tensors that user code has modified since can then be released, and nothing checks them."""

    def __init__(self, values: Sequence[Any], known: Sequence[int | None] | None = None) -> None:
        versions = zip(values, versions_of(values) if known is None else known, strict=True)
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
    """Whether `node` saves tensors that it reads, so that it cannot run after they are freed. A Function that
    reads ``saved_tensors`` counts even if it saved none, since eager raises then too. Attributes of a context
    are never freed. A ``CopySlices`` node frees the operation that it wraps."""
    if node.name().endswith("CopySlices"):
        return True
    function = getattr(node, "_forward_cls", None)
    reads = None if function is None else reads_saved_tensors(function)
    return any(raw.data is not None for _, _, raw in _saved(node)) if reads is None else reads


def saved_tensors_of(node: Any) -> list[tuple[str, int | None, torch.Tensor]] | None:
    """The tensors that a node has saved, each with its attribute and its index if that is a list. None if the
    node may save tensors in other places, or if a user's hooks have packed one.

    Raises:
        RuntimeError: one was modified in place since it was saved.
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
    """The tensors whose versions a node checks when it runs: everything it has saved, read or not. A Function
    checks them only if it reads ``saved_tensors``. Tensors that hooks have packed are not checked."""
    function = getattr(node, "_forward_cls", None)
    if function is None or reads_saved_tensors(function):
        for _, _, raw in _saved(node):
            if raw.unpack_hook is None and raw.data is not None:
                yield raw.data


def put_in_place(node: Any, attribute: str, place: int | None, value: torch.Tensor) -> None:
    """Make the node read `value` in place of a tensor that it has saved; the saved tensor's history stays."""
    raw = getattr(node, _RAW + attribute)
    (raw if place is None else raw[place]).register_hooks(lambda _: None, lambda _: value)


def _saved(node: Any) -> Iterator[tuple[str, int | None, Any]]:
    """Each raw saved variable with its attribute, and its index if the attribute is a list."""
    for name in dir(node):
        if name.startswith(_RAW):
            found = getattr(node, name)
            each = enumerate(found) if isinstance(found, tuple) else [(None, found)]
            yield from ((name.removeprefix(_RAW), place, raw) for place, raw in each)
