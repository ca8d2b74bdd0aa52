"""Saved tensors that somebody changes in place while the backward runs.

In: the tensors that the engine collected, whose versions it has checked. Out: which of them were changed
since. Eager checks a saved tensor when its node reads it; a plan must do so after user code has run.
The text of the error follows ``SavedVariable::unpack`` in ``torch/csrc/autograd/saved_variable.cpp``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from retrograd._torch.state import without_torch_functions

Key = TypeVar("Key", bound=Hashable)


class Versions(Generic[Key]):
    """The versions of tensors at one time.

    Args:
        tensors: by key; what is no tensor, or tracks no version, is left out.
    """

    @without_torch_functions
    def __init__(self, tensors: Mapping[Key, Any]) -> None:
        self._versions = {
            key: tensor._version
            for key, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        }

    @classmethod
    def taken(cls, versions: Iterable[tuple[Key, int | None]]) -> Versions[Key]:
        """Versions that somebody took with `versions_of`."""
        found: Versions[Key] = cls({})
        found._versions = {key: version for key, version in versions if version is not None}
        return found

    def renamed(self, names: Iterable[tuple[Key, Key]]) -> Versions[Key]:
        """The same versions under other keys, given as (old, new); keys without a new one are dropped."""
        renamed: Versions[Key] = Versions({})
        renamed._versions = {new: self._versions[old] for old, new in names if old in self._versions}
        return renamed

    @without_torch_functions
    def changed(self, keys: Iterable[Key], tensors: Mapping[Key, Any]) -> dict[Key, str]:
        """Of `keys`, those whose tensor was changed in place since, with eager's error text."""
        return {
            key: modified_error(tensors[key], self._versions[key])
            for key in keys
            if key in self._versions and tensors[key]._version != self._versions[key]
        }


def modified_error(tensor: torch.Tensor, expected: int) -> str:
    """What eager says when a saved tensor is not at the `expected` version."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}]{_history(tensor)} is at version {tensor._version}; "
        f"expected version {expected} instead. Hint: enable anomaly detection to find the operation that "
        "failed to compute its gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False)."
    )


def _history(tensor: torch.Tensor) -> str:
    node = tensor.grad_fn
    return "" if node is None else f", which is output {tensor.output_nr} of {node.name()},"


def versions_of(values: Sequence[Any]) -> list[int | None]:
    """The version of each; None for what tracks none."""
    if _PLAIN.issuperset(map(type, values)):
        try:
            return [value._version for value in values]
        except RuntimeError:  # an inference tensor is among them
            pass
    return _versions_of_any(values)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@without_torch_functions
def _versions_of_any(values: Sequence[Any]) -> list[int | None]:
    return [
        value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None
        for value in values
    ]
