"""What makes two calls of an ATen graph interchangeable.

In: a call. Out: a `TokenisedCall`: a token that equal calls share, and the values that it reads, in their
places.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import has_effect, is_collective, is_higher_order, is_random, is_wait

_OPERAND = ("operand",)
#: arguments that are the same if they are equal.
_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
#: notes of the user's in ``node.meta``, by which a code generator may go.
_NOTES = "custom"


@dataclass(frozen=True)
class TokenisedCall:
    """A call.

    Attributes:
        token: equal for calls that compute the same of operands that are alike.
        operands: the values that it reads, one for each place where it does.
        may_repeat: whether it may be part of a region that is called several times.
    """

    token: Hashable
    operands: tuple[fx.Node, ...]
    may_repeat: bool


def call_of(node: fx.Node) -> TokenisedCall:
    """Describe a ``call_function`` node.

    Calls with effects other than drawing random numbers, calls of operators of higher order, communication
    and convolutions whose layout is open are equal to nothing but themselves.
    """
    operands: list[fx.Node] = []
    arguments = _frozen((node.args, node.kwargs), operands)
    value = node.meta.get("val")
    if not _may_repeat(node) or value is None:
        return TokenisedCall((node,), tuple(operands), False)
    notes = repr(node.meta[_NOTES]) if _NOTES in node.meta else None
    return TokenisedCall((node.target, arguments, metadata_of(value), notes), tuple(operands), True)


def _may_repeat(node: fx.Node) -> bool:
    if is_higher_order(node.target) or is_collective(node) or is_wait(node) or _is_laid_out_freely(node):
        return False
    return is_random(node) or not has_effect(node)


def _is_laid_out_freely(node: fx.Node) -> bool:
    """Whether the call is a convolution for which a code generator may choose another layout. It does so for
    all of a graph: each border would bring copies from one layout to the other."""
    if node.target is not torch.ops.aten.convolution.default:
        return False
    value: Any = node.meta.get("val")
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim() if value is not None else 0)
    return last is not None and not value.is_contiguous(memory_format=last)


def _frozen(value: Any, operands: list[fx.Node]) -> Hashable:
    """The arguments as a value that can be compared; 1, 1.0 and True are three different ones."""
    kind = type(value)
    if isinstance(value, fx.Node):
        operands.append(value)
        return _OPERAND
    if kind is int or kind is str or value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return ("items", *[_frozen(item, operands) for item in value])
    if isinstance(value, dict):
        return ("entries", *[(key, _frozen(item, operands)) for key, item in value.items()])
    if isinstance(value, slice):
        return ("slice", *[_frozen(item, operands) for item in (value.start, value.stop, value.step)])
    if kind in (float, bool, complex):
        return kind.__name__, repr(value)
    return kind, str(value) if isinstance(value, torch.SymInt) else id(value)


def metadata_of(value: Any) -> Hashable:
    """Kind, layout and sizes of an example value; symbolic sizes by their expressions."""
    if isinstance(value, torch.Tensor):
        numbers = _numbers(value.shape), _numbers(value.stride())
        return value.dtype, value.device, *numbers, value.is_conj(), value.is_neg()
    if isinstance(value, (tuple, list)):
        return ("items", *map(metadata_of, value))
    return type(value), str(value)


def _numbers(sizes: Any) -> tuple[Hashable, ...]:
    return tuple([size if type(size) is int else str(size) for size in sizes])
