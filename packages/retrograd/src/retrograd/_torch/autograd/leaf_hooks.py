"""Hooks that run when the gradient of a leaf has accumulated.

In: the inputs of a call. Out: whether any has such hooks. They may free the gradient at once, as an optimizer
in backward does, so that it matters how many gradients there are at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def has_waiting_hooks(values: Iterable[Any]) -> bool:
    """Whether one of `values` is a leaf with post-accumulate-grad hooks."""
    return any(bool(value._post_accumulate_grad_hooks) for value in values if type(value) in _PLAIN)
